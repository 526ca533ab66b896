"""The encoder-decoder Transformer for translation, with a depth connection on either side.

Vaswani et al. 2017 for the model; Wang et al. 2019 for pre-norm, depth and DLCL.
"""

import inspect
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.nn import DLCL, DecoderCache, Packing, TransformerDecoder, TransformerEncoder
from deepfast.nn.connection import CONNECTIONS
from deepfast.ops.activation import KINDS

IGNORED = -100
"""A label that stands for none."""


@dataclass(kw_only=True)
class TransformerConfig:
    """Sizes and choices of a `Transformer`."""

    vocab_size: int
    """V, of the vocabulary shared by source and target."""
    padding_idx: int = 0
    """Id of the padding token."""
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
    """"dlcl" or "residual"."""
    decoder_connection: str = "residual"
    """"dlcl" or "residual"."""
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
    dlcl: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides."""
    backend: str | None = None
    """See deepfast.backend."""

    def __post_init__(self):
        for name in ("vocab_size", "dim", "heads", "ffn_dim", "encoder_layers", "decoder_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if self.dim % self.heads or self.dim % 2:
            raise ValueError(
                f"dim: expected an even multiple of heads {self.heads}, got {self.dim}"
            )
        if not isinstance(self.padding_idx, int) or not 0 <= self.padding_idx < self.vocab_size:
            raise ValueError(
                f"padding_idx: expected an id below vocab_size {self.vocab_size}, "
                f"got {self.padding_idx!r}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")
        for name, allowed in (
            ("encoder_connection", CONNECTIONS),
            ("decoder_connection", CONNECTIONS),
            ("norm", ("pre", "post")),
            ("activation", KINDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

        self._check_dlcl()

    def _check_dlcl(self):
        if not self.dlcl:
            return
        if "dlcl" not in (self.encoder_connection, self.decoder_connection):
            raise ValueError(
                f"dlcl: expected a side with connection 'dlcl' for {sorted(self.dlcl)}, got none"
            )
        known = set(inspect.signature(DLCL).parameters) - {"num_layers", "dim", "norm", "backend"}
        unknown = sorted(set(self.dlcl) - known)
        if unknown:
            raise ValueError(
                f"dlcl: expected keys of {', '.join(sorted(known))}, got {', '.join(unknown)}"
            )

    def side(self, connection: str) -> dict:
        """Arguments of the encoder's or the decoder's stack."""
        names = ("dim", "heads", "ffn_dim", "norm", "activation", "dropout", "attention_dropout",
                 "activation_dropout", "backend")  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        return options | {
            "connection": connection,
            "dlcl": self.dlcl if connection == "dlcl" else None,
        }


def base(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's base size: 512 wide, 8 heads, 2048 feed-forward."""
    return TransformerConfig(**{"vocab_size": vocab_size, "dim": 512, "heads": 8, "ffn_dim": 2048}
                             | changes)  # fmt: skip


