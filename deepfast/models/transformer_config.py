"""Sizes and choices of the Transformer for translation."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepfast.nn import DLCL, LatentDepth
from deepfast.nn.connection import CONNECTIONS, PRESETS, dlcl_options
from deepfast.ops.activation import KINDS


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
    """"dlcl", "residual", "denseformer" or "latent"."""
    decoder_connection: str = "residual"
    """"dlcl", "residual", "denseformer" or "latent"."""
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
        self._check_connections("dlcl", "encoder_connection", "decoder_connection")
        self._check_latent()
        self._check_languages()

    def _check_whole(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")

    def _check_choice(self, name: str, allowed: Iterable[str]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")

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
        options = getattr(self, dlcl)
        if not options:
            return
        mixed = {getattr(self, side) for side in sides} & PRESETS.keys()
        if not mixed:
            raise ValueError(
                f"{dlcl}: expected a side with connection 'dlcl' for {sorted(options)}, got none"
            )
        self._check_keys(dlcl, DLCL, {"num_layers", "dim", "backend"})
        for connection in sorted(mixed):
            dlcl_options(connection, self.norm, options)

    def _check_keys(self, name: str, module: type, own: set[str]) -> None:
        """Of a field with arguments of a module, ``own`` aside, which follow from the model."""
        known = set(inspect.signature(module).parameters) - own
        unknown = sorted(set(getattr(self, name)) - known)
        if unknown:
            raise ValueError(
                f"{name}: expected keys of {', '.join(sorted(known))}, got {', '.join(unknown)}"
            )

    def _check_latent(self) -> None:
        self._check_keys("latent", LatentDepth, {"num_layers", "languages"})
        sides = {"encoder": self.encoder_connection, "decoder": self.decoder_connection}
        latent = [name for name, connection in sides.items() if connection == "latent"]
        if self.latent and not latent:
            raise ValueError(
                f"latent: expected a side with connection 'latent' for {sorted(self.latent)}, "
                "got none"
            )
        if "encoder" in latent and self.cross_attention == "transparent":
            raise ValueError(
                "cross_attention: expected top with encoder_connection latent, whose layers may be "
                "left out, got transparent"
            )
        for name in latent:
            try:
                LatentDepth(getattr(self, f"{name}_layers"), **self.latent)
            except (ValueError, TypeError) as error:
                reason = str(error).removeprefix("LatentDepth: ")
                raise ValueError(f"latent.{reason}") from error

    def _check_languages(self) -> None:
        tags = list(self.languages.values())
        within = all(isinstance(tag, int) and 0 <= tag < self.vocab_size for tag in tags)
        if not within or len(set(tags)) < len(tags) or self.padding_idx in tags:
            raise ValueError(
                f"languages: expected a tag's id below vocab_size {self.vocab_size} of its own for "
                f"each, got {self.languages!r}"
            )

    def side(self, connection: str, number: int = 0) -> dict:
        """Arguments of the stack of a side: the encoder's is number 0, the decoder's 1."""
        names = ("dim", "heads", "ffn_dim", "norm", "activation", "dropout", "attention_dropout",
                 "activation_dropout", "backend")  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        latent = self.latent | {"languages": len(self.languages) or 1}
        # Two sides of one size must not draw the same.
        latent["seed"] = 2 * latent.get("seed", 0) + number
        return options | {
            "connection": connection,
            "dlcl": self.dlcl if connection in PRESETS else None,
            "latent": latent if connection == "latent" else None,
        }


def base(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's base size: 512 wide, 8 heads, 2048 feed-forward."""
    return TransformerConfig(**{"vocab_size": vocab_size, "dim": 512, "heads": 8, "ffn_dim": 2048}
                             | changes)  # fmt: skip


def big(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's big size: 1024 wide, 16 heads, 4096 feed-forward, dropout 0.3."""
    sizes = {"dim": 1024, "heads": 16, "ffn_dim": 4096, "dropout": 0.3}
    return TransformerConfig(**{"vocab_size": vocab_size} | sizes | changes)
