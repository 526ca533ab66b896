"""The encoder-decoder Transformer for translation, with a depth connection on either side.

Vaswani et al. 2017 for the model; Wang et al. 2019 for pre-norm, depth and DLCL; Bapna et al. 2018
for transparent attention; Wang et al. 2018 for the fusion of layers; Li et al. 2020 for latent
depth.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.mt.models.interface import ParameterGroup, decaying_matrices
from deepfast.mt.models.transformer_config import TransformerConfig
from deepfast.nn import (
    DecoderCache,
    LatentDepth,
    Packing,
    TransformerDecoder,
    TransformerEncoder,
    TransparentAttention,
)

IGNORED = -100
"""A label that stands for none."""


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


def last_attention(decoder: TransformerDecoder, run: Callable[[], object]) -> Tensor:
    """(B, T, S): the cross attention of the decoder's last layer that runs while ``run`` does, the
    mean over its heads."""
    seen: list[tuple[nn.Module, tuple, dict]] = []
    with contextlib.ExitStack() as hooks:
        for layer in decoder.layers:
            hook = layer.cross_attention.register_forward_pre_hook(
                lambda *call: seen.append(call), with_kwargs=True
            )
            hooks.enter_context(hook)
        run()
    if not seen:
        raise ValueError(
            "alignment: expected a decoder layer that is used, got none: latent depth leaves out "
            f"all {len(decoder.layers)}"
        )
    attention, (x, packing), given = seen[-1]
    return attention.weights(x, packing, given["memory"], given["memory_packing"])


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
        self.encoder = TransformerEncoder(c.encoder_layers, **c.side("encoder"))
        self.decoder = TransformerDecoder(c.decoder_layers, **c.side("decoder"))
        self.transparent = None
        if c.cross_attention == "transparent":
            self.transparent = TransparentAttention(
                c.encoder_layers, c.decoder_layers, c.dim, norm=c.norm,
                dropout=c.mixture_dropout, backend=c.backend,
            )  # fmt: skip

        self.fusions = c.fusions()

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
        transparent = [] if self.transparent is None else ["transparent attention"]
        return ", ".join([*parts, f"{c.norm}-norm", *transparent])

    @property
    def _latent(self) -> dict[str, LatentDepth]:
        """Side -> its choice of layers."""
        sides = {"encoder": self.encoder.latent, "decoder": self.decoder.latent}
        return {name: latent for name, latent in sides.items() if latent is not None}

    def set_step(self, step: int) -> None:
        """Which step of training comes, counted from 1: latent depth anneals and draws by it."""
        for latent in self._latent.values():
            latent.set_step(step)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Latent depth's logits may learn faster than the rest."""
        groups = decaying_matrices(self)
        for latent in self._latent.values():
            if latent.lr_scale != 1:
                for group in groups:
                    group["params"] = [p for p in group["params"] if p is not latent.logits]
                groups.append({"params": [latent.logits], "lr_scale": latent.lr_scale})
        return groups

    def metrics(self) -> dict[str, float | list[int]]:
        """Of latent depth: layers that are used in expectation, the KL in nats, and which layers
        each language uses in evaluation."""
        row = {}
        for side, latent in self._latent.items():
            row[f"{side}_depth"] = latent.depth().item()
            row[f"{side}_kl"] = latent.kl().item()
            for index, name in enumerate(self.config.languages or [None]):
                used = [i for i, z in enumerate(latent.choose(index)) if z > 0]
                end = f"_{name}" if name else ""
                row |= {f"{side}_layers{end}": len(used), f"{side}_used{end}": used}
        return row

    def group(self, tokens: Sequence[int]) -> int:
        """What the source sentences of one batch must agree in: with latent depth their language,
        by its index.

        Raises:
            ValueError: a sentence without the tag of one of the model's languages.
        """
        tags = list(self.config.languages.values())
        if not tags:
            return 0
        if not tokens or tokens[0] not in tags:
            raise ValueError(
                "expected a source sentence that begins with the tag of one of the languages "
                f"{', '.join(self.config.languages)}, got none of them"
            )
        return tags.index(tokens[0]) if self._latent else 0

    def _language(self, source_BS: Tensor) -> int:
        """The language of a batch, from its sentences' first tokens."""
        # One layer choice for all languages needs none in training: reading it waits for a GPU.
        needed = self._latent or not self.training
        if not needed or not self.config.languages or not source_BS.numel():
            return 0
        real = source_BS != self.config.padding_idx
        first = source_BS.gather(1, real.int().argmax(1, keepdim=True))
        languages = {self.group([tag]) for tag in first.flatten().tolist()}
        if len(languages) > 1:
            raise ValueError(
                f"expected a batch of one language, got one of {len(languages)}: latent depth "
                "chooses layers for a whole batch"
            )
        return languages.pop()

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

    def embed_source(self, source_BS: Tensor) -> tuple[Tensor, Packing]:
        """Token ids (B, S) to packed embeddings with positions (T, D), and their packing."""
        return self._packed(source_BS, self.embedding)

    def embed_target(self, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """As `embed_source`, of the other side."""
        return self._packed(target_in_BT, self._target)

    def embed_at(self, tokens_B: Tensor, position: int) -> Tensor:
        """Target tokens (B,) that all stand at one position, from 0, to (B, D)."""
        positions = torch.full_like(tokens_B, self.config.first_position + position)
        return self._embed(tokens_B, positions, self._target)

    def encode(
        self, source_BS: Tensor, language: int | None = None
    ) -> tuple[Tensor | list[Tensor], Packing]:
        """Token ids (B, S) to what the decoder attends to and its packing: the encoder's output
        (T, D) or, in transparent attention, such a tensor for each decoder layer.

        language: what latent depth chooses layers for; None: what the sentences' tags say.
        """
        language = self._language(source_BS) if language is None else language
        return self._encode(*self.embed_source(source_BS), language)

    def _encode(
        self, x: Tensor, packing: Packing, language: int, seen: list[Tensor] | None = None
    ) -> tuple[Tensor | list[Tensor], Packing]:
        run = partial(self.encoder.forward_packed, x, packing, language=language)
        if self.transparent is None:
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
            self._encode(*self.embed_source(source_BS), self._language(source_BS), seen)
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
        language = self._language(source_BS)
        memory, memory_packing = self.encode(source_BS, language)
        x, packing = self.embed_target(target_in_BT)
        run = partial(
            self.decoder.forward_packed, x, packing, memory, memory_packing, language=language
        )
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
        label-smoothed, the likelihood is not and has no gradient. Latent depth adds its penalty to
        the loss of each position.
        """
        x, packing = self._decode(source_BS, target_in_BT)
        return self.loss_of(x, packing, target_in_BT, target_out_BT, label_smoothing)

    def loss_of(
        self,
        x: Tensor,
        packing: Packing,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        """What `loss` returns, of packed decoder output (N, D) and its packing."""
        # A compiler does not pack: there padding is computed, and must not count.
        padding_BT = target_in_BT == self.config.padding_idx
        labels = target_out_BT.masked_fill(padding_BT, IGNORED).flatten()
        if packing.indices is not None:
            labels = labels[packing.indices]
        loss, nll = ops.linear_cross_entropy(
            x, self._output_weight, labels, label_smoothing=label_smoothing,
            ignore_index=IGNORED, reduction="sum", return_nll=True, backend=self.config.backend,
        )  # fmt: skip
        for latent in self._latent.values():
            loss = loss + latent.penalty() * (~padding_BT).sum()
        return loss, nll

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """(B, T, S): the cross attention of the last decoder layer that runs, the mean over its
        heads."""
        return last_attention(self.decoder, lambda: self._decode(source_BS, target_in_BT))

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source; `step` then decodes one position at a time."""
        language = self._language(source_BS)
        return DecodeState(self.decoder.start(*self.encode(source_BS, language), language=language))

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        run = partial(self.decoder.step, self.embed_at(tokens_B, state.position), state.cache)
        x = self.fusions("decoder", run)
        state.position += 1
        return self.project(x)
