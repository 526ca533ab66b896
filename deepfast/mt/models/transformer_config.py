"""Sizes and choices of the Transformer, checked before anything is built."""

import inspect
from dataclasses import field
from typing import Annotated, Any, Literal

import torch

from deepfast.connections import CONNECTIONS
from deepfast.mt.checked import Count, Field, Fraction, Layers, Options, Width, checked, one_of
from deepfast.mt.models.interface import ModelConfig, target_vocab_size
from deepfast.nn import DLCL, LatentDepth, LayerFusion
from deepfast.nn.connections.dlcl import dlcl_options
from deepfast.nn.connections.fusion import FUSIONS
from deepfast.nn.connections.fusion import OPTIONS as FUSION_OPTIONS
from deepfast.nn.layer_norm import NORMS as NORM_TYPES
from deepfast.nn.layer_norm import check_norms
from deepfast.policies import ATTENTION_RESIDUALS
from deepfast.reference.activation import KINDS as ACTIVATIONS

SIDES = ("encoder", "decoder")

Connection = Annotated[str, one_of(CONNECTIONS)]
Fusion = Annotated[str, one_of(FUSIONS)]
Norm = Literal["pre", "post", "deepnorm"]
Reads = Annotated[int, Field(ge=1, le=2)]

OPTIONS = {
    "dlcl": (DLCL, {"num_layers", "dim", "backend"}),
    "latent": (LatentDepth, {"num_layers", "languages"}),
    "fusion": (
        LayerFusion,
        {"num_states", "dim", "fusion_type", "source_norm", "own_embedding", "backend"},
    ),
}
"""Field that holds arguments of a module -> the module, and those of its arguments that the model
decides."""