def big(vocab_size: int, **changes) -> TransformerConfig:
    """The paper's big size: 1024 wide, 16 heads, 4096 feed-forward, dropout 0.3."""
    sizes = {"dim": 1024, "heads": 16, "ffn_dim": 4096, "dropout": 0.3}
    return TransformerConfig(**{"vocab_size": vocab_size} | sizes | changes)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sinusoidal positions (..., D): sines in the first half, cosines in the second.

    Frequencies ``10000^(-i / (D/2 - 1))`` for i in 0 .. D/2 - 1, fp32.
    """
    half = dim // 2
    step = math.log(10000.0) / max(half - 1, 1)
    frequency = torch.exp(torch.arange(half, device=positions.device) * -step)
    angle = positions.unsqueeze(-1).float() * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


@dataclass
class DecodeState:
    """A batch of hypotheses while it is being decoded."""

    cache: DecoderCache
    position: int = 0

    def reorder(self, index: Tensor, *, memory: bool = True) -> None:
        """Keeps hypotheses ``index`` (B',), int64, repeats allowed.

        ``memory=False`` leaves the encoder's side as it is, for an ``index`` that keeps every row
        on its own sentence.
        """
        self.cache.reorder(index, memory=memory)


class Transformer(nn.Module):
    """Encoder, decoder, and one embedding shared by source, target and output projection.

    Padding may stand anywhere in the source, and on the right of the target.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        c = config
        self.embedding = nn.Embedding(c.vocab_size, c.dim, padding_idx=c.padding_idx)
        nn.init.normal_(self.embedding.weight, std=c.dim**-0.5)
        with torch.no_grad():
            self.embedding.weight[c.padding_idx].zero_()
        self.encoder = TransformerEncoder(c.encoder_layers, **c.side(c.encoder_connection))
        self.decoder = TransformerDecoder(c.decoder_layers, **c.side(c.decoder_connection))

    def describe(self) -> str:
        """Sizes and choices in one line."""
        c = self.config
        return (
            f"{c.encoder_layers} encoder layers ({c.encoder_connection}), {c.decoder_layers} "
            f"decoder layers ({c.decoder_connection}), {c.norm}-norm"
        )

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Packed tokens (T,) and their positions (T,) to (T, D)."""
        x = self.embedding(tokens) * math.sqrt(self.config.dim)
        x = x + sinusoids(positions, self.config.dim).to(x.dtype)
        return F.dropout(x, self.config.dropout, self.training)

    def _packed(self, tokens_BS: Tensor) -> tuple[Tensor, Packing]:
        batch, length = tokens_BS.shape
        packing = Packing.of(batch, length, tokens_BS == self.config.padding_idx)
        # Positions count real tokens, so padding on the left does not shift a sentence.
        real = tokens_BS != self.config.padding_idx
        positions = (real.cumsum(1) - 1).flatten()
        tokens = tokens_BS.flatten()
        if packing.indices is not None:
            tokens, positions = tokens[packing.indices], positions[packing.indices]
        return self._embed(tokens, positions), packing

    def encode(self, source_BS: Tensor) -> tuple[Tensor, Packing]:
        """Token ids (B, S) to packed encoder output (T, D) and its packing."""
        x, packing = self._packed(source_BS)
        return self.encoder.forward_packed(x, packing), packing

    def project(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V), by the tied embedding."""
        return F.linear(x, self.embedding.weight)

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Logits (N, V) for the N real positions of ``target_in_BT``, row by row.

        The matching labels are ``target_out[target_in != padding_idx]``.
        """
        return self.project(self._decode(source_BS, target_in_BT)[0])

    def _decode(self, source_BS: Tensor, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """Packed decoder output (N, D) and the packing of ``target_in_BT``."""
        memory, memory_packing = self.encode(source_BS)
        x, packing = self._packed(target_in_BT)
        return self.decoder.forward_packed(x, packing, memory, memory_packing), packing

    def loss(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Loss and negative log-likelihood, each summed over the real positions, in nats.

        The positions are those of ``target_in_BT``; no logits are held. The loss is
        label-smoothed, the likelihood is not and has no gradient.
        """
        x, packing = self._decode(source_BS, target_in_BT)
        # A compiler does not pack: there padding is computed, and must not count.
        padding_BT = target_in_BT == self.config.padding_idx
        labels = target_out_BT.masked_fill(padding_BT, IGNORED).flatten()
        if packing.indices is not None:
            labels = labels[packing.indices]
        return ops.linear_cross_entropy(
            x, self.embedding.weight, labels, label_smoothing=label_smoothing,
            ignore_index=IGNORED, reduction="sum", return_nll=True, backend=self.config.backend,
        )  # fmt: skip

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """(B, T, S): the cross attention of the last decoder layer, the mean over its heads."""
        memory, memory_packing = self.encode(source_BS)
        x, packing = self._packed(target_in_BT)
        attention, seen = self.decoder.layers[-1].cross_attention, []
        with attention.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            self.decoder.forward_packed(x, packing, memory, memory_packing)
        return attention.weights(seen[0], packing, memory, memory_packing)

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source; `step` then decodes one position at a time."""
        return DecodeState(self.decoder.start(*self.encode(source_BS)))

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        positions = torch.full_like(tokens_B, state.position)
        x = self.decoder.step(self._embed(tokens_B, positions), state.cache)
        state.position += 1
        return self.project(x)
