"""The deep LSTM translation models Deep-Att and Deep-ED, with fast-forward connections.

Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation,
TACL 2016. Layer k has a feed-forward half f and a recurrent half h. Half of the channels of f also
go straight to the next layer:

    f^k = W^k [Half(f^{k-1}), Dropout(h^{k-1})],   h^k = LSTM(f^k)              f (4H), h (H)

Half takes the first half of the channels. The encoder has two separate columns of layers.
Directions alternate from layer to layer, and the two columns start in opposite directions. From
the top layers of the columns, (f, h) and (f', h'), the decoder gets a context c:

    Deep-Att   e_t = [h_t, h'_t, f_t, f'_t],  c_t = sum_s alpha_{ts} W_p e_s,  W_p to a quarter
               alpha_ts = softmax_s(v tanh(W_a h^1_{t-1} + U_a W_p e_s)),      h^1 the decoder's
    Deep-ED    c = [h_m, max_t h'_t, max_t f_t, max_t f'_t]                    m the last step

The decoder is one column whose layers all run forward. Its input is [c_t, y_{t-1}], with y_0 = 0.

As in the paper, e and c hold all of f (10H, which W_p reduces to a quarter), source, target and
softmax have separate matrices, and recurrent parameters start at 0. The paper has biases and leaves
them out of its notation; here they are an option, as are separate vocabularies. Unlike in the
paper, the alignment model is as wide as a layer. The paper's columns have nine layers; in a column
with an even number m is the first position.

The ablations of its tables 2 to 6 are options. Without fast-forward connections a layer reads
Dropout(h) alone, e and c hold no f, and there is no W_p: with one layer this is the standard
attention model. With one column e and c hold no h' and f'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.mt.checked import Field, Fraction, Layers, Positive, Width, checked
from deepfast.mt.ids import PAD
from deepfast.mt.models.interface import (
    ModelConfig,
    ParameterGroup,
    Part,
    TranslationModel,
    target_vocab_size,
)


@checked("FastForwardLSTMConfig: ")
class FastForwardLSTMConfig(ModelConfig):
    """Sizes and choices of a `FastForwardLSTM`."""

    dim: Annotated[Width, Field(multiple_of=2)] = 512
    """H, the memory cells of a layer."""
    embedding_dim: Width = 256
    """E, the width of a word's embedding."""
    encoder_layers: Layers = 9
    """Layers of each of the encoder's two columns."""
    decoder_layers: Layers = 7
    """Layers of the decoder."""
    attention: bool = True
    """True: Deep-Att. False: Deep-ED, whose decoder reads one vector for the whole source."""
    fast_forward: bool = True
    """Whether a layer, and the context, read the f of the layer below."""
    bidirectional: bool = True
    """Whether the directions of the encoder's layers alternate; False: all run forward."""
    columns: Annotated[int, Field(ge=1, le=2)] = 2
    """Columns of the encoder, 1 or 2."""
    bias: bool = False
    """Whether the maps to f, W_p and the softmax have biases, which start at 0, as in the paper."""
    dropout: Fraction = 0.1
    """On each h where it enters the next layer, not on f."""
    init_std: Positive = 0.07
    """Standard deviation of the initial values of all parameters but the recurrent ones."""
    lr_scale: Positive = 0.08
    """Learning rate of those parameters as a fraction of that of the recurrent ones: the paper has
    4e-5 and 5e-4."""


