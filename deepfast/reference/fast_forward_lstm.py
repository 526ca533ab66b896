"""Deep-Att and Deep-ED for one sentence pair, position by position.

Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation,
TACL 2016: Eq. 4 for a layer, 5 to 7 for the columns, 8 to 11 between encoder and decoder.
``p`` holds the parameters of `deepfast.mt.models.FastForwardLSTM` by name.
"""

import torch
from torch import Tensor

from deepfast.reference.peephole_lstm import cell


def layer(p: dict[str, Tensor], name: str, inputs: list[Tensor], step: int) -> list[tuple]:
    """(f_t, h_t) for each position; ``step`` is +1 or -1, the direction of time."""
    matrix, recurrent, peephole = (
        p[f"{name}.{part}"] for part in ("feed_forward.weight", "recurrent", "peephole")
    )
    h = c = matrix.new_zeros(recurrent.shape[0])
    out: list[tuple] = [()] * len(inputs)
    for t in range(len(inputs))[::step]:
        f = matrix @ inputs[t]
        h, c, _ = cell(f + h @ recurrent, c, peephole)
        out[t] = f, h
    return out


def above(f: Tensor, h: Tensor) -> Tensor:
    """The input ``[Half(f), h]`` of the layer above, without dropout."""
    return torch.cat((f[: len(f) // 2], h))


def encode(p: dict[str, Tensor], source: list[int], layers: int) -> list[list[tuple]]:
    """(f_t, h_t) of the top layer of both columns."""
    tops = []
    for column in range(2):
        inputs = [p["source_embedding.weight"][token] for token in source]
        for k in range(layers):
            top = layer(p, f"columns.{column}.{k}", inputs, -1 if (k + column) % 2 else 1)
            inputs = [above(f, h) for f, h in top]
        tops.append(top)
    return tops


def static_context(tops: list[list[tuple]], layers: int) -> Tensor:
    """Deep-ED's c. The last step of a layer that runs backwards is at the first position."""
    (f1, h1), (f2, h2) = (map(torch.stack, zip(*top, strict=True)) for top in tops)
    return torch.cat((h1[-(layers % 2)], h2.amax(0), f1.amax(0), f2.amax(0)))


def attended(p: dict[str, Tensor], encoded: list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """Deep-Att's c_t and the weights of the source's positions."""
    q = p["attention.query.weight"] @ query
    scores = [
        p["attention.score.weight"] @ torch.tanh(q + p["attention.key.weight"] @ e) for e in encoded
    ]
    weights = torch.cat(scores).softmax(0)
    return sum(w * e for w, e in zip(weights, encoded, strict=True)), weights


def fast_forward_lstm(
    p: dict[str, Tensor],
    source: list[int],
    target_in: list[int],
    *,
    encoder_layers: int,
    decoder_layers: int,
    attention: bool,
) -> tuple[Tensor, Tensor | None]:
    """Logits (T, V) of one sentence without padding, and the attention weights (T, S)."""
    tops = encode(p, source, encoder_layers)
    if attention:
        pairs = zip(*tops, strict=True)
        encoded = [p["quarter.weight"] @ torch.cat((a[1], b[1], a[0], b[0])) for a, b in pairs]
    state = [2 * (torch.zeros_like(p["decoder.0.peephole"][0]),) for _ in range(decoder_layers)]
    logits, weights = [], []
    for t, token in enumerate(target_in):
        y = p["target_embedding.weight"][token] * (t > 0)
        if attention:
            context, weight = attended(p, encoded, state[0][0])
            weights.append(weight)
        else:
            context = static_context(tops, encoder_layers)
        x = torch.cat((context, y))
        for k in range(decoder_layers):
            f = p[f"decoder.{k}.feed_forward.weight"] @ x
            z = f + state[k][0] @ p[f"decoder.{k}.recurrent"]
            h, c, _ = cell(z, state[k][1], p[f"decoder.{k}.peephole"])
            state[k], x = (h, c), above(f, h)
        logits.append(p["softmax.weight"] @ h)
    return torch.stack(logits), torch.stack(weights) if attention else None