@checked("TransformerConfig: ")
class TransformerConfig(ModelConfig):
    """Sizes and choices of a `Transformer`."""

    share_embeddings: Literal["all", "decoder", "none"] = "all"
    """"all": source, target and output share one matrix; "decoder": target and output share one;
    "none": each has its own."""
    dim: Width = 512
    """D."""
    num_heads: Width = 8
    """H, which must divide dim."""
    ffn_dim: Width = 2048
    """F."""
    encoder_layers: Layers = 6
    """L of the encoder."""
    decoder_layers: Layers = 6
    """L of the decoder."""
    encoder_connection: Connection = "dlcl"
    """One of deepfast.connections.CONNECTIONS."""
    decoder_connection: Connection = "residual"
    """The same for the decoder."""
    attnres_block: Count | None = None
    """Layers in a block under "block_attnres"; None: an eighth of the side's layers, rounded up."""
    attnres_reads: Reads | None = None
    """How often a layer reads attention residuals: 2 (or None): each sublayer does; 1: once."""
    cross_attention: Literal["top", "transparent"] = "top"
    """"top": decoder layers attend to the encoder's output; "transparent": each decoder layer
    attends to its own mixture of all encoder layers."""
    init: Literal["xavier", "fan_in"] = "xavier"
    """How matrices begin: "xavier"; or "fan_in", from U(-b, b) with b = 1 / sqrt(inputs), biases
    and an output matrix of its own too, as in the paper on layer fusion. Embeddings begin from
    N(0, 1 / D) either way, and so does the output matrix with "xavier"."""
    norm: Norm = "pre"
    """"pre", "post" or "deepnorm", see `deepfast.nn.TransformerEncoder`."""
    decoder_norm: Norm | None = None
    """The decoder's own `norm`; None: as the encoder's."""
    norm_type: Annotated[str, one_of(NORM_TYPES)] = "layer"
    """"layer" or "rms": the norms of the layers, of the stacks and inside DLCL. Those inside
    transparent attention and fusions are layer-norms. "none": the layers and the stacks have no
    norms (pre-norm, residual or latent)."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    """"relu" or "gelu"."""
    dropout: Fraction = 0.1
    """On embeddings and on each branch before its residual add."""
    attention_dropout: Fraction = 0.0
    """On attention weights."""
    activation_dropout: Fraction = 0.0
    """After the feed-forward activation."""
    mixture_dropout: Fraction = 0.1
    """On the mixing weights of transparent attention."""
    dlcl: Options = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides; "norm": None leaves out its norms."""
    latent: Options = field(default_factory=dict)
    """Further arguments of deepfast.nn.LatentDepth, for the sides with connection "latent"."""
    languages: dict[str, int] = field(default_factory=dict)
    """Language -> id of its tag, with which its source sentences begin; empty for one language.
    Latent depth chooses layers for each language."""
    encoder_fusion: Fusion | None = None
    """A fusion of the embedding and all encoder layers, one of
    deepfast.nn.connections.fusion.FUSIONS; None: the encoder's output is that of its last layer."""
    decoder_fusion: Fusion | None = None
    """The same for the decoder."""
    fusion: Options = field(default_factory=dict)
    """Further arguments of deepfast.nn.LayerFusion, for both sides. The fusion of at least one side
    must read each of them: see deepfast.nn.connections.fusion.OPTIONS."""

    def __post_init__(self):
        even = not (self.dim % self.num_heads or self.dim % 2)
        self.expect(even, "dim", f"an even multiple of num_heads {self.num_heads}")
        shared = self.share_embeddings == "all"
        fits = not shared or target_vocab_size(self) == self.vocab_size
        expected = f"the source's {self.vocab_size} where share_embeddings is all"
        self.expect(fits, "target_vocab_size", expected)
        for side in SIDES:
            norm, connection = self.norm_of(side), getattr(self, f"{side}_connection")
            check_norms("norm_type", connection, norm, self.norm_type)
            if norm == "deepnorm":
                self._check_scaled(side)
        self._check_connections()
        arguments = [
            {"num_layers": getattr(self, f"{side}_layers")} | self.latent
            for side in SIDES
            if getattr(self, f"{side}_connection") == "latent"
        ]
        self._check_options("latent", "connection 'latent'", arguments)
        self._check_fusion()

    def norm_of(self, side: str) -> str:
        """`norm` of a side, whose name ends with "encoder" or "decoder"."""
        return (side.endswith("decoder") and self.decoder_norm) or self.norm

    def _values(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _check_options(self, name: str, needs: str, arguments: list[dict[str, Any]]) -> None:
        """Checks a field that holds options of a module.

        Args:
            name: of the field; `OPTIONS` names its module.
            needs: what makes a side read the field, in words.
            arguments: for each side that reads it, all arguments of the module. The module itself
                checks their values.
        """
        options = getattr(self, name)
        module, own = OPTIONS[name.removeprefix("top_")]
        self.expect(arguments or not options, name, f"no options without a side with {needs}")
        known = inspect.signature(module).parameters.keys() - own
        self.expect(options.keys() <= known, name, f"keys among {', '.join(sorted(known))}")
        for given in arguments:
            try:
                # On the meta device the module takes no memory and draws no random numbers.
                with torch.device("meta"):
                    module(**given)
            except (ValueError, TypeError) as error:
                reason = str(error).removeprefix(f"{module.__name__}: ")
                raise ValueError(f"{name}: {reason}") from error

    def _check_connections(self, prefix: str = "") -> None:
        """Checks the options of the connections; ``prefix`` is that of their fields' names."""
        sides = {f"{prefix}{side}": getattr(self, f"{prefix}{side}_connection") for side in SIDES}
        arguments = []
        for side, connection in sides.items():
            norm, kind = self.norm_of(side), CONNECTIONS[connection]
            fits = norm == "pre" or not kind.pre_norm
            self.expect(
                fits, f"{side}_connection", f"another one with norm {norm}, as it needs norm pre"
            )
            if kind.dlcl is not None:
                options = dlcl_options(connection, norm, getattr(self, f"{prefix}dlcl"))
                arguments.append({"num_layers": 1, "dim": self.dim} | options)
        self._check_options(f"{prefix}dlcl", "connection 'dlcl'", arguments)
        for option, needs in (("block", ("block_attnres",)), ("reads", ATTENTION_RESIDUALS)):
            name = f"{prefix}attnres_{option}"
            read = {*needs} & {*sides.values()}
            self.expect(
                read or getattr(self, name) is None,
                name,
                f"null without a side with {' or '.join(map(repr, needs))}",
            )

    def _check_scaled(self, side: str) -> None:
        """DeepNorm is a form of the plain residual with a start of its own."""
        needs = {f"{side}_connection": "residual", "init": "xavier", "cross_attention": "top",
                 "encoder_fusion": None, "decoder_fusion": None}  # fmt: skip
        for name, value in needs.items():
            fits = getattr(self, name) == value
            self.expect(fits, name, f"{value or 'null'} with norm deepnorm")

    def _check_fusion(self) -> None:
        kinds = {side: getattr(self, f"{side}_fusion") for side in SIDES}
        kinds = {side: kind for side, kind in kinds.items() if kind is not None}
        arguments = [
            {"num_states": 2, "dim": self.dim, "fusion_type": kind} | self.fusion
            for kind in kinds.values()
        ]
        self._check_options("fusion", "a fusion", arguments)
        # A default changes nothing, whoever reads it.
        defaults = inspect.signature(LayerFusion).parameters
        changed = {name for name, x in self.fusion.items() if x != defaults[name].default}
        known = {name for names in FUSION_OPTIONS.values() for name in names}
        read = {name for kind in kinds.values() for name in FUSION_OPTIONS[kind]}
        names = ", ".join(sorted(read)) or "none"
        expected = f"options that {' or '.join(dict.fromkeys(kinds.values()))} reads ({names})"
        self.expect(not (changed & known) - read, "fusion", expected)
        if self.cross_attention == "transparent":
            self._check_all_states("cross_attention", "encoder")
            fits = self.encoder_fusion is None
            self.expect(fits, "encoder_fusion", "null where cross_attention is transparent")
        for side in kinds:
            self._check_all_states(f"{side}_fusion", side)

    def _check_all_states(self, name: str, side: str) -> None:
        """A field that makes something read the states of all layers needs all of them to run."""
        key = f"{side}_connection"
        expected = (
            f"another than latent, which leaves layers out, with {name} {getattr(self, name)}"
        )
        self.expect(getattr(self, key) != "latent", key, expected)

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
        mixes = CONNECTIONS[connection].dlcl is not None
        options |= {
            "connection": connection,
            "dlcl": getattr(self, f"{prefix}dlcl") if mixes else None,
            "block": block if connection == "block_attnres" else None,
            "reads": reads if connection in ATTENTION_RESIDUALS else None,
            "latent": latent if connection == "latent" else None,
        }
        if self._scales(side):
            options["decoder_layers"] = self.decoder_layers
        return options

    def _scales(self, side: str) -> bool:
        """Whether the side's scales depend on the number of decoder layers."""
        return side == "encoder" and self.norm == "deepnorm" == self.norm_of("decoder")


def base(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's base size: 512 wide, 8 heads, 2048 feed-forward."""
    return TransformerConfig(
        **{"vocab_size": vocab_size, "dim": 512, "num_heads": 8, "ffn_dim": 2048} | changes
    )


def big(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's big size: 1024 wide, 16 heads, 4096 feed-forward, dropout 0.3."""
    sizes = {"dim": 1024, "num_heads": 16, "ffn_dim": 4096, "dropout": 0.3}
    return TransformerConfig(**{"vocab_size": vocab_size} | sizes | changes)
