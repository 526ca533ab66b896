"""The encoder-decoder Transformer for translation, with a depth connection on either side.

Vaswani et al. 2017 for the model; Wang et al. 2019 for pre-norm, depth and DLCL; Bapna et al. 2018
for transparent attention.
"""

import inspect
import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.nn import (
    DLCL,
    DecoderCache,
    LayerFusion,
    Packing,
    TransformerDecoder,
    TransformerEncoder,
    TransparentAttention,
)
from deepfast.nn.connection import ATTENTION_RESIDUALS, CONNECTIONS, PRESETS, dlcl_options
from deepfast.nn.fusion import FUSIONS
from deepfast.ops.activation import KINDS

from .fusions import Fusions

IGNORED = -100
"""A label that stands for none."""


def _options(module: type, *rest: str) -> tuple[str, ...]:
    """The arguments of ``module`` that its caller chooses; the ``rest`` follow from the model."""
    return tuple(sorted(set(inspect.signature(module).parameters) - set(rest)))


DLCL_OPTIONS = _options(DLCL, "num_layers", "dim", "backend")
FUSION_OPTIONS = _options(
    LayerFusion, "num_states", "dim", "kind", "source_norm", "own_embedding", "backend"
)


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
    """One of deepfast.nn.connection.CONNECTIONS: "dlcl", "residual", "denseformer", "attnres" or
    "block_attnres"."""
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
    encoder_fusion: str | None = None
    """One of deepfast.nn.fusion.FUSIONS over the embedding and all encoder layers, or None."""
    decoder_fusion: str | None = None
    """The same over the decoder's."""
    fusion: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.LayerFusion, for both sides."""
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
        for name in ("dropout", "attention_dropout", "activation_dropout", "mixture_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")
        for name, allowed in (
            ("encoder_connection", CONNECTIONS),
            ("decoder_connection", CONNECTIONS),
            ("encoder_fusion", (None, *FUSIONS)),
            ("decoder_fusion", (None, *FUSIONS)),
            ("cross_attention", ("top", "transparent")),
            ("share_embeddings", ("all", "decoder", "none")),
            ("norm", ("pre", "post")),
            ("activation", KINDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(str, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )
        self._check_vocabularies()
        self._check_attnres()
        fuses = self.encoder_fusion is not None or self.decoder_fusion is not None
        self._check_options("fusion", FUSION_OPTIONS, "a fusion", fuses)
        if self.encoder_fusion is not None and self.cross_attention == "transparent":
            raise ValueError(
                f"cross_attention: expected top with encoder_fusion {self.encoder_fusion}, "
                "got 'transparent'"
            )
        sides = {self.encoder_connection, self.decoder_connection} & PRESETS.keys()
        self._check_options("dlcl", DLCL_OPTIONS, "connection 'dlcl'", bool(sides))
        for connection in sorted(sides):
            dlcl_options(connection, self.norm, self.dlcl)

    def _check_vocabularies(self):
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

    def _check_attnres(self) -> None:
        sides = self.encoder_connection, self.decoder_connection
        if self.norm != "pre" and set(sides) & set(ATTENTION_RESIDUALS):
            raise ValueError(f"norm: expected pre with attention residuals, got {self.norm!r}")
        block = self.attnres_block
        if block is not None and (type(block) is not int or block < 1):
            raise ValueError(
                f"attnres_block: expected a whole number of at least 1 or None, got {block!r}"
            )
        if block is not None and "block_attnres" not in sides:
            raise ValueError("attnres_block: expected a side with 'block_attnres', got none")

    def _check_options(self, name: str, known: tuple[str, ...], needs: str, used: bool) -> None:
        options = getattr(self, name)
        if not options:
            return
        if not used:
            raise ValueError(
                f"{name}: expected a side with {needs} for {sorted(options)}, got none"
            )
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"{name}: expected keys of {', '.join(known)}, got {', '.join(unknown)}"
            )

    def side(self, connection: str) -> dict:
        """Arguments of the encoder's or the decoder's stack."""
        names = ("dim", "heads", "ffn_dim", "norm", "activation", "dropout", "attention_dropout",
                 "activation_dropout", "backend")  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        return options | {
            "connection": connection,
            "dlcl": self.dlcl if connection in PRESETS else None,
            "block": self.attnres_block if connection == "block_attnres" else None,
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
    """Encoder, decoder, and by default one embedding shared by source, target and output.

    Padding may stand anywhere in the source, and on the right of the target.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        c = config
        self.embedding = self._new_embedding(c.vocab_size)
        target_size = c.target_vocab_size or c.vocab_size
        self.target_embedding = self.output = None
        if c.share_embeddings != "all":
            self.target_embedding = self._new_embedding(target_size)
        if c.share_embeddings == "none":
            self.output = nn.Linear(c.dim, target_size, bias=False)
            nn.init.normal_(self.output.weight, std=c.dim**-0.5)
        self.encoder = TransformerEncoder(c.encoder_layers, **c.side(c.encoder_connection))
        self.decoder = TransformerDecoder(c.decoder_layers, **c.side(c.decoder_connection))
        sides = {
            "encoder": (c.encoder_fusion, c.encoder_layers),
            "decoder": (c.decoder_fusion, c.decoder_layers),
        }
        self.fusions = Fusions(
            c.dim, sides, source_norm=c.norm == "pre", backend=c.backend, **c.fusion
        )
        self.transparent = None
        if c.cross_attention == "transparent":
            self.transparent = TransparentAttention(
                c.encoder_layers, c.decoder_layers, c.dim, norm=c.norm,
                dropout=c.mixture_dropout, backend=c.backend,
            )  # fmt: skip

    def describe(self) -> str:
        """Sizes and choices in one line."""
        c = self.config
        sides = {
            "encoder": (c.encoder_layers, c.encoder_connection, c.encoder_fusion),
            "decoder": (c.decoder_layers, c.decoder_connection, c.decoder_fusion),
        }
        parts = [
            f"{layers} {side} layers ({connection}{'' if fusion is None else f', {fusion} fusion'})"
            for side, (layers, connection, fusion) in sides.items()
        ]
        more = ["transparent attention"] if self.transparent is not None else []
        return ", ".join([*parts, f"{c.norm}-norm", *more])

    def _new_embedding(self, size: int) -> nn.Embedding:
        dim, padding_idx = self.config.dim, self.config.padding_idx
        embedding = nn.Embedding(size, dim, padding_idx=padding_idx)
        nn.init.normal_(embedding.weight, std=dim**-0.5)
        with torch.no_grad():
            embedding.weight[padding_idx].zero_()
        return embedding

    @property
    def _target(self) -> nn.Embedding:
        return self.embedding if self.target_embedding is None else self.target_embedding

    @property
    def _output_weight(self) -> Tensor:
        return (self._target if self.output is None else self.output).weight

    def _embed(self, tokens: Tensor, positions: Tensor, embedding: nn.Embedding) -> Tensor:
        """Packed tokens (T,) and their positions (T,) to (T, D)."""
        x = embedding(tokens) * math.sqrt(self.config.dim)
        x = x + sinusoids(positions, self.config.dim).to(x.dtype)
        return F.dropout(x, self.config.dropout, self.training)

    def _packed(self, tokens_BS: Tensor, embedding: nn.Embedding) -> tuple[Tensor, Packing]:
        batch, length = tokens_BS.shape
        packing = Packing.of(batch, length, tokens_BS == self.config.padding_idx)
        # Positions count real tokens, so padding on the left does not shift a sentence.
        real = tokens_BS != self.config.padding_idx
        positions = (real.cumsum(1) + (self.config.first_position - 1)).flatten()
        tokens = tokens_BS.flatten()
        if packing.indices is not None:
            tokens, positions = tokens[packing.indices], positions[packing.indices]
        return self._embed(tokens, positions, embedding), packing

    def encode(self, source_BS: Tensor) -> tuple[Tensor | list[Tensor], Packing]:
        """Token ids (B, S) to what the decoder attends to and its packing: the encoder's output
        (T, D) or, in transparent attention, such a tensor for each decoder layer."""
        return self._encode(source_BS)

    def _encode(self, source_BS: Tensor, seen: list[Tensor] | None = None):
        x, packing = self._packed(source_BS, self.embedding)
        run = partial(self.encoder.forward_packed, x, packing)
        if self.transparent is None or seen is not None:
            return self.fusions("encoder", run, seen), packing
        states: list[Tensor] = []
        output = run(states=states)
        return self.transparent(states, output), packing

    def layer_attention(self, source_BS: Tensor, target_in_BT: Tensor | None = None) -> Tensor:
        """How a fusion weighs the layers: (N, hops, L + 1) for N real tokens, row by row.

        The encoder's at the source; with ``target_in_BT`` the decoder's there.

        Raises:
            ValueError: where that side has no fusion with attention.
        """
        seen: list[Tensor] = []
        if target_in_BT is None:
            self._encode(source_BS, seen)
        else:
            self._decode(source_BS, target_in_BT, seen)
        return seen[0]

    def project(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V), by the target's embedding where it is tied."""
        return F.linear(x, self._output_weight)

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Logits (N, V) for the N real positions of ``target_in_BT``, row by row.

        The matching labels are ``target_out[target_in != padding_idx]``.
        """
        return self.project(self._decode(source_BS, target_in_BT)[0])

    def _decode(
        self, source_BS: Tensor, target_in_BT: Tensor, seen: list[Tensor] | None = None
    ) -> tuple[Tensor, Packing]:
        """Packed decoder output (N, D) and the packing of ``target_in_BT``."""
        memory, memory_packing = self.encode(source_BS)
        x, packing = self._packed(target_in_BT, self._target)
        run = partial(self.decoder.forward_packed, x, packing, memory, memory_packing)
        return self.fusions("decoder", run, seen), packing

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
            x, self._output_weight, labels, label_smoothing=label_smoothing,
            ignore_index=IGNORED, reduction="sum", return_nll=True, backend=self.config.backend,
        )  # fmt: skip

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source; `step` then decodes one position at a time."""
        return DecodeState(self.decoder.start(*self.encode(source_BS)))

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        positions = torch.full_like(tokens_B, self.config.first_position + state.position)
        x = self._embed(tokens_B, positions, self._target)
        x = self.fusions("decoder", partial(self.decoder.step, x, state.cache))
        state.position += 1
        return self.project(x)
