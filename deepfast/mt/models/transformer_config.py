"""Sizes and choices of the Transformer, checked before anything is built."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepfast.mt.models.fusions import Fusions, check_read
from deepfast.nn import DLCL, LatentDepth, LayerFusion
from deepfast.nn.connections.connection import (
    ATTENTION_RESIDUALS,
    CONNECTIONS,
    PRESETS,
    dlcl_options,
)
from deepfast.nn.connections.fusion import FUSIONS
from deepfast.ops.activation import KINDS

OPTIONS = {
    "dlcl": (DLCL, ("num_layers", "dim", "backend")),
    "latent": (LatentDepth, ("num_layers", "languages")),
    "fusion": (
        LayerFusion,
        ("num_states", "dim", "kind", "source_norm", "own_embedding", "backend"),
    ),
}
"""Field that holds arguments of a module -> that module, and the arguments that follow from the
model."""


def option_types(name: str) -> dict[str, Any]:
    """Argument -> type of a field of `OPTIONS`."""
    module, own = OPTIONS[name]
    parameters = inspect.signature(module, eval_str=True).parameters
    return {key: p.annotation for key, p in parameters.items() if key not in own}


@dataclass(kw_only=True)
class TransformerConfig:
    """Sizes and choices of a `Transformer`."""

    vocab_size: int
    """V, of the source and, where target_vocab_size is None, of the target too."""
    target_vocab_size: int | None = None
    """V of the target where it has a vocabulary of its own."""
    padding_idx: int = 0
    """Id of the padding token."""
    share_embeddings: str = "all"
    """"all": one matrix for source, target and output; "decoder": target and output share one, the
    source has its own; "none": each has its own."""
    first_position: int = 0
    """The number of a sentence's first position, for the sinusoids."""
    dim: int = 512
    """D."""
    heads: int = 8
    """H, a divisor of dim."""
    ffn_dim: int = 2048
    """F."""
    encoder_layers: int = 6
    """L of the encoder."""
    decoder_layers: int = 6
    """L of the decoder."""
    encoder_connection: str = "dlcl"
    """One of deepfast.nn.connections.connection.CONNECTIONS."""
    decoder_connection: str = "residual"
    """The same of the decoder."""
    attnres_block: int | None = None
    """Layers of a block under "block_attnres"; None: an eighth of a side's, rounded up."""
    cross_attention: str = "top"
    """"top": decoder layers attend to the encoder's output; "transparent": each to a mixture of its
    own of all encoder layers."""
    norm: str = "pre"
    """"pre" or "post"."""
    activation: str = "relu"
    """"relu" or "gelu"."""
    dropout: float = 0.1
    """On embeddings and on each branch before its residual add."""
    attention_dropout: float = 0.0
    """On attention weights."""
    activation_dropout: float = 0.0
    """After the feed-forward activation."""
    mixture_dropout: float = 0.1
    """On the weights of transparent attention's mixtures."""
    dlcl: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides; norm None: no LN in the mixture."""
    latent: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.LatentDepth, for the sides with connection "latent"."""
    languages: dict = field(default_factory=dict)
    """Language -> id of the tag that every source sentence begins with; empty where there is one
    language. Latent depth chooses layers for each of them."""
    encoder_fusion: str | None = None
    """One of deepfast.nn.connections.fusion.FUSIONS over the embedding and all encoder layers, or
    None."""
    decoder_fusion: str | None = None
    """The same over the decoder's."""
    fusion: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.LayerFusion, for both sides; each must be one that the
    fusion of a side reads, deepfast.nn.connections.fusion.OPTIONS."""
    backend: str | None = None
    """See deepfast.backend."""

    def __post_init__(self):
        self._check_whole(
            "vocab_size", "dim", "heads", "ffn_dim", "encoder_layers", "decoder_layers"
        )
        if self.dim % self.heads or self.dim % 2:
            raise ValueError(
                f"dim: expected an even multiple of heads {self.heads}, got {self.dim}"
            )
        if not isinstance(self.padding_idx, int) or not 0 <= self.padding_idx < self.vocab_size:
            raise ValueError(
                f"padding_idx: expected an id below vocab_size {self.vocab_size}, "
                f"got {self.padding_idx!r}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "mixture_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")
        self._check_choice("norm", ("pre", "post"))
        self._check_choice("activation", KINDS)
        self._check_choice("cross_attention", ("top", "transparent"))
        self._check_choice("share_embeddings", ("all", "decoder", "none"))
        self._check_vocabularies()
        self._check_dicts("dlcl", "latent", "languages", "fusion")
        self._check_connections("dlcl", "encoder_connection", "decoder_connection")
        self._check_attnres("attnres_block", "encoder_connection", "decoder_connection")
        self._check_languages()
        self._check_latent()
        self._check_fusion()

    def _check_whole(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")

    def _check_dicts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, dict):
                raise ValueError(f"{name}: expected a dict, got {value!r}")

    def _check_choice(self, name: str, allowed: Iterable[str | None]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            expected = ", ".join(map(str, allowed))
            raise ValueError(f"{name}: expected one of {expected}, got {value!r}")

    def _check_options(
        self, name: str, kind: str, needs: str, arguments: Mapping[str, dict]
    ) -> None:
        """The field ``name`` of options of the kind ``kind``: its keys, that it is ``needs`` which
        asks for it, and its values, by making the module of each of ``arguments``, which has them.

        arguments: what is tried -> all arguments of the module.
        """
        options = getattr(self, name)
        if options and not arguments:
            raise ValueError(
                f"{name}: expected a side with {needs} for {sorted(options, key=str)}, got none"
            )
        known = option_types(kind)
        unknown = sorted(map(str, set(options) - set(known)))
        if unknown:
            raise ValueError(
                f"{name}: expected keys of {', '.join(sorted(known))}, got {', '.join(unknown)}"
            )
        module = OPTIONS[kind][0]
        for tried in arguments.values():
            try:
                # Of the meta device: neither memory nor random numbers.
                with torch.device("meta"):
                    module(**tried)
            except (ValueError, TypeError) as error:
                reason = str(error).removeprefix(f"{module.__name__}: ")
                raise ValueError(f"{name}: {reason}") from error

    def _check_vocabularies(self) -> None:
        size, first = self.target_vocab_size, self.first_position
        least = self.padding_idx + 1
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)
                                 or size < least):  # fmt: skip
            raise ValueError(
                f"target_vocab_size: expected None or a whole number of at least {least}, "
                f"got {size!r}"
            )
        if self.share_embeddings == "all" and size not in (None, self.vocab_size):
            raise ValueError(
                f"target_vocab_size: expected the source's {self.vocab_size} where "
                f"share_embeddings is all, got {size}"
            )
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ValueError(f"first_position: expected a whole number from 0, got {first!r}")

    def _check_connections(self, dlcl: str, *sides: str) -> None:
        """The connection of each side, and the field with the options of those that are DLCL."""
        for side in sides:
            self._check_choice(side, CONNECTIONS)
        mixed = {getattr(self, side) for side in sides} & PRESETS.keys()
        options = getattr(self, dlcl)
        known = {key: value for key, value in options.items() if key in option_types("dlcl")}
        arguments = {
            name: {"num_layers": 1, "dim": self.dim} | dlcl_options(name, self.norm, known)
            for name in sorted(mixed)
        }
        self._check_options(dlcl, "dlcl", "connection 'dlcl'", arguments)

    def _check_attnres(self, field: str, *sides: str) -> None:
        """Attention residuals of these sides, and the field with the size of their blocks."""
        connections = {side: getattr(self, side) for side in sides}
        for side, connection in connections.items():
            if self.norm != "pre" and connection in ATTENTION_RESIDUALS:
                raise ValueError(
                    f"{side}: expected norm pre with attention residuals, got norm {self.norm!r}"
                )
        block = getattr(self, field)
        if block is not None and (type(block) is not int or block < 1):
            raise ValueError(
                f"{field}: expected a whole number of at least 1 or None, got {block!r}"
            )
        if block is not None and "block_attnres" not in connections.values():
            raise ValueError(f"{field}: expected a side with 'block_attnres', got none")

    def _check_languages(self) -> None:
        tags = list(self.languages.values())
        within = all(isinstance(tag, int) and 0 <= tag < self.vocab_size for tag in tags)
        if not within or len(set(tags)) < len(tags) or self.padding_idx in tags:
            raise ValueError(
                f"languages: expected a tag's id below vocab_size {self.vocab_size} of its own for "
                f"each, got {self.languages!r}"
            )

    def _check_latent(self) -> None:
        sides = {
            side: {"num_layers": getattr(self, f"{side}_layers")} | self.latent
            for side in ("encoder", "decoder")
            if getattr(self, f"{side}_connection") == "latent"
        }
        self._check_options("latent", "latent", "connection 'latent'", sides)

    def _check_fusion(self) -> None:
        sides = [side for side in ("encoder", "decoder") if getattr(self, f"{side}_fusion")]
        arguments = {}
        for side in ("encoder", "decoder"):
            self._check_choice(f"{side}_fusion", (None, *FUSIONS))
        for side in sides:
            self._check_all_states(f"{side}_fusion", side)
            kind = getattr(self, f"{side}_fusion")
            arguments[side] = {"num_states": 2, "dim": self.dim, "kind": kind} | self.fusion
        self._check_options("fusion", "fusion", "a fusion", arguments)
        check_read(vars(self))
        if self.cross_attention == "transparent":
            self._check_all_states("cross_attention", "encoder")
            if self.encoder_fusion is not None:
                raise ValueError(
                    f"encoder_fusion: expected None where cross_attention is transparent, "
                    f"got {self.encoder_fusion!r}"
                )

    def _check_all_states(self, name: str, side: str) -> None:
        """What reads the states of all layers needs all layers to be there."""
        if getattr(self, f"{side}_connection") == "latent":
            raise ValueError(
                f"{name}: expected another {side}_connection than latent, which leaves layers out, "
                f"for {getattr(self, name)!r}"
            )

    def side(self, name: str) -> dict:
        """Arguments of the stack of a side, "encoder" or "decoder"."""
        connection = getattr(self, f"{name}_connection")
        return self.stack(connection, self.dlcl, self.attnres_block, name)

    def stack(self, connection: str, dlcl: dict, block: int | None, name: str) -> dict:
        """Arguments of a stack with this connection, on the side ``name``."""
        names = ("dim", "heads", "ffn_dim", "norm", "activation", "dropout", "attention_dropout",
                 "activation_dropout", "backend")  # fmt: skip
        options = {key: getattr(self, key) for key in names}
        latent = self.latent | {"languages": len(self.languages) or 1}
        # Two sides of one size must not draw the same.
        latent["seed"] = 2 * latent.get("seed", 0) + (name == "decoder")
        return options | {
            "connection": connection,
            "dlcl": dlcl if connection in PRESETS else None,
            "block": block if connection == "block_attnres" else None,
            "latent": latent if connection == "latent" else None,
        }

    def fusions(self) -> Fusions:
        """The fusions of the layers of both sides."""
        sides = {
            "encoder": (self.encoder_fusion, self.encoder_layers),
            "decoder": (self.decoder_fusion, self.decoder_layers),
        }
        return Fusions(
            self.dim, sides, source_norm=self.norm == "pre", backend=self.backend, **self.fusion
        )


def base(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's base size: 512 wide, 8 heads, 2048 feed-forward."""
    return TransformerConfig(**{"vocab_size": vocab_size, "dim": 512, "heads": 8, "ffn_dim": 2048}
                             | changes)  # fmt: skip


def big(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's big size: 1024 wide, 16 heads, 4096 feed-forward, dropout 0.3."""
    sizes = {"dim": 1024, "heads": 16, "ffn_dim": 4096, "dropout": 0.3}
    return TransformerConfig(**{"vocab_size": vocab_size} | sizes | changes)
