"""Deep-Att and Deep-ED for one sentence pair, position by position.

Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation,
TACL 2016: Eq. 4 for a layer, 5 to 7 for the columns, 8 to 11 between encoder and decoder.
``p`` holds the parameters of `deepfast.mt.models.FastForwardLSTM` by name.
"""

import torch
from torch import Tensor

from deepfast.reference.peephole_lstm import cell


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """``W x + b``, without b where ``p`` has none."""
    return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0)


def step_of(p: dict[str, Tensor], name: str, x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    """f_t, h_t and c_t of a layer."""
    f = linear(p, f"{name}.feed_forward", x)
    return [f, *cell(f + h @ p[f"{name}.recurrent"], c, p[f"{name}.peephole"])[:2]]


def layer(p: dict[str, Tensor], name: str, inputs: list[Tensor], step: int) -> list[tuple]:
    """(f_t, h_t) for each position; ``step`` is +1 or -1, the direction of time."""
    h = c = torch.zeros_like(p[f"{name}.peephole"][0])
    out: list[tuple] = [()] * len(inputs)
    for t in range(len(inputs))[::step]:
        f, h, c = step_of(p, name, inputs[t], h, c)
        out[t] = f, h
    return out


def above(f: Tensor, h: Tensor, fast_forward: bool) -> Tensor:
    """The input ``[Half(f), h]`` of the layer above, without dropout."""
    return torch.cat((f[: len(f) // 2], h)) if fast_forward else h


def static_context(tops: list[list[tuple]], backwards: bool, fast_forward: bool) -> Tensor:
    """Deep-ED's c. The last step of a layer that runs backwards is at the first position."""
    fs, hs = zip(*(map(torch.stack, zip(*top, strict=True)) for top in tops), strict=True)
    parts = [hs[0][0 if backwards else -1], *(h.amax(0) for h in hs[1:])]
    return torch.cat(parts + [f.amax(0) for f in fs] * fast_forward)


def attended(p: dict[str, Tensor], encoded: list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """Deep-Att's c_t and the weights of the source's positions."""
    q = p["attention.query.weight"] @ query
    keys = (torch.tanh(q + p["attention.key.weight"] @ e) for e in encoded)
    weights = torch.cat([p["attention.score.weight"] @ key for key in keys]).softmax(0)
    return sum(w * e for w, e in zip(weights, encoded, strict=True)), weights


def fast_forward_lstm(
    p: dict[str, Tensor], source: list[int], target_in: list[int], *, encoder_layers: int,
    decoder_layers: int, attention: bool, fast_forward=True, bidirectional=True, columns=2,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Logits (T, V) of one sentence without padding, and the attention weights (T, S)."""
    # (f_t, h_t) of the top layer of each column.
    tops, encoded = [], []
    for column in range(columns):
        inputs = [p["source_embedding.weight"][token] for token in source]
        for k in range(encoder_layers):
            step = -1 if bidirectional and (k + column) % 2 else 1
            top = layer(p, f"columns.{column}.{k}", inputs, step)
            inputs = [above(f, h, fast_forward) for f, h in top]
        tops.append(top)
    for position in zip(*tops, strict=True):
        e = torch.cat([h for _, h in position] + [f for f, _ in position] * fast_forward)
        encoded.append(linear(p, "quarter", e) if attention and fast_forward else e)
    state = [2 * (torch.zeros_like(p["decoder.0.peephole"][0]),) for _ in range(decoder_layers)]
    logits, weights = [], []
    for t, token in enumerate(target_in):
        if attention:
            context, weight = attended(p, encoded, state[0][0])
            weights.append(weight)
        else:
            backwards = bidirectional and encoder_layers % 2 == 0
            context = static_context(tops, backwards, fast_forward)
        x = torch.cat((context, p["target_embedding.weight"][token] * (t > 0)))
        for k in range(decoder_layers):
            f, *state[k] = step_of(p, f"decoder.{k}", x, *state[k])
            x = above(f, state[k][0], fast_forward)
        logits.append(linear(p, "softmax", state[-1][0]))
    return torch.stack(logits), torch.stack(weights) if attention else None
