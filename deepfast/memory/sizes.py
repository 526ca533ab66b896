"""The sizes of a model and of a training step, and the numbers of parameters they give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from deepfast import backend as backends
from deepfast import checks, connections
from deepfast.nn import TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS

PLANNED = tuple(name for name, kind in connections.CONNECTIONS.items() if kind.planned == name)
OPTIMIZERS = {"adam": 8, "sgd": 0, "none": 0}
"""Bytes of state per parameter; "sgd" is without momentum."""
CHOICES = {
    "connection": PLANNED,
    "decoder_connection": PLANNED,
    "norm": ("pre", "post"),
    "norm_type": ("layer", "rms"),
    "weight_type": ("scalar", "vector"),
    "dtype": ("bfloat16", "float32"),
    "optimizer": tuple(OPTIMIZERS),
    "device": ("cuda", "cpu"),
    "activation": ("relu", "gelu", "swiglu"),
    "parallel": ("ddp", "fsdp"),
}
HUGE = 2**40
LIMITS = {"num_layers": (1, 20_000), "decoder_layers": (0, 20_000), "vocab_size": (0, HUGE)}
LIMITS |= dict.fromkeys(("dim", "tokens", "target_tokens", "num_heads", "ffn_dim"), (1, HUGE))
LIMITS |= dict.fromkeys(("accumulate", "length", "ranks"), (1, HUGE)) | {"reads": (1, 2)}
"""The least and the most of each number. The upper limits are beyond every machine. Policies are
chosen layer by layer, so the number of layers has a lower limit than other sizes."""


class Side(NamedTuple):
    """The encoder or the decoder of a model."""

    name: str
    """"encoder" or "decoder"."""
    sizes: "Sizes"
    layers: int
    """L."""
    connection: str
    tokens: int
    """T of a micro-batch."""

    @property
    def attends(self) -> bool:
        """Whether its connection is attention over depth."""
        return self.connection in ATTENTION_RESIDUALS

    @property
    def parts(self) -> int:
        """How often a layer reads its connection."""
        if not self.attends or self.sizes.reads == 1:
            return 1
        return 3 if self.name == "decoder" else 2

    @property
    def rows(self) -> int:
        """The rows of its depth weights."""
        return self.layers * self.parts + 1

    def stack(self, policies: Sequence[str]) -> TransformerEncoder | TransformerDecoder:
        """The module, with a layer for each of the policies."""
        sizes, kind = self.sizes, self.connection
        make = TransformerDecoder if self.name == "decoder" else TransformerEncoder
        return make(
            len(policies), sizes.dim, sizes.num_heads, sizes.ffn_dim,
            num_kv_heads=sizes.num_kv_heads, connection=kind, norm=sizes.norm,
            norm_type=sizes.norm_type, dropout=0.1 if sizes.dropout else 0.0,
            activation=sizes.activation, recompute=policies,
            dlcl={"weight_type": sizes.weight_type} if kind == "dlcl" else None,
            reads=sizes.reads if self.attends else None,
            backend=sizes.backend,
        )  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer. The norm before each pre-norm layer, or before each part that
        reads, belongs to the connection."""
        # The other sizes change no layer.
        same = replace(self.sizes, num_layers=1, decoder_layers=1, vocab_size=1, length=1)
        same = replace(same, tokens=1, target_tokens=1)
        return _layer_parameters(self._replace(sizes=same, layers=1, tokens=1))

    @property
    def connection_parameters(self) -> int:
        """Parameters of the connection, with its norms in pre-norm: depth weights and their norms,
        queries of attention residuals, logits of latent depth."""
        norms = self.rows * self.sizes.norm_values * self.sizes.dim
        count = norms if self.sizes.norm == "pre" else 0
        if self.connection == "dlcl":
            count += self.rows * self.rows * self.sizes.depth_channels + norms
        if self.attends:
            count += self.rows * self.sizes.dim
        if self.connection == "latent":
            # The logits of one language.
            count += self.layers
        return count

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.connection_parameters


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and one training step of it."""

    num_layers: int
    """L of the encoder."""
    dim: int
    """D."""
    tokens: int
    """T of a micro-batch on the encoder's side, without padding."""
    num_heads: int
    """H; `plan` uses heads of width 64 by default."""
    num_kv_heads: int | None = None
    """Heads of keys and values, see `deepfast.nn.MultiheadAttention`; None for H."""
    ffn_dim: int
    """F; `plan` uses 4 D by default."""
    target_tokens: int
    """Tokens of a micro-batch on the decoder's side; `plan` uses ``tokens`` by default."""
    vocab_size: int = 32_000
    """V of the embedding, which the output projection shares; 0: a stack without either."""
    decoder_layers: int = 6
    """0 for an encoder without a decoder."""
    connection: str = "dlcl"
    """One of `PLANNED`; the encoder's connection."""
    decoder_connection: str = "residual"
    """The decoder's connection."""
    reads: int = 2
    """How often a layer reads attention residuals: 1: once; 2: each of its sublayers does."""
    norm: str = "pre"
    """"pre" or "post"."""
    norm_type: str = "layer"
    """"layer" or "rms"."""
    weight_type: str = "scalar"
    """Kind of the depth weights: "scalar" or "vector" (a group is counted as "vector")."""
    dtype: str = "bfloat16"
    """"bfloat16": autocast over fp32 parameters; "float32"."""
    optimizer: str = "adam"
    """"adam", "sgd" (without momentum) or "none"."""
    device: str = "cuda"
    """"cuda" or "cpu"; a margin for the allocator is added on "cuda"."""
    activation: str = "relu"
    """One of "relu", "gelu" and "swiglu"."""
    dropout: bool = True
    """Whether branches have dropout."""
    accumulate: int = 1
    """Micro-batches per step."""
    length: int = 128
    """Tokens per sentence, for the cost of attention."""
    padding: bool = False
    """Whether attention is torch's SDPA and sentences differ in length. SDPA then works on padded
    copies, and ``tokens`` includes the padding."""

    ranks: int = 1
    """Processes that share the model. Everything else is of one of them, also ``tokens``."""
    parallel: str = "ddp"
    """How they share it: "ddp": each has all of it; "fsdp": each has a share, layer by layer."""
    reshard: bool = True
    """With "fsdp": whether a layer's gathered parameters are freed after forward."""

    def __post_init__(self):
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not checks.is_whole(value) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
            if value > most:
                raise ValueError(f"{name}: expected at most {most:,}, got {value:,}")
        for name in ("dropout", "padding"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                got = repr(value)
                if allowed is PLANNED and value in connections.CONNECTIONS:
                    got += f", which plan counts as {connections.CONNECTIONS[value].planned}"
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {got}")
            if value in ATTENTION_RESIDUALS and self.norm != "pre":
                raise ValueError(f"norm: expected pre with {name} {value!r}, got {self.norm!r}")
        if self.dim % self.num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of dim {self.dim}, got {self.num_heads}"
            )
        kv = self.num_kv_heads
        if kv is not None and not (checks.is_whole(kv) and kv > 0 and self.num_heads % kv == 0):
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got {kv!r}"
            )
        if self.decoder_layers and not self.vocab_size:
            raise ValueError("vocab_size: expected at least 1 with a decoder, got 0")

    @property
    def bytes(self) -> int:
        """Bytes of an element in the storage dtype."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def backend(self) -> str | None:
        """The backend whose launches do nothing on tensors without data, where it is there."""
        return "cpu" if backends.compiled() else None

    @property
    def sharded(self) -> bool:
        """Whether each rank has a share of the parameters."""
        return self.parallel == "fsdp" and self.ranks > 1

    @property
    def norm_values(self) -> int:
        """Parameters of a norm per channel, and statistics per token: an RMS norm has no bias and
        no mean."""
        return 1 if self.norm_type == "rms" else 2

    @property
    def sides(self) -> tuple[Side, ...]:
        """The encoder and, where there is one, the decoder."""
        encoder = Side("encoder", self, self.num_layers, self.connection, self.tokens)
        if not self.decoder_layers:
            return (encoder,)
        kind, tokens = self.decoder_connection, self.target_tokens
        return encoder, Side("decoder", self, self.decoder_layers, kind, tokens)

    @property
    def depth_channels(self) -> int:
        """Depth weights per row and source."""
        return self.dim if self.weight_type == "vector" else 1

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.vocab_size * self.dim + sum(side.parameters for side in self.sides)


@lru_cache(maxsize=256)
def _layer_parameters(side: Side) -> int:
    with torch.device("meta"):
        (layer,) = side.stack(("none",)).layers
    return sum(p.numel() for p in layer.parameters())