class Layer(nn.Module):
    """The feed-forward and the recurrent half of a layer."""

    def __init__(self, inputs: int, dim: int, bias: bool, backend: str | None):
        super().__init__()
        self.feed_forward = nn.Linear(inputs, 4 * dim, bias=bias)
        self.recurrent = nn.Parameter(torch.zeros(dim, 4 * dim))
        self.peephole = nn.Parameter(torch.zeros(3, dim))
        self.backend = backend

    def recur(self, f: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
        """f (T, B, 4H) to h (T, B, H), the last h and c; see `deepfast.ops.peephole_lstm`."""
        return ops.peephole_lstm(f, self.recurrent, self.peephole, backend=self.backend, **options)


class Attention(nn.Module):
    """Bahdanau et al. 2015: ``softmax_s(v tanh(W_a q + U_a k_s))``."""

    def __init__(self, query_dim: int, key_dim: int, dim: int):
        super().__init__()
        self.query = nn.Linear(query_dim, dim, bias=False)
        self.key = nn.Linear(key_dim, dim, bias=False)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, query_BH: Tensor, keys_BSA: Tensor, padding_BS: Tensor) -> Tensor:
        """Weights (B, S), 0 on padding. The keys have passed ``self.key``."""
        scores = self.score(torch.tanh(self.query(query_BH).unsqueeze(1) + keys_BSA)).squeeze(-1)
        return scores.masked_fill(padding_BS, -torch.inf).softmax(-1)


@dataclass
class Source:
    """What the decoder reads of a batch of source sentences."""

    encoded: Tensor
    """With attention W_p e (B, S, P), or e where there is no W_p; without attention c (B, P)."""
    keys: Tensor | None = None
    """U_a of it (B, S, A), with attention."""
    padding: Tensor | None = None
    """(B, S) bool: True at padding; with attention."""
    places: Tensor | None = None
    """(B, S): the position of each token in the given source; here real tokens come first."""

    def reorder(self, index: Tensor) -> None:
        """Keeps sentences ``index``."""
        for name, value in vars(self).items():
            if value is not None:
                setattr(self, name, value[index])


@dataclass
class DecodeState:
    """A batch of hypotheses while it is being decoded."""

    source: Source
    h: list[Tensor]
    """(B, H) for each layer."""
    c: list[Tensor]
    """(B, H) for each layer."""
    position: int = 0

    def reorder(self, index: Tensor, *, encoded: bool = True) -> None:
        """Keeps hypotheses ``index`` (B',), int64, repeats allowed.

        ``encoded=False`` leaves the encoder's side as it is, for an ``index`` that keeps every row
        on its own sentence.
        """
        self.h, self.c = [x[index] for x in self.h], [x[index] for x in self.c]
        if encoded:
            self.source.reorder(index)


