"""Sizes and choices of the Transformer, checked before anything is built."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepfast import checks
from deepfast.connections import CONNECTIONS
from deepfast.mt.models.interface import ModelConfig, target_vocab_size
from deepfast.nn import DLCL, LatentDepth, LayerFusion
from deepfast.nn.connections.dlcl import dlcl_options
from deepfast.nn.connections.fusion import FUSIONS
from deepfast.nn.connections.fusion import OPTIONS as FUSION_OPTIONS
from deepfast.nn.layer_norm import check_norms
from deepfast.policies import ATTENTION_RESIDUALS
from deepfast.reference.activation import KINDS as ACTIVATIONS

SIDES = ("encoder", "decoder")
NORMS = ("pre", "post", "deepnorm")

OPTIONS = {
    "dlcl": (DLCL, ("num_layers", "dim", "backend")),
    "latent": (LatentDepth, ("num_layers", "languages")),
    "fusion": (
        LayerFusion,
        ("num_states", "dim", "fusion_type", "source_norm", "own_embedding", "backend"),
    ),
}
"""Field that holds arguments of a module -> the module, and those of its arguments that the model
decides."""


def option_types(name: str) -> dict[str, Any]:
    """The keys of a field of `OPTIONS`, each with its type."""
    module, own = OPTIONS[name]
    parameters = inspect.signature(module, eval_str=True).parameters
    return {key: p.annotation for key, p in parameters.items() if key not in own}


@dataclass(kw_only=True)
class TransformerConfig(ModelConfig):
    """Sizes and choices of a `Transformer`."""

    share_embeddings: str = "all"
    """"all": source, target and output share one matrix; "decoder": target and output share one;
    "none": each has its own."""
    first_position: int = 0
    """The position of a sentence's first token, for the sinusoids."""
    dim: int = 512
    """D."""
    num_heads: int = 8
    """H, which must divide dim."""
    ffn_dim: int = 2048
    """F."""
    encoder_layers: int = 6
    """L of the encoder."""
    decoder_layers: int = 6
    """L of the decoder."""
    encoder_connection: str = "dlcl"
    """One of deepfast.connections.CONNECTIONS."""
    decoder_connection: str = "residual"
    """The same for the decoder."""
    attnres_block: int | None = None
    """Layers in a block under "block_attnres"; None: an eighth of the side's layers, rounded up."""
    attnres_reads: int | None = None
    """How often a layer reads attention residuals: 2 (or None): each sublayer does; 1: once."""
    cross_attention: str = "top"
    """"top": decoder layers attend to the encoder's output; "transparent": each decoder layer
    attends to its own mixture of all encoder layers."""
    init: str = "xavier"
    """How matrices begin: "xavier"; or "fan_in", from U(-b, b) with b = 1 / sqrt(inputs), biases
    and an output matrix of its own too, as in the paper on layer fusion. Embeddings begin from
    N(0, 1 / D) either way, and so does the output matrix with "xavier"."""
    norm: str = "pre"
    """"pre", "post" or "deepnorm", see `deepfast.nn.TransformerEncoder`."""
    decoder_norm: str | None = None
    """The decoder's own `norm`; None: as the encoder's."""
    norm_type: str = "layer"
    """"layer" or "rms": the norms of the layers, of the stacks and inside DLCL. Those inside
    transparent attention and fusions are layer-norms. "none": the layers and the stacks have no
    norms (pre-norm, residual or latent)."""
    activation: str = "relu"
    """"relu" or "gelu"."""
    dropout: float = 0.1
    """On embeddings and on each branch before its residual add."""
    attention_dropout: float = 0.0
    """On attention weights."""
    activation_dropout: float = 0.0
    """After the feed-forward activation."""
    mixture_dropout: float = 0.1
    """On the mixing weights of transparent attention."""
    dlcl: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides; "norm": None leaves out its norms."""
    latent: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.LatentDepth, for the sides with connection "latent"."""
    languages: dict = field(default_factory=dict)
    """Language -> id of its tag, with which its source sentences begin; empty for one language.
    Latent depth chooses layers for each language."""
    encoder_fusion: str | None = None
    """A fusion of the embedding and all encoder layers, one of
    deepfast.nn.connections.fusion.FUSIONS; None: the encoder's output is that of its last layer."""
    decoder_fusion: str | None = None
    """The same for the decoder."""
    fusion: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.LayerFusion, for both sides. The fusion of at least one side
    must read each of them: see deepfast.nn.connections.fusion.OPTIONS."""

    def __post_init__(self):
        super().__post_init__()
        op = type(self).__name__
        checks.whole(
            op, **self._values("dim", "num_heads", "ffn_dim", "encoder_layers", "decoder_layers")
        )
        if self.dim % self.num_heads or self.dim % 2:
            raise ValueError(
                f"{op}: dim must be an even multiple of num_heads {self.num_heads}, got {self.dim}"
            )
        checks.whole(op, 0, first_position=self.first_position)
        checks.fraction(
            op,
            **self._values("dropout", "attention_dropout", "activation_dropout", "mixture_dropout"),
        )
        checks.choice(op, ("xavier", "fan_in"), init=self.init)
        checks.choice(op, NORMS, norm=self.norm)
        checks.choice(op, (None, *NORMS), decoder_norm=self.decoder_norm)
        checks.choice(op, ACTIVATIONS, activation=self.activation)
        checks.choice(op, ("top", "transparent"), cross_attention=self.cross_attention)
        checks.choice(op, ("all", "decoder", "none"), share_embeddings=self.share_embeddings)
        checks.choice(op, CONNECTIONS, **self._values("encoder_connection", "decoder_connection"))
        for side in SIDES:
            check_norms(op, getattr(self, f"{side}_connection"), self.norm_of(side), self.norm_type)
        checks.choice(op, (None, *FUSIONS), **self._values("encoder_fusion", "decoder_fusion"))
        checks.dictionary(op, **self._values("dlcl", "latent", "languages", "fusion"))
        if self.share_embeddings == "all" and target_vocab_size(self) != self.vocab_size:
            raise ValueError(
                f"{op}: target_vocab_size must be the source's {self.vocab_size} where "
                f"share_embeddings is all, got {target_vocab_size(self)}"
            )
        self._check_scaled(op)
        self._check_connections(op, "")
        self._check_languages(op)
        self._check_latent(op)
        self._check_fusion(op)

    def norm_of(self, side: str) -> str:
        """`norm` of a side, whose name ends with "encoder" or "decoder"."""
        return (side.endswith("decoder") and self.decoder_norm) or self.norm

    def _values(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _check_options(self, op: str, name: str, needs: str, arguments: dict[str, dict]) -> None:
        """Checks a field that holds options of a module.

        Args:
            op: how errors begin.
            name: of the field; `OPTIONS` names its module.
            needs: what makes a side read the field, in words.
            arguments: for each side that reads it, all arguments of the module. The module itself
                checks their values.
        """
        options, kind = getattr(self, name), name.removeprefix("top_")
        if options and not arguments:
            raise ValueError(
                f"{op}: {name} needs a side with {needs} for {sorted(options, key=str)}, got none"
            )
        known = option_types(kind)
        unknown = sorted(map(str, set(options) - set(known)))
        if unknown:
            raise ValueError(
                f"{op}: {name} must have keys among {', '.join(sorted(known))}, "
                f"got {', '.join(unknown)}"
            )
        module = OPTIONS[kind][0]
        for given in arguments.values():
            try:
                # On the meta device the module takes no memory and draws no random numbers.
                with torch.device("meta"):
                    module(**given)
            except (ValueError, TypeError) as error:
                reason = str(error).removeprefix(f"{module.__name__}: ").removeprefix(f"{name}: ")
                raise ValueError(f"{op}: {name}: {reason}") from error

    def _check_connections(self, op: str, prefix: str) -> None:
        """Checks the options of the connections; ``prefix`` is that of their fields' names."""
        sides = {f"{prefix}{side}": getattr(self, f"{prefix}{side}_connection") for side in SIDES}
        dlcl = f"{prefix}dlcl"
        known = {k: v for k, v in getattr(self, dlcl).items() if k in option_types("dlcl")}
        arguments = {
            connection: {"num_layers": 1, "dim": self.dim}
            | dlcl_options(connection, self.norm_of(side), known)
            for side, connection in sides.items()
            if CONNECTIONS[connection].dlcl is not None
        }
        self._check_options(op, dlcl, "connection 'dlcl'", arguments)
        for side, connection in sides.items():
            norm = self.norm_of(side)
            if norm != "pre" and CONNECTIONS[connection].pre_norm:
                raise ValueError(
                    f"{op}: {side}_connection {connection} needs norm pre, got norm {norm}"
                )
        for option, most, needs in (
            ("block", None, ("block_attnres",)),
            ("reads", 2, ATTENTION_RESIDUALS),
        ):
            name = f"{prefix}attnres_{option}"
            if getattr(self, name) is None:
                continue
            checks.whole(op, 1, most, **self._values(name))
            if not set(needs) & set(sides.values()):
                words = " or ".join(map(repr, needs))
                raise ValueError(f"{op}: {name} needs a side with {words}, got none")

    def _check_scaled(self, op: str) -> None:
        """DeepNorm is a form of the plain residual with a start of its own."""
        needs = {"init": "xavier", "cross_attention": "top", "encoder_fusion": None,
                 "decoder_fusion": None}  # fmt: skip
        for side in SIDES:
            norm = self.norm_of(side)
            if norm != "deepnorm":
                continue
            for name, value in ({f"{side}_connection": "residual"} | needs).items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"{op}: norm deepnorm needs {name} {value}, got {getattr(self, name)}"
                    )

    def _check_languages(self, op: str) -> None:
        tags = list(self.languages.values())
        within = all(checks.is_whole(tag) and 0 <= tag < self.vocab_size for tag in tags)
        if not within or len(set(tags)) < len(tags) or self.padding_idx in tags:
            raise ValueError(
                f"{op}: languages must have different ids below vocab_size {self.vocab_size} for "
                f"their tags, got {self.languages!r}"
            )

    def _check_latent(self, op: str) -> None:
        arguments = {
            side: {"num_layers": getattr(self, f"{side}_layers")} | self.latent
            for side in SIDES
            if getattr(self, f"{side}_connection") == "latent"
        }
        self._check_options(op, "latent", "connection 'latent'", arguments)

    def _check_fusion(self, op: str) -> None:
        arguments = {}
        for side in SIDES:
            kind = getattr(self, f"{side}_fusion")
            if kind is not None:
                self._check_all_states(op, f"{side}_fusion", side)
                arguments[side] = {
                    "num_states": 2,
                    "dim": self.dim,
                    "fusion_type": kind,
                } | self.fusion
        self._check_options(op, "fusion", "a fusion", arguments)
        kinds, unread = fusion_options(vars(self))
        # A default changes nothing, whoever reads it.
        defaults = inspect.signature(LayerFusion).parameters
        got = {n: x for n, x in self.fusion.items() if n in unread and x != defaults[n].default}
        if got:
            read = sorted({name for kind in kinds for name in FUSION_OPTIONS[kind]})
            raise ValueError(
                f"{op}: fusion must have no options but those that {' or '.join(kinds)} reads "
                f"({', '.join(read) or 'none'}), got {got}"
            )
        if self.cross_attention == "transparent":
            self._check_all_states(op, "cross_attention", "encoder")
            if self.encoder_fusion is not None:
                raise ValueError(
                    f"{op}: encoder_fusion must be None where cross_attention is transparent, "
                    f"got {self.encoder_fusion!r}"
                )

    def _check_all_states(self, op: str, name: str, side: str) -> None:
        """A field that makes something read the states of all layers needs all of them to run."""
        if getattr(self, f"{side}_connection") == "latent":
            raise ValueError(
                f"{op}: {name} {getattr(self, name)} needs another {side}_connection than latent, "
                "which leaves layers out"
            )

    def stack(self, side: str) -> dict[str, Any]:
        """Arguments of a side's stack: of the "encoder" or the "decoder"."""
        connection = getattr(self, f"{side}_connection")
        # A `DepthGrowingConfig` has two more sides, "top_encoder" and "top_decoder".
        prefix = side.removesuffix("encoder").removesuffix("decoder")
        block, reads = (
            getattr(self, f"{prefix}attnres_{option}") or getattr(self, f"attnres_{option}")
            for option in ("block", "reads")
        )
        options = self._values("dim", "num_heads", "ffn_dim", "norm_type", "activation", "dropout",
                               "attention_dropout", "activation_dropout", "backend")  # fmt: skip
        options["norm"] = self.norm_of(side)
        latent = self.latent | {"languages": len(self.languages) or 1}
        # Two sides of the same size must not draw the same numbers.
        latent["seed"] = 2 * latent.get("seed", 0) + (side == "decoder")
        return (
            options
            | {
                "connection": connection,
                "dlcl": getattr(self, f"{prefix}dlcl")
                if CONNECTIONS[connection].dlcl is not None
                else None,
                "block": block if connection == "block_attnres" else None,
                "reads": reads if connection in ATTENTION_RESIDUALS else None,
                "latent": latent if connection == "latent" else None,
            }
            | ({"decoder_layers": self.decoder_layers} if self._scales(side) else {})
        )

    def _scales(self, side: str) -> bool:
        """Whether the side's scales depend on the number of decoder layers."""
        return side == "encoder" and self.norm == "deepnorm" == self.norm_of("decoder")


