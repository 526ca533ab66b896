"""Packed attention on a GPU."""

from itertools import accumulate

import pytest
import torch

from deepfast import ops
from deepfast.reference.dropout import dropout_mask

pytestmark = pytest.mark.gpu

REAL = torch.cuda.is_available()
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if REAL else (torch.float32, HALF)


def lengths_of(tokens, shortest, longest):
    generator = torch.Generator().manual_seed(1)
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
        lengths.append(min(drawn, left))
    return lengths


TYPICAL = (lengths_of(8192, 20, 60), 8, 64) if REAL else (lengths_of(20, 3, 9), 2, 16)
# (query lengths, key lengths, heads, width, causal, dropout), then heads of the keys and window.
CASES = {
    "causal, dropout": (lengths_of(2000, 1, 64), None, 4, 64, True, 0.1),
    "128 keys": (lengths_of(1500, 60, 128), None, 2, 64, False, 0.3),
    "long": ([1000, 1, 0, 333], None, 2, 64, True, 0.1),
    "cross": ([70, 33, 0, 5], [33, 150, 9, 0], 3, 32, False, 0.1),
    "odd width": ([70, 33, 0, 5], None, 3, 40, False, 0.0),
    "wide": ([40, 100], None, 2, 128, True, 0.1),
    "no sentence": ([], None, 2, 64, False, 0.0),
    "groups": (lengths_of(2000, 1, 128), None, 8, 64, True, 0.1, 2, None),
    "groups, long, window": ([1000, 1, 0, 333], None, 8, 128, True, 0.1, 2, 200),
    "window": (lengths_of(1500, 1, 128), None, 2, 64, False, 0.0, 2, (7, 3)),
    "window, long, cross": ([700, 33], [900, 150], 2, 64, False, 0.1, 1, (64, 64)),
}
if not REAL:
    CASES = {
        "long": ([40, 1, 0], None, 1, 16, True, 0.1),
        "cross": ([3, 0, 5], [7, 2, 0], 2, 8, False, 0.1),
        "no sentence": ([], None, 2, 16, False, 0.0),
        "groups, long, window": ([40, 1, 0], None, 2, 16, True, 0.1, 1, 9),
    }


def offsets(lengths, device):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def attention_of(queries, keys, causal, p, window=None):
    """The op with all arguments given except its operands."""

    def function(q, k, v, backend):
        return ops.attention(
            q, k, v, cu_seqlens_q=offsets(queries, q.device), cu_seqlens_k=offsets(keys, q.device),
            max_seqlen_q=max(queries, default=0), max_seqlen_k=max(keys, default=0), causal=causal,
            dropout_p=p, seed=5, backend=backend, window=window,
        )  # fmt: skip

    return function


def inputs(twins, queries, keys, heads, width, of_keys=None):
    of_keys = of_keys or heads
    rows = {"q": (sum(queries), heads), "k": (sum(keys), of_keys), "v": (sum(keys), of_keys)}
    return {n: twins.Stored(torch.randn(*size, width), apart=8) for n, size in rows.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op(tolerances, twins, device, dtype):
    lengths, heads, width = TYPICAL
    function = attention_of(lengths, lengths, False, 0.1)
    given = inputs(twins, lengths, lengths, heads, width)
    twins.assert_op_alike(tolerances, "triton", "attention", function, given, dtype, device)


@pytest.mark.parametrize("case", CASES)
def test_other_sentences(tolerances, twins, device, case):
    queries, keys, heads, width, causal, p, of_keys, window = (*CASES[case], None, None)[:8]
    keys = queries if keys is None else keys
    function = attention_of(queries, keys, causal, p, window)
    given = inputs(twins, queries, keys, heads, width, of_keys)
    twins.assert_op_alike(tolerances, "triton", "attention", function, given, HALF, device)


@pytest.mark.parametrize("lengths", [[20, 16, 31], [8]])
def test_dropout_mask_is_the_references(device, lengths):
    """With equal scores and one-hot values the result shows the mask of each weight."""
    tokens, heads, width, p = sum(lengths), 2, 32, 0.3
    q = torch.zeros(tokens, heads, width, dtype=HALF, device=device)
    eye = torch.cat([torch.eye(width)[:n] for n in lengths])
    v = eye[:, None].expand(tokens, heads, width).to(q)
    o = attention_of(lengths, lengths, False, p)(q, q, v, "triton")
    mask = dropout_mask(5, tokens * heads, width, p).view(tokens, heads, width)
    real = torch.cat([(torch.arange(width) < n).expand(n, width) for n in lengths])
    assert torch.equal(o.cpu() != 0, (mask != 0) & real[:, None])


def test_20_runs_are_alike_to_the_bit(twins, device):
    lengths, heads, width = TYPICAL
    function = attention_of(lengths, lengths, True, 0.1)
    given = inputs(twins, lengths, lengths, heads, width)
    repeats = 20 if device == "cuda" else 1
    twins.assert_repeatable("triton", function, given, HALF, device, repeats)


def test_more_than_2_31_elements(room, device):
    """The last sentences of a long projection have the same bits as on their own."""
    room(24)
    sentences, n, heads, width = (22_000, 64, 8, 64) if device == "cuda" else (5, 4, 2, 16)
    qkv = torch.empty(sentences * n, 3, heads, width, dtype=HALF, device=device).normal_()
    if device == "cuda":
        assert qkv.numel() > 2**31
    do = torch.empty(sentences * n, heads, width, dtype=HALF, device=device).normal_()

    def run(x, g):
        x = x.detach().requires_grad_()
        lengths = [n] * (len(x) // n)
        o = attention_of(lengths, lengths, False, 0.0)(*x.unbind(1), "triton")
        return o.detach(), *torch.autograd.grad(o, x, g)

    tail = slice(-3 * n, None)
    whole, part = run(qkv, do), run(qkv[tail].clone(), do[tail].clone())
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[tail], b)
