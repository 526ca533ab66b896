"""deepfast.ops.attention: torch's own attention and ours against the reference in float64."""

import math
from functools import partial

import pytest
import torch

from deepfast import backend as backends
from deepfast.cases import sentences
from deepfast.cases.case import differentiate
from deepfast.ops import attention
from tests.ops.cases import assert_agrees

LOW = [torch.float32, torch.bfloat16, torch.float16]
H, D = 2, 16
SERVERS = [
    by
    for by in ("cpu", "sdpa", "reference", "triton")
    if backends.why_unable("attention", by, "cpu", torch.float32) is None
]
EACH_SERVER = pytest.mark.parametrize("server", SERVERS)
ON_A_CPU = pytest.mark.skipif("cpu" not in SERVERS, reason="needs the compiled library")

# Queries and keys of the sentences, None for the queries again; heads of q and of k, their width,
# window, causal, dropout. Between them every path: whole rows in one tile and by tiles of queries.
SHORT = [
    ([5], None, (2, 2), 16, None, False, 0.0),
    ([3, 0, 17, 1], None, (2, 2), 17, None, True, 0.3),
    ([4, 4], [6, 6], (2, 2), 16, None, False, 0.0),
    ([2, 5, 4], [6, 9, 4], (2, 2), 16, None, True, 0.0),
    ([3, 5, 0, 20], [4, 0, 5, 7], (3, 3), 32, None, False, 0.1),
    ([3, 5, 0, 20], [4, 0, 5, 7], (1, 1), 1, None, True, 0.0),
    ([20, 33], None, (1, 1), 128, None, False, 0.1),
    ([], None, (2, 2), 16, None, True, 0.1),
    ([0, 0], [3, 2], (2, 2), 16, None, False, 0.1),
    ([0], [130], (1, 1), 16, None, False, 0.0),
    ([3, 2], [0, 4], (2, 2), 16, None, False, 0.0),
    ([3, 2], [0, 0], (2, 2), 16, None, True, 0.0),
    ([3, 0, 17, 1], None, (4, 2), 16, None, False, 0.3),
    ([40, 5], None, (3, 1), 17, None, True, 0.0),
    ([3, 5, 0], [4, 0, 5], (4, 2), 32, None, True, 0.1),
    ([9], None, (4, 2), 16, None, False, 0.0),
    ([3, 7, 1], None, (3, 1), 16, 2, False, 0.0),
    ([2, 5, 4], [6, 3, 1], (4, 1), 16, 1, True, 0.0),
    ([5, 0], [2, 3], (2, 2), 16, (2, None), False, 0.0),
    ([3, 7, 1], None, (2, 2), 16, (-1, 1), False, 0.0),
    ([2, 5, 4], [6, 3, 1], (2, 2), 16, (1, 3), False, 0.0),
    ([3, 7, 1], None, (4, 2), 16, (3, None), True, 0.0),
    ([5, 0], [2, 3], (2, 2), 16, 99, False, 0.0),
    ([5, 40, 0, 1], None, (2, 2), 16, (3, 2), False, 0.3),
    ([5, 40], None, (1, 1), 8, (1, 0), False, 0.0),
    ([3, 5, 0, 20], [4, 0, 50, 7], (1, 1), 16, (2, 1), False, 0.1),
]
# Several tiles of queries, longer rows than a tile, windows that begin far behind the first key.
LONG = [
    ([63, 2], [63, 64], (1, 1), 64, None, True, 0.1),
    ([129, 1, 0], [129, 5, 3], (1, 1), 16, None, True, 0.2),
    ([128, 17], None, (1, 1), 64, None, False, 0.3),
    ([130, 10], [33, 20], (2, 1), 32, None, True, 0.5),
    ([17, 150], [200, 0], (1, 1), 16, None, False, 0.0),
    ([200], [150], (1, 1), 16, None, True, 0.1),
    ([150, 1, 0], [150, 5, 3], (4, 2), 16, None, True, 0.2),
    ([300, 20], None, (2, 1), 16, (40, None), True, 0.2),
    ([200, 7], None, (1, 1), 16, (5, -1), False, 0.0),
    ([200, 7], None, (1, 1), 16, (-1, 5), False, 0.0),
    ([40, 200], [260, 170], (2, 1), 16, (130, None), False, 0.3),
    ([300, 140], [150, 3], (1, 1), 16, (10, 10), False, 0.1),
    ([140], None, (1, 1), 16, (139, 200), False, 0.0),
]
# Dtypes take turns. torch's attention has another dropout.
CALLS = [("cpu", dtype, call) for call in SHORT for dtype in LOW]
CALLS += [("cpu", dtype, call) for call in LONG for dtype in (torch.float32, torch.float64)]
CALLS += [("sdpa", LOW[i % 3], call) for i, call in enumerate(SHORT + LONG) if not call[-1]]
CALLS = [call for call in CALLS if call[0] in SERVERS]
if "triton" in SERVERS:
    CALLS += [
        pytest.param("triton", LOW[i % 3], call, marks=[pytest.mark.slow] * (i % 2 or call in LONG))
        for i, call in enumerate(SHORT + LONG)
    ]


