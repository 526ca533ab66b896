"""Depth growing: a trained Transformer stays as it is, and more layers learn on top of it.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019, Eq. 1 to 3.
"""

from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.mt.models.transformer import DecodeState, Transformer, last_attention
from deepfast.mt.models.transformer_config import TransformerConfig
from deepfast.nn import (
    DecoderCache,
    LayerNorm,
    Packing,
    TransformerDecoder,
    TransformerEncoder,
)


@dataclass(kw_only=True)
class DepthGrowingConfig(TransformerConfig):
    """Sizes and choices of a `DepthGrowing`: those of its bottom, and beside them the top's.

    The top has the bottom's width, heads, norm, activation and dropout.
    """

    top_encoder_layers: int = 2
    """M, of the encoder that is stacked on the bottom's."""
    top_decoder_layers: int = 2
    """M, of the decoder."""
    top_encoder_connection: str = "residual"
    """One of deepfast.nn.connections.connection.CONNECTIONS but "latent"; the top has a depth
    history of its own."""
    top_decoder_connection: str = "residual"
    """The same of the top's decoder."""
    top_dlcl: dict = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides of the top."""
    top_attnres_block: int | None = None
    """Layers of a block where the top has "block_attnres"; None: attnres_block."""
    embedding_norm: bool = False
    """Layer-norm on the embedding where it enters the top, as the authors' code has it."""
    bottom_dropout: bool = False
    """Dropout in the bottom while the top learns, as the authors' code has it."""

    def __post_init__(self):
        super().__post_init__()
        for name, plain in (("cross_attention", "top"), ("encoder_fusion", None),
                            ("decoder_fusion", None)):  # fmt: skip
            if getattr(self, name) != plain:
                raise ValueError(
                    f"{name}: expected {plain} for a model that grows, got {getattr(self, name)!r}"
                )
        self._check_whole("top_encoder_layers", "top_decoder_layers")
        self._check_dicts("top_dlcl")
        self._check_connections("top_dlcl", "top_encoder_connection", "top_decoder_connection")
        self._check_attnres("top_attnres_block", "top_encoder_connection", "top_decoder_connection")
        for side in ("encoder", "decoder", "top_encoder", "top_decoder"):
            if getattr(self, f"{side}_connection") == "latent":
                raise ValueError(
                    f"{side}_connection: expected another than latent for a model that grows, "
                    "got 'latent'"
                )

    @property
    def bottom(self) -> TransformerConfig:
        """What was trained before."""
        names = [field.name for field in fields(TransformerConfig)]
        return TransformerConfig(**{name: getattr(self, name) for name in names})

    def top(self, connection: str) -> dict:
        """Arguments of the top's encoder or decoder stack."""
        block = self.attnres_block if self.top_attnres_block is None else self.top_attnres_block
        return self.stack(connection, self.top_dlcl, block, "top")


@dataclass
class GrowingState:
    """A batch of hypotheses while it is being decoded: each decoder has its own memory."""

    bottom: DecodeState
    top: DecoderCache

    def reorder(self, index: Tensor, *, memory: bool = True) -> None:
        """Keeps hypotheses ``index``; see `DecodeState.reorder`."""
        self.bottom.reorder(index, memory=memory)
        self.top.reorder(index, memory=memory)


