"""The specification of packed attention against PyTorch's, one sentence at a time."""

from types import SimpleNamespace

import pytest
import torch

from deepfast import backend
from deepfast.reference.attention import attention
from deepfast.reference.dropout import dropout_mask

H, D = 2, 3
SELF = ([4, 0, 1, 7], [4, 0, 1, 7])
CROSS = ([4, 2, 0, 5, 3], [6, 0, 3, 5, 1])
SEED = torch.tensor(11)


def cumulated(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths, grad=False, heads=(H, H)):
    """q, k and v with this number of heads of q, and of k and v."""
    queries, keys = (sum(n) for n in lengths)
    return [
        torch.randn(tokens, count, D, dtype=torch.float64, requires_grad=grad)
        for tokens, count in ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    ]


def sentences(lengths, tensors):
    """(q, k, v) of each sentence, (H, length, D) each."""
    q, k, v = tensors
    splits = (q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]))
    return [[x.transpose(0, 1) for x in qkv] for qkv in zip(*splits, strict=True)]


def given(lengths, tensors, left=-1, right=-1, dropout_p=0.0):
    """The operands of a launch that forward and backward share."""
    operands = {"left": left, "right": right, "scale": 0.7, "dropout_p": dropout_p, "seed": SEED}
    for side, n in zip("qk", lengths, strict=True):
        operands |= {f"cu_seqlens_{side}": cumulated(n), f"max_seqlen_{side}": max(n, default=0)}
    return operands | dict(zip("qkv", tensors, strict=True))


def run(lengths, tensors, **options):
    return attention(SimpleNamespace(**given(lengths, tensors, **options)))


@pytest.mark.parametrize("lengths", [SELF, CROSS])
@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (0, 0), (1, 2), (-1, 1), (3, -1), (99, 99)])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)])
def test_every_query_sees_its_window_of_its_own_head(lengths, window, heads):
    """Written out: one query, head and key at a time."""
    (left, right), G = window, heads[0] // heads[1]
    tensors = packed(lengths, heads=heads)
    o, lse = run(lengths, tensors, left=left, right=right)
    start = 0
    for q, k, v in sentences(lengths, tensors):
        m, n = q.shape[1], k.shape[1]
        for i in range(m):
            place = i + n - m
            first = 0 if left < 0 else max(0, place - left)
            last = n - 1 if right < 0 else min(n - 1, place + right)
            for h in range(heads[0]):
                scores = [0.7 * q[h, i] @ k[h // G, j] for j in range(first, last + 1)]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                want = sum((w * v[h // G, first + j] for j, w in enumerate(weights)), 0 * q[h, i])
                torch.testing.assert_close(o[start + i, h], want)
                assert bool(lse[h, start + i] == -torch.inf) == (first > last)
        start += m


def test_lse_is_of_the_weights_before_dropout():
    lengths = ([3], [5])
    q, k, v = packed(lengths)
    scores = 0.7 * torch.einsum("mhd,nhd->hmn", q, k)
    for p in (0.0, 0.5):
        _, lse = run(lengths, (q, k, v), dropout_p=p)
        torch.testing.assert_close(lse, scores.exp().sum(-1).log())


def test_dropout_takes_a_token_for_each_query_and_head():
    lengths = ([2, 3], [4, 6])
    q, k, v = packed(lengths)
    o, _ = run(lengths, (q, k, v), dropout_p=0.4)
    mask = dropout_mask(SEED, 5 * H, 6, 0.4)
    for t in range(5):
        keys, n = (slice(0, 4), 4) if t < 2 else (slice(4, 10), 6)
        for h in range(H):
            weights = (0.7 * k[keys, h] @ q[t, h]).softmax(0)
            torch.testing.assert_close(o[t, h], (weights * mask[t * H + h, :n]) @ v[keys, h])


@pytest.mark.parametrize("lengths", [SELF, CROSS, ([], []), ([0], [3]), ([3], [0])])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (1, 0), (0, 2)])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_launches_are_the_op_and_its_gradient(lengths, window, heads, dropout_p):
    tensors = packed(lengths, grad=True, heads=heads)
    options = {"left": window[0], "right": window[1], "dropout_p": dropout_p}
    o, lse = run(lengths, tensors, **options)
    do = torch.randn_like(o)
    # Without sentences o does not depend on k and v.
    grads = torch.autograd.grad(o, tensors, do, allow_unused=True, materialize_grads=True)
    names = ("o", "lse", "dq", "dk", "dv")
    expected = dict(zip(names, (o, lse, *grads), strict=True))
    got = {name: torch.full_like(x, torch.nan) for name, x in expected.items()}
    shared = given(lengths, [x.detach() for x in tensors], **options)
    shared |= {"o": got["o"], "lse": got["lse"]}
    _, launch = backend.choose("attention", "reference", "cpu", torch.float64)
    launch.attention_forward(**shared)
    launch.attention_backward(**shared, dout=do, dq=got["dq"], dk=got["dk"], dv=got["dv"])
    torch.testing.assert_close(got, expected)