def fusion_options(config: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """The kinds of fusions that the fields of a config name, and the options that none of them
    reads."""
    named = (config.get("encoder_fusion"), config.get("decoder_fusion"))
    kinds = [kind for kind in FUSIONS if kind in named]
    known = {name for names in FUSION_OPTIONS.values() for name in names}
    return kinds, known.difference(*(FUSION_OPTIONS[kind] for kind in kinds))


def without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a saved config without options of a fusion that nothing reads.

    A `TransformerConfig` refuses such options; older checkpoints may hold some.
    """
    (kinds, unread), given = fusion_options(config), config.get("fusion")
    if not isinstance(given, dict) or not kinds:
        return dict(config)
    return {**config, "fusion": {name: x for name, x in given.items() if name not in unread}}


def base(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's base size: 512 wide, 8 heads, 2048 feed-forward."""
    return TransformerConfig(
        **{"vocab_size": vocab_size, "dim": 512, "num_heads": 8, "ffn_dim": 2048} | changes
    )


def big(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's big size: 1024 wide, 16 heads, 4096 feed-forward, dropout 0.3."""
    sizes = {"dim": 1024, "num_heads": 16, "ffn_dim": 4096, "dropout": 0.3}
    return TransformerConfig(**{"vocab_size": vocab_size} | sizes | changes)