class FastForwardLSTM(TranslationModel):
    """Deep-Att, or without attention Deep-ED.

    Padding may stand anywhere in the source, and on the right of the target.
    """

    Config = FastForwardLSTMConfig
    # Each is a ModuleList, whose type does not include that of its elements.
    columns: Sequence[Sequence[Layer]]
    decoder: Sequence[Layer]

    def __init__(self, config: FastForwardLSTMConfig):
        super().__init__()
        self.config = c = config
        width, top = c.embedding_dim, c.columns * (5 if c.fast_forward else 1) * c.dim
        reduced = c.attention and c.fast_forward
        self.context_dim = top // 4 if reduced else top

        def stack(inputs: int, count: int) -> nn.ModuleList:
            sizes = [inputs] + [3 * c.dim if c.fast_forward else c.dim] * (count - 1)
            return nn.ModuleList(Layer(size, c.dim, c.bias, c.backend) for size in sizes)

        self.source_embedding = nn.Embedding(c.vocab_size, width, padding_idx=PAD)
        self.target_embedding = nn.Embedding(target_vocab_size(c), width, padding_idx=PAD)
        self.columns = nn.ModuleList(stack(width, c.encoder_layers) for _ in range(c.columns))  # type: ignore[assignment]
        self.decoder = stack(self.context_dim + width, c.decoder_layers)  # type: ignore[assignment]
        if reduced:
            self.quarter = nn.Linear(top, self.context_dim, bias=c.bias)
        if c.attention:
            self.attention = Attention(c.dim, self.context_dim, c.dim)
        else:
            self.alignment = None  # type: ignore[method-assign]  # A model without has None.
        self.softmax = nn.Linear(c.dim, target_vocab_size(c), bias=c.bias)
        recurrent = {id(p) for p in self._recurrent()}
        for name, p in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(p)
            elif id(p) not in recurrent:
                nn.init.normal_(p, std=c.init_std)
        with torch.no_grad():
            for embedding in (self.source_embedding, self.target_embedding):
                embedding.weight[PAD].zero_()

    def _recurrent(self) -> list[nn.Parameter]:
        layers = [m for m in self.modules() if isinstance(m, Layer)]
        return [p for layer in layers for p in (layer.recurrent, layer.peephole)]

    def parameter_groups(self) -> list[ParameterGroup]:
        """Recurrent parameters learn at the full rate, the others at ``lr_scale`` times that rate.
        All but the two embeddings decay (Eq. 12)."""
        recurrent = self._recurrent()
        words = [self.source_embedding.weight, self.target_embedding.weight]
        apart = {id(p) for p in (*recurrent, *words)}
        others = [p for p in self.parameters() if id(p) not in apart]
        scale = self.config.lr_scale
        return [
            {"params": recurrent, "decays": True},
            {"params": others, "lr_scale": scale, "decays": True},
            {"params": words, "lr_scale": scale},
        ]

    def parts(self) -> Mapping[str, Part]:
        """The layers of each column and of the decoder, and the matrices of the vocabulary."""
        layers: dict[str, Part] = {
            f"encoder_{n}": [*column] for n, column in enumerate(self.columns, 1)
        }
        words = {"embedding": self.source_embedding, "target_embedding": self.target_embedding}
        return layers | {"decoder": [*self.decoder], "output": self.softmax} | words

    def describe(self) -> str:
        """Sizes and choices in one line."""
        c = self.config
        parts = [
            "Deep-Att" if c.attention else "Deep-ED",
            f"{c.encoder_layers} + {c.decoder_layers} LSTM layers",
            f"{c.dim} cells",
        ]
        parts += ["no fast-forward connections"] * (not c.fast_forward)
        parts += ["all layers forward"] * (not c.bidirectional)
        parts += ["one column"] * (c.columns == 1)
        return ", ".join(parts)

    def _next(self, f: Tensor, h: Tensor) -> Tensor:
        """The input of the layer above, ``[Half(f), Dropout(h)]``."""
        h = F.dropout(h, self.config.dropout, self.training)
        return torch.cat((f.chunk(2, -1)[0], h), -1) if self.config.fast_forward else h

    def _column(self, x: Tensor, column: Sequence[Layer], lengths: Tensor, first: int):
        """f, h and the last step's h of the top layer; ``first`` is 1 for the column whose first
        layer runs backwards."""
        for k, layer in enumerate(column):
            f = layer.feed_forward(x)
            reverse = self.config.bidirectional and (k + first) % 2 == 1
            h, last, _ = layer.recur(f, lengths=lengths, reverse=reverse)
            if k + 1 < len(column):
                x = self._next(f, h)
        return f, h, last

    def encode(self, source_BS: Tensor) -> Source:
        """Token ids (B, S) to what the decoder reads."""
        padding, places = (source_BS == PAD).sort(dim=1, stable=True)
        lengths = (~padding).sum(1)
        x = self.source_embedding(source_BS.gather(1, places).T)
        fs, hs, lasts = zip(
            *(self._column(x, column, lengths, n) for n, column in enumerate(self.columns)),
            strict=True,
        )
        if not self.config.fast_forward:
            fs = ()
        if self.config.attention:
            encoded = torch.cat((*hs, *fs), -1)
            if self.config.fast_forward:
                encoded = self.quarter(encoded)
            encoded = encoded.transpose(0, 1)
            return Source(encoded, self.attention.key(encoded), padding, places)
        behind = padding.T.unsqueeze(-1)
        most = (t.masked_fill(behind, -torch.inf).amax(0) for t in (*hs[1:], *fs))
        return Source(torch.cat((lasts[0], *most), -1))

    def _attended(self, source: Source, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The decoder's first layer over y (T, B, E), step by step: f, h and the attention weights
        (T, B, S)."""
        layer, linear = self.decoder[0], self.decoder[0].feed_forward
        from_context, from_word = linear.weight.split((self.context_dim, y.shape[-1]), 1)
        words = F.linear(y, from_word, linear.bias)
        h, c = words.new_zeros(y.shape[1], self.config.dim), None
        fs, hs, weights = [], [], []
        for word in words:
            weight = self.attention(h, source.keys, source.padding)
            context = torch.bmm(weight.unsqueeze(1).to(source.encoded.dtype), source.encoded)
            fs.append(word + F.linear(context.squeeze(1), from_context))
            _, h, c = layer.recur(fs[-1].unsqueeze(0), h0=h, c0=c)
            hs.append(h)
            weights.append(weight)
        return torch.stack(fs), torch.stack(hs), torch.stack(weights)

    def _words(self, target_in_BT: Tensor) -> Tensor:
        """y (T, B, E), zeros at the first position."""
        y = self.target_embedding(target_in_BT.T)
        return torch.cat((torch.zeros_like(y[:1]), y[1:]))

    def _decode(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """h (T, B, H) of the decoder's top layer."""
        source, y = self.encode(source_BS), self._words(target_in_BT)
        lengths = (target_in_BT != PAD).sum(1)
        first, *others = self.decoder
        if self.config.attention:
            f, h, _ = self._attended(source, y)
        else:
            context = source.encoded.expand(len(y), -1, -1)
            f = first.feed_forward(torch.cat((context, y.to(context.dtype)), -1))
            h = first.recur(f, lengths=lengths)[0]
        for layer in others:
            f = layer.feed_forward(self._next(f, h))
            h = layer.recur(f, lengths=lengths)[0]
        return h

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Logits (N, V) for the N real positions of ``target_in_BT``, row by row."""
        h_BT = self._decode(source_BS, target_in_BT).transpose(0, 1)
        return self.softmax(h_BT[target_in_BT != PAD])

    def labelled(
        self, source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """h (N, H) of the real positions, position by position, and their labels (N,)."""
        real_TB = (target_in_BT != PAD).T
        return self._decode(source_BS, target_in_BT)[real_TB], target_out_BT.T[real_TB]

    def logit_map(self) -> tuple[Tensor, Tensor | None]:
        """Weight (V, H) and bias of the softmax."""
        return self.softmax.weight, self.softmax.bias

    def start(self, source_BS: Tensor) -> DecodeState:
        """Encodes the source; `step` then decodes one position at a time."""
        source = self.encode(source_BS)
        h = source.encoded.new_zeros(len(source_BS), self.config.dim)
        c = h.to(torch.promote_types(h.dtype, torch.float32))
        return DecodeState(source, [h] * len(self.decoder), [c] * len(self.decoder))

    def step(self, tokens_B: Tensor, state: DecodeState) -> Tensor:
        """The last token of each hypothesis (B,) to logits (B, V) of the next; moves state on."""
        y, context = self.target_embedding(tokens_B), state.source.encoded
        if state.position == 0:
            y = torch.zeros_like(y)
        if self.config.attention:
            weight = self.attention(state.h[0], state.source.keys, state.source.padding)
            context = torch.bmm(weight.unsqueeze(1).to(context.dtype), context).squeeze(1)
        x = torch.cat((context, y.to(context.dtype)), -1)
        for k, layer in enumerate(self.decoder):
            f = layer.feed_forward(x)
            _, state.h[k], state.c[k] = layer.recur(f.unsqueeze(0), h0=state.h[k], c0=state.c[k])
            x = self._next(f, state.h[k])
        state.position += 1
        return self.softmax(state.h[-1])

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """Attention weights (B, T, S) of the source's tokens, 0 on padding.

        Without attention this attribute is None.
        """
        source = self.encode(source_BS)
        weights_BTS = self._attended(source, self._words(target_in_BT))[2].transpose(0, 1)
        places = source.places.unsqueeze(1).expand_as(weights_BTS)
        return torch.zeros_like(weights_BTS).scatter(2, places, weights_BTS)
