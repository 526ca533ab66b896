"""The encoder-decoder Transformer for translation, with a depth connection on either side.

Vaswani et al. 2017 for the model; Wang et al. 2019 for pre-norm, depth and DLCL; Bapna et al. 2018
for transparent attention; Wang et al. 2018 for the fusion of layers; Li et al. 2020 for latent
depth.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.mt.ids import PAD
from deepfast.mt.models.interface import (
    IGNORED,
    ParameterGroup,
    Part,
    TranslationModel,
    target_vocab_size,
)
from deepfast.mt.models.transformer_config import SIDES, TransformerConfig
from deepfast.nn import (
    DecoderCache,
    LatentDepth,
    LayerFusion,
    Packing,
    TransformerDecoder,
    TransformerEncoder,
    TransparentAttention,
)
from deepfast.nn.connections.fusion import WITH_ATTENTION, layer_embedding


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

    caches: list[DecoderCache]
    """One for each decoder, from the bottom."""
    position: int = 0

    def reorder(self, index: Tensor, *, encoded: bool = True) -> None:
        """Keeps hypotheses ``index`` (B',), int64, repeats allowed.

        ``encoded`` is not needed: a cache knows the sentence of every row.
        """
        for cache in self.caches:
            cache.reorder(index)


def last_call(modules: Sequence[nn.Module], run: Callable[[], object]) -> tuple | None:
    """The last call of one of ``modules`` during ``run()``: the module, its arguments and keyword
    arguments; None if ``run`` calls none of them."""
    calls: list[tuple[nn.Module, tuple, dict]] = []
    with contextlib.ExitStack() as hooks:
        for module in modules:
            hook = module.register_forward_pre_hook(
                lambda *call: calls.append(call), with_kwargs=True
            )
            hooks.enter_context(hook)
        run()
    return calls[-1] if calls else None


class Fusions(nn.Module):
    """`LayerFusion` over the layers of the encoder, the decoder or both.

    Attributes:
        encoder, decoder: the side's `LayerFusion`, or None.
        layer_embedding: E of the fusions that have layer embeddings, or None. Layer l of either
            side has the same embedding.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        c, states = config, []
        for side in SIDES:
            kind, fusion = getattr(c, f"{side}_fusion"), None
            if kind is not None:
                fusion = LayerFusion(
                    getattr(c, f"{side}_layers") + 1, c.dim, kind, own_embedding=False,
                    source_norm=c.norm_of(side) == "pre", backend=c.backend, **c.fusion,
                )  # fmt: skip
                states += [fusion.num_states] * fusion.with_embeddings
            setattr(self, side, fusion)
        self.layer_embedding = layer_embedding(max(states), c.dim) if states else None

    def forward(self, side: str, states: list[Tensor], output: Tensor) -> Tensor:
        """The fusion of a stack's ``states``, the last of which is its ``output``."""
        fusion = getattr(self, side)
        embedding = self.layer_embedding if fusion.with_embeddings else None
        return fusion([*states[:-1], output], embedding)


def init_fan_in(*modules: nn.Module) -> None:
    """Draws all matrices and their biases from U(-b, b) with b = 1 / sqrt(inputs)."""
    for module in modules:
        for linear in module.modules():
            if isinstance(linear, nn.Linear):
                linear.reset_parameters()  # torch's own rule is this one


class PackedModel(TranslationModel):
    """A model whose decoder's output is packed: `Transformer` and `DepthGrowing`."""

    decoder: TransformerDecoder
    decode: Callable[[Tensor, Tensor], tuple[Tensor, Packing]]
    """Source (B, S) and target (B, T) to hidden states (N, D) and the packing of the target."""

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Logits (N, V) for the N real positions of ``target_in_BT``, row by row.

        Their labels are ``target_out[target_in != PAD]``.
        """
        return self.project(self.decode(source_BS, target_in_BT)[0])

    def labelled(
        self, source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The decoder's output (N, D) and its labels (N,)."""
        x, packing = self.decode(source_BS, target_in_BT)
        # A compiled model does not pack: it also computes padding, which must not count.
        labels = target_out_BT.masked_fill(target_in_BT == PAD, IGNORED).flatten()
        return x, labels if packing.indices is None else labels[packing.indices]

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """(B, T, S): the cross attention of the last decoder layer that runs, the mean over its
        heads."""
        attentions = [layer.cross_attention for layer in self.decoder.layers]
        call = last_call(attentions, lambda: self.decode(source_BS, target_in_BT))
        if call is None:
            raise ValueError(
                "alignment: expected a decoder layer that is used, got none: latent depth leaves "
                f"out all {len(self.decoder.layers)}"
            )
        attention, (x, packing), given = call
        return attention.weights(x, packing, given["encoded"], given["encoded_packing"])


class Transformer(PackedModel):
    """Encoder, decoder, and by default one embedding that source, target and output share.

    Padding may stand anywhere in the source, and on the right of the target.
    """

    Config = TransformerConfig

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        c = config
        self.embedding = self._new_embedding(c.vocab_size)
        self.target_embedding = self.output = None
        if c.share_embeddings != "all":
            self.target_embedding = self._new_embedding(target_vocab_size(c))
        if c.share_embeddings == "none":
            self.output = nn.Linear(c.dim, target_vocab_size(c), bias=False)
            nn.init.normal_(self.output.weight, std=c.dim**-0.5)
        self.encoder = TransformerEncoder(c.encoder_layers, **c.stack("encoder"))
        self.decoder = TransformerDecoder(c.decoder_layers, **c.stack("decoder"))
        self.transparent = None
        if c.cross_attention == "transparent":
            self.transparent = TransparentAttention(
                c.encoder_layers, c.decoder_layers, c.dim, norm=c.norm,
                dropout=c.mixture_dropout, backend=c.backend,
            )  # fmt: skip
        self.fusions = Fusions(c)
        if c.init == "fan_in":
            init_fan_in(self)

    def describe(self) -> str:
        """Sizes and choices in one line."""
        c = self.config
        parts = []
        for side in SIDES:
            fusion = getattr(c, f"{side}_fusion")
            words = getattr(c, f"{side}_connection") + (f", {fusion} fusion" if fusion else "")
            parts.append(f"{getattr(c, f'{side}_layers')} {side} layers ({words})")
        parts.append(
            f"{c.norm}-norm" + (f" ({c.decoder_norm} in the decoder)" if c.decoder_norm else "")
        )
        parts += {"layer": [], "rms": ["RMS norm"], "none": ["no norms"]}[c.norm_type]
        return ", ".join(parts + ["transparent attention"] * (self.transparent is not None))

    def parts(self) -> Mapping[str, Part]:
        """The layers of both sides, and the matrices of the vocabulary."""
        encoder: Part = [*self.encoder.layers]
        decoder: Part = [*self.decoder.layers]
        layers = {"encoder": encoder, "decoder": decoder}
        words = ("embedding", "target_embedding", "output")
        modules = {name: getattr(self, name) for name in words}
        return layers | {name: module for name, module in modules.items() if module is not None}

    @property
    def _latent(self) -> dict[str, LatentDepth]:
        """The latent depth of each side that has one."""
        sides = {side: getattr(self, side).latent for side in SIDES}
        return {side: latent for side, latent in sides.items() if latent is not None}

    @property
    def draws(self) -> bool:
        """Whether a forward pass draws its layers."""
        return bool(self._latent)

    def set_step(self, step: int) -> None:
        """Latent depth anneals and draws by the step."""
        for latent in self._latent.values():
            latent.set_step(step)

    def parameter_groups(self) -> list[ParameterGroup]:
        """As usual, but the logits of latent depth may have a learning rate of their own."""
        groups = super().parameter_groups()
        for latent in self._latent.values():
            if latent.lr_scale != 1:
                for group in groups:
                    group["params"] = [p for p in group["params"] if p is not latent.logits]
                groups.append({"params": [latent.logits], "lr_scale": latent.lr_scale})
        return groups

    def metrics(self) -> dict[str, float | list[int]]:
        """For latent depth: the expected number of layers, the KL in nats, and the layers that each
        language keeps."""
        row: dict[str, float | list[int]] = {}
        for side, latent in self._latent.items():
            row[f"{side}_depth"] = latent.depth().item()
            row[f"{side}_kl"] = latent.kl().item()
            for index, name in enumerate(self.config.languages or [None]):
                used = [i for i, kept in enumerate(latent.keeps(index)) if kept]
                end = f"_{name}" if name else ""
                row |= {f"{side}_layers{end}": len(used), f"{side}_used{end}": used}
        return row

    def group(self, tokens: Sequence[int]) -> int:
        """With latent depth: the index of a source sentence's language, which all sentences of a
        batch must share. Else 0.

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
        """The index of a batch's language, from the first tokens of its sentences."""
        # Reading it waits for the GPU, so training without latent depth does not read it.
        needed = self._latent or not self.training
        if not needed or not self.config.languages or not source_BS.numel():
            return 0
        first = source_BS.gather(1, (source_BS != PAD).int().argmax(1, keepdim=True))
        languages = {self.group([tag]) for tag in first.flatten().tolist()}
        if len(languages) > 1:
            raise ValueError(
                f"expected a batch of one language, got one of {len(languages)}: latent depth "
                "chooses layers for a whole batch"
            )
        return languages.pop()

    def _new_embedding(self, size: int) -> nn.Embedding:
        dim = self.config.dim
        embedding = nn.Embedding(size, dim, padding_idx=PAD)
        nn.init.normal_(embedding.weight, std=dim**-0.5)
        with torch.no_grad():
            embedding.weight[PAD].zero_()
        return embedding

    @property
    def _target(self) -> nn.Embedding:
        return self.embedding if self.target_embedding is None else self.target_embedding

    def _embed(self, tokens: Tensor, positions: Tensor, embedding: nn.Embedding) -> Tensor:
        """Packed tokens (T,) and their positions, (T,) or (1,) for all, to (T, D)."""
        x = embedding(tokens) * math.sqrt(self.config.dim)
        x = x + sinusoids(positions, self.config.dim).to(x.dtype)
        return F.dropout(x, self.config.dropout, self.training)

    def _packed(self, tokens_BS: Tensor, embedding: nn.Embedding) -> tuple[Tensor, Packing]:
        batch, length = tokens_BS.shape
        padding_BS = tokens_BS == PAD
        packing = Packing.of(batch, length, padding_BS)
        # Positions count real tokens, so that padding on the left does not shift a sentence.
        positions = ((~padding_BS).cumsum(1) - 1).flatten()
        tokens = tokens_BS.flatten()
        if packing.indices is not None:
            tokens, positions = tokens[packing.indices], positions[packing.indices]
        return self._embed(tokens, positions, embedding), packing

    def embed_source(self, source_BS: Tensor) -> tuple[Tensor, Packing]:
        """Token ids (B, S) to packed embeddings with positions (T, D), and their packing."""
        return self._packed(source_BS, self.embedding)

    def embed_target(self, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """`embed_source` for the target."""
        return self._packed(target_in_BT, self._target)

    def embed_at(self, tokens_B: Tensor, position: int) -> Tensor:
        """Target tokens (B,) at one position, counted from 0, to (B, D)."""
        positions = tokens_B.new_full((1,), position)
        return self._embed(tokens_B, positions, self._target)

    def encode(
        self, source_BS: Tensor, language: int | None = None
    ) -> tuple[Tensor | list[Tensor], Packing]:
        """Token ids (B, S) to what the decoder attends to, and its packing.

        Args:
            language: whose layers latent depth chooses; None: read from the sentences' tags.

        Returns:
            The encoder's output (T, D), or with transparent attention one such tensor for each
            decoder layer; and the packing of the source.
        """
        if language is None:
            language = self._language(source_BS)
        x, packing = self.embed_source(source_BS)
        if self.transparent is None and self.fusions.encoder is None:
            return self.encoder.forward_packed(x, packing, language=language), packing
        states: list[Tensor] = []
        encoded = self.encoder.forward_packed(x, packing, states=states, language=language)
        if self.transparent is not None:
            return self.transparent(states, encoded), packing
        return self.fusions("encoder", states, encoded), packing

    def decode(self, source_BS: Tensor, target_in_BT: Tensor) -> tuple[Tensor, Packing]:
        """Packed decoder output (N, D) and the packing of ``target_in_BT``."""
        language = self._language(source_BS)
        encoded, source_packing = self.encode(source_BS, language)
        x, packing = self.embed_target(target_in_BT)
        states: list[Tensor] | None = None if self.fusions.decoder is None else []
        x = self.decoder.forward_packed(
            x, packing, encoded, source_packing, states=states, language=language
        )
        return x if states is None else self.fusions("decoder", states, x), packing

    def layer_attention(self, source_BS: Tensor, target_in_BT: Tensor | None = None) -> Tensor:
        """How a fusion weighs the layers: (N, hops, L + 1) for N real tokens, row by row.

        With ``target_in_BT`` those are the weights of the decoder's layers at the target, else
        those of the encoder's layers at the source.

        Raises:
            ValueError: if that side has no fusion with attention.
        """
        side = "encoder" if target_in_BT is None else "decoder"
        fusion = getattr(self.fusions, side)
        if fusion is None or fusion.fusion_type not in WITH_ATTENTION:
            got = None if fusion is None else fusion.fusion_type
            raise ValueError(f"{side}_fusion: expected one of {WITH_ATTENTION}, got {got!r}")

        given = (source_BS,) if target_in_BT is None else (source_BS, target_in_BT)
        run = self.encode if target_in_BT is None else self.decode
        _, operands, _ = last_call([fusion], lambda: run(*given))
        return fusion(*operands, return_attention=True)[1]

    def logit_map(self) -> tuple[Tensor, None]:
        """The matrix that maps hidden states to logits."""
        return (self._target if self.output is None else self.output).weight, None

    def penalties(self) -> list[Tensor]:
        return [latent.penalty() for latent in self._latent.values()]

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source; `step` then decodes one position at a time."""
        language = self._language(source_BS)
        encoded = self.encode(source_BS, language)
        return DecodeState([self.decoder.start(*encoded, language=language)])

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        x = self.embed_at(tokens_B, state.position)
        states: list[Tensor] | None = None if self.fusions.decoder is None else []
        x = self.decoder.step(x, *state.caches, states=states)
        if states is not None:
            x = self.fusions("decoder", states, x)
        state.position += 1
        return self.project(x)
