"""The specification of packed attention, written out for one query and head at a time."""

import pytest
import torch

from deepfast import backend
from deepfast.reference.dropout import dropout_mask

SEED = torch.tensor(11)
LENGTHS = [
    ([4, 0, 1, 7], [4, 0, 1, 7]),
    ([4, 2, 0, 5, 3], [6, 0, 3, 5, 1]),
    ([], []),
    ([0], [3]),
    ([3], [0]),
]
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (0, 0), (1, 2), (-1, 1), (3, -1), (99, 99)]


def written_out(lengths, q, k, v, window, dropout_p):
    """o, and lse of the weights before dropout. Dropout takes a token for each query and head."""
    (left, right), heads, group = window, q.shape[1], q.shape[1] // k.shape[1]
    o, lse = 0 * q, q.new_full((heads, len(q)), -torch.inf)
    mask = dropout_mask(SEED, len(q) * heads, max(lengths[1], default=0), dropout_p)
    t = start = 0
    for m, n in zip(*lengths, strict=True):
        for place in range(n - m, n):
            first = 0 if left < 0 else max(0, place - left)
            end = n if right < 0 else min(n, place + right + 1)
            for h in range(heads if first < end else 0):
                keys, values = (x[start + first : start + end, h // group] for x in (k, v))
                scores = 0.7 * keys @ q[t, h]
                weights = scores.softmax(0) * mask[t * heads + h, first:end]
                o[t, h], lse[h, t] = weights @ values, scores.logsumexp(0)
            t += 1
        start += n
    return o, lse


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_launches_are_the_formula_and_its_gradient(lengths, window, heads, dropout_p):
    q, k, v = (
        torch.randn(sum(lengths[i > 0]), heads[i > 0], 3, dtype=torch.float64, requires_grad=True)
        for i in range(3)
    )
    o, lse = written_out(lengths, q, k, v, window, dropout_p)
    do = torch.randn_like(o)
    # Without sentences o does not depend on k and v.
    grads = torch.autograd.grad(o, (q, k, v), do, allow_unused=True, materialize_grads=True)
    expected = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
    got = {name: torch.full_like(x, torch.nan) for name, x in expected.items()}
    given = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "o": got["o"], "lse": got["lse"]}
    given |= {"left": window[0], "right": window[1], "scale": 0.7}
    given |= {"dropout_p": dropout_p, "seed": SEED}
    for side, n in zip("qk", lengths, strict=True):
        given[f"cu_seqlens_{side}"] = torch.tensor([0, *n]).cumsum(0).int()
        given[f"max_seqlen_{side}"] = max(n, default=0)
    _, launch = backend.choose("attention", "reference", "cpu", torch.float64)
    launch.attention_forward(**given)
    launch.attention_backward(**given, dout=do, dq=got["dq"], dk=got["dk"], dv=got["dv"])
    torch.testing.assert_close(got, expected)
