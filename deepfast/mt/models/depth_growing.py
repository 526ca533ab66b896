"""Depth growing: a trained Transformer is frozen, and more layers learn on top of it.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019, Eq. 1 to 3.
"""

from collections.abc import Mapping
from dataclasses import field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.mt.checked import Count, Layers, Options, checked
from deepfast.mt.models.interface import Part
from deepfast.mt.models.transformer import DecodeState, PackedModel, Transformer, init_fan_in
from deepfast.mt.models.transformer_config import SIDES, Connection, Reads, TransformerConfig
from deepfast.nn import LayerNorm, Packing, TransformerDecoder, TransformerEncoder


@checked("DepthGrowingConfig: ")
class DepthGrowingConfig(TransformerConfig):
    """Sizes and choices of a `DepthGrowing`: the fields of its bottom, then those of the top.

    The top has the bottom's width, heads, norm, activation and dropout.
    """

    top_encoder_layers: Layers = 2
    """M of the encoder, which is stacked on the bottom's."""
    top_decoder_layers: Layers = 2
    """M of the decoder."""
    top_encoder_connection: Connection = "residual"
    """One of deepfast.connections.CONNECTIONS except "latent". The top has its own
    depth history."""
    top_decoder_connection: Connection = "residual"
    """The same for the top's decoder."""
    top_dlcl: Options = field(default_factory=dict)
    """Further arguments of deepfast.nn.DLCL, for both sides of the top."""
    top_attnres_block: Count | None = None
    """Layers in a block if the top has "block_attnres"; None: attnres_block."""
    top_attnres_reads: Reads | None = None
    """How often a layer of the top reads attention residuals; None: attnres_reads."""
    embedding_norm: bool = False
    """Normalise the embedding where it enters the top, as the authors' code does."""
    bottom_dropout: bool = False
    """Apply dropout in the bottom while the top learns, as the authors' code does."""

    def __post_init__(self):
        super().__post_init__()
        plain = {"cross_attention": "top", "encoder_fusion": None, "decoder_fusion": None}
        for key, value in plain.items():
            fits = getattr(self, key) == value
            self.expect(fits, key, f"{value or 'null'} in a model that grows")
        self._check_connections("top_")
        for key in (f"{part}{side}_connection" for part in ("", "top_") for side in SIDES):
            fits = getattr(self, key) != "latent"
            self.expect(fits, key, "another connection than latent in a model that grows")

    @property
    def bottom(self) -> TransformerConfig:
        """The config of the trained Transformer below."""
        names = [field.name for field in fields(TransformerConfig)]
        return TransformerConfig(**{name: getattr(self, name) for name in names})


class DepthGrowing(PackedModel):
    """A frozen `Transformer`, the bottom, with an encoder and a decoder on top that learn.

    With x and y the embedded source and target, positions included,

        h1 = enc1(x)            s1 = dec1(y, attn1(h1))
        h2 = enc2(x + h1)       s2 = dec2(y + s1, attn2(h2))

    The logits come from s2, by the bottom's embedding. The bottom is a whole model of its own, with
    logits from s1. Its parameters get no gradient, and it saves no tensors for backward.

    The paper does not say whether the bottom applies dropout while the top learns. By default it
    does not, so that the top is trained on what it reads in evaluation; only the embedding that
    enters the top has dropout. In the authors' code the bottom applies dropout, and bottom and top
    read the embedding with the same mask: ``bottom_dropout=True``. Their code also normalises the
    embedding that enters the top: ``embedding_norm=True``. Two mistakes of their code are not
    offered. There the bottom decoder reads h1 + LN(x), because an addition in place overwrites h1;
    and beam search does not reorder h2 with the hypotheses.
    """

    Config = DepthGrowingConfig
    bottom: Transformer

    def __init__(self, config: DepthGrowingConfig):
        super().__init__()
        self.config = config
        c = config
        self.bottom = Transformer(c.bottom).requires_grad_(False)
        self.encoder = TransformerEncoder(c.top_encoder_layers, **c.stack("top_encoder"))
        self.decoder = TransformerDecoder(c.top_decoder_layers, **c.stack("top_decoder"))
        self.source_norm, self.target_norm = (
            LayerNorm(c.dim, backend=c.backend) if c.embedding_norm else nn.Identity()
            for _ in range(2)
        )
        if c.init == "fan_in":
            init_fan_in(self.encoder, self.decoder)
        self.train()

    def train(self, mode: bool = True) -> "DepthGrowing":
        """Sets the mode of all parts; without ``bottom_dropout`` the bottom stays in evaluation."""
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

    def parts(self) -> Mapping[str, Part]:
        """The layers of both sides, from the bottom's first to the top's last."""
        return {
            "encoder": [*self.bottom.encoder.layers, *self.encoder.layers],
            "decoder": [*self.bottom.decoder.layers, *self.decoder.layers],
        }

    def _entering(self, x: Tensor, norm: nn.Module) -> Tensor:
        """The bottom's embedding as it enters the top."""
        if not self.bottom.training:
            x = F.dropout(x, self.config.dropout, self.training)
        return norm(x)

    def encode(self, source_BS: Tensor) -> tuple[Tensor, Tensor, Packing]:
        """Token ids (B, S) to the outputs of both encoders, h1 and h2 (T, D), and their packing."""
        with torch.no_grad():
            x, packing = self.bottom.embed_source(source_BS)
            h1 = self.bottom.encoder.forward_packed(x, packing)
        h2 = self.encoder.forward_packed(self._entering(x, self.source_norm) + h1, packing)
        return h1, h2, packing

    def decode(self, source_BS: Tensor, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """Packed s2 (N, D) and the packing of ``target_in_BT``."""
        h1, h2, source_packing = self.encode(source_BS)
        with torch.no_grad():
            y, packing = self.bottom.embed_target(target_in_BT)
            s1 = self.bottom.decoder.forward_packed(y, packing, h1, source_packing)
        y = self._entering(y, self.target_norm)
        return self.decoder.forward_packed(y + s1, packing, h2, source_packing), packing

    def logit_map(self) -> tuple[Tensor, None]:
        """The bottom's."""
        return self.bottom.logit_map()

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source by both encoders; `step` then decodes one position at a time."""
        h1, h2, packing = self.encode(source_BS)
        return DecodeState(
            [self.bottom.decoder.start(h1, packing), self.decoder.start(h2, packing)]
        )

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        below, above = state.caches
        with torch.no_grad():
            y = self.bottom.embed_at(tokens_B, state.position)
            s1 = self.bottom.decoder.step(y, below)
        state.position += 1
        return self.project(self.decoder.step(self._entering(y, self.target_norm) + s1, above))