def call(q, k, v, lengths, causal=False, **options):
    """Attention inside sentences of these lengths."""
    starts, longest = sentences.offsets(lengths, "cpu"), max(lengths, default=0)
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": causal}
    return attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)


def operands(tokens):
    return [torch.randn(tokens, H, D) for _ in "qkv"]


def case_of(queries, keys, heads=(H, H), width=D, window=None, causal=False, p=0.0, scale=None):
    heads = sentences.Heads(heads[0], width, heads[0] // heads[1], scale)
    return sentences.attention("", queries, keys, heads, causal=causal, window=window, p=p)


@pytest.mark.parametrize(("server", "dtype", "of"), CALLS, ids=str)
def test_agrees(server, dtype, of):
    assert_agrees(case_of(*of), server, dtype)


def test_forms_of_a_window():
    q, k, v = operands(7)

    def o(window, causal=False):
        return call(q, k, v, [7], causal, window=window)

    assert torch.equal(o(2), o((2, 2)))
    assert torch.equal(o(None), o((None, -1)))
    assert torch.equal(o((None, 0)), o(None, causal=True))
    assert torch.equal(o((2, 5), causal=True), o((2, 0)))
    assert torch.equal(o([1, 3]), o((1, 3)))


@EACH_SERVER
def test_no_tokens_between_other_channels(server):
    """`contiguous` does not change the strides of an empty tensor."""
    leaves = [torch.ones(0, H, 2 * D, requires_grad=True) for _ in range(3)]
    out = call(*(x[..., ::2] for x in leaves), [0], backend=server)
    assert out.shape == (0, H, D)
    grads = torch.autograd.grad(out, leaves, torch.ones(0, H, 2 * D)[..., ::2])
    assert [grad.shape for grad in grads] == [(0, H, 2 * D)] * 3


def test_without_a_seed_dropout_draws_one():
    leaves = operands(10)

    def drawn(manual_seed):
        torch.manual_seed(manual_seed)
        return call(*leaves, [4, 6], backend="reference", dropout_p=0.4)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@EACH_SERVER
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [-0.5, 0, 0.3])
def test_any_scale(server, scale, causal):
    """A scale of 0 weighs keys equally, a negative one reverses the order; masks still apply."""
    assert_agrees(case_of([2, 5], [6, 9], causal=causal, scale=scale), server)


@EACH_SERVER
def test_large_scores_do_not_overflow(server):
    case = case_of([5, 40], None, (1, 1), causal=True)
    for operand in case.operands.values():
        operand.x *= 8
    assert_agrees(case, server)


@EACH_SERVER
def test_everything_dropped(server):
    o = call(*operands(3), [3], backend=server, dropout_p=1.0)
    assert o.eq(0).all()


@ON_A_CPU
@pytest.mark.parametrize(("queries", "keys"), [(8, 5000), (5000, 8)])
def test_long_sums_stay_accurate(queries, keys):
    """Sums over many keys, and over many queries."""
    case = case_of([queries], [keys])
    case.operands["v"].x += 1
    assert_agrees(case, "cpu")


@ON_A_CPU
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("window", [None, (3, 2)], ids=str)
def test_a_token_that_is_not_finite(name, bad, window):
    """Queries that do not see it get their result and their gradient. Its own query does not change
    the gradients of the values that it does not see."""
    place, length = 40, 70
    causal = window is None
    case = case_of([length], None, window=window, causal=causal)

    def computed():
        leaves = case.leaves(torch.float32, torch.float32)
        return differentiate(partial(case.run, backend="cpu"), leaves, torch.float32)

    want = computed()
    case.operands[name].x[place, :, 3] = bad
    got = computed()
    first, last = (place, length) if causal else (place - 2, place + 4)
    if name == "q":
        first, last = place, place + 1
    for result in ("output 0", "d q"):
        for part in (slice(first), slice(last, None)):
            assert torch.equal(got[result][part], want[result][part])
    assert not got["output 0"][first:last].isfinite().all()
    if name == "q":
        first, last = (0, place + 1) if causal else (place - 3, place + 3)
        for part in (slice(first), slice(last, None)):
            assert torch.equal(got["d v"][part], want["d v"][part])