class DepthGrowing(nn.Module):
    """A frozen `Transformer`, the bottom, and an encoder and a decoder on top of it that learn.

    Of the embedded source x and target y, positions included,

        h1 = enc1(x)            s1 = dec1(y, attn1(h1))
        h2 = enc2(x + h1)       s2 = dec2(y + s1, attn2(h2))

    Logits are those of s2 by the bottom's embedding; those of s1 are the bottom's own, which is a
    whole model: `bottom`. Nothing of the bottom has a gradient, and it keeps nothing for backward.

    The paper does not say whether dropout stays on in the bottom while the top learns. Here it is
    off, so that the top is trained on what it will read; only the embedding that enters the top
    has its dropout. In the authors' code it is on, and one mask of the embedding serves bottom and
    top: ``bottom_dropout=True``. Their code also puts a layer-norm on that embedding, in place of
    x and y above: ``embedding_norm=True``. Two slips of it are not offered: its bottom decoder
    reads h1 + LN(x), which an addition in place made of h1, and its beam search leaves h2 behind
    when it reorders hypotheses.
    """

    def __init__(self, config: DepthGrowingConfig):
        super().__init__()
        self.config = config
        c = config
        self.bottom = Transformer(c.bottom).requires_grad_(False)
        self.encoder = TransformerEncoder(c.top_encoder_layers, **c.top(c.top_encoder_connection))
        self.decoder = TransformerDecoder(c.top_decoder_layers, **c.top(c.top_decoder_connection))
        self.source_norm, self.target_norm = (
            LayerNorm(c.dim, backend=c.backend) if c.embedding_norm else nn.Identity()
            for _ in range(2)
        )
        self.train()

    def train(self, mode: bool = True) -> "DepthGrowing":
        """As of any module, but for the bottom, which stays in evaluation mode unless its dropout
        is wanted."""
        super().train(mode)
        self.bottom.train(mode and self.config.bottom_dropout)
        return self

    def describe(self) -> str:
        """Sizes and choices in one line."""
        c = self.config
        return (
            f"{c.encoder_layers}+{c.top_encoder_layers} encoder layers "
            f"({c.encoder_connection}+{c.top_encoder_connection}), "
            f"{c.decoder_layers}+{c.top_decoder_layers} decoder layers "
            f"({c.decoder_connection}+{c.top_decoder_connection}), {c.norm}-norm, frozen bottom"
        )

    def _entering(self, x: Tensor, norm: nn.Module) -> Tensor:
        """The bottom's embedding as it enters the top."""
        if not self.bottom.training:
            x = F.dropout(x, self.config.dropout, self.training)
        return norm(x)

    def encode(self, source_BS: Tensor) -> tuple[Tensor, Tensor, Packing]:
        """Token ids (B, S) to what both encoders put out, h1 and h2 (T, D), and their packing."""
        with torch.no_grad():
            x, packing = self.bottom.embed_source(source_BS)
            h1 = self.bottom.encoder.forward_packed(x, packing)
        h2 = self.encoder.forward_packed(self._entering(x, self.source_norm) + h1, packing)
        return h1, h2, packing

    def _decode(self, source_BS: Tensor, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """Packed s2 (N, D) and the packing of ``target_in_BT``."""
        h1, h2, memory_packing = self.encode(source_BS)
        with torch.no_grad():
            y, packing = self.bottom.embed_target(target_in_BT)
            s1 = self.bottom.decoder.forward_packed(y, packing, h1, memory_packing)
        y = self._entering(y, self.target_norm)
        return self.decoder.forward_packed(y + s1, packing, h2, memory_packing), packing

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Logits (N, V) for the real positions of ``target_in_BT``; see `Transformer.forward`."""
        return self.bottom.project(self._decode(source_BS, target_in_BT)[0])

    def loss(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Loss and negative log-likelihood of the deep model; see `Transformer.loss`."""
        x, packing = self._decode(source_BS, target_in_BT)
        return self.bottom.loss_of(x, packing, target_in_BT, target_out_BT, label_smoothing)

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """(B, T, S): the cross attention of the top's last decoder layer; see
        `Transformer.alignment`."""
        return last_attention(self.decoder, lambda: self._decode(source_BS, target_in_BT))

    def start(self, source_BS: Tensor) -> GrowingState:
        """Encodes the source by both encoders; `step` then decodes one position at a time."""
        h1, h2, packing = self.encode(source_BS)
        bottom = DecodeState(self.bottom.decoder.start(h1, packing))
        return GrowingState(bottom, self.decoder.start(h2, packing))

    def step(self, tokens_B: Tensor, state: GrowingState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        below = state.bottom
        with torch.no_grad():
            y = self.bottom.embed_at(tokens_B, below.position)
            s1 = self.bottom.decoder.step(y, below.cache)
        below.position += 1
        s2 = self.decoder.step(self._entering(y, self.target_norm) + s1, state.top)
        return self.bottom.project(s2)
