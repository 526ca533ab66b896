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

# Lengths of queries and keys by sentence, causal.
LENGTHS = [
    ([5], [5], False),
    ([3, 7, 1], [3, 7, 1], False),
    ([3, 7, 1], [3, 7, 1], True),
    ([4, 4], [4, 4], True),
    ([4, 4], [6, 6], False),
    ([2, 5, 4], [6, 3, 1], False),
    ([2, 5, 4], [6, 9, 4], True),
    ([3, 0, 2], [3, 0, 2], False),
    ([3, 2], [0, 4], False),
    ([5, 3], [2, 3], True),
    ([0], [0], False),
    ([], [], False),
]
# Heads of q and of k, window, causal.
PATTERNS = [
    ((4, 2), None, False),
    ((4, 2), None, True),
    ((3, 1), 2, False),
    ((4, 1), 1, True),
    ((2, 2), (2, None), False),
    ((2, 2), (-1, 1), False),
    ((2, 2), (1, 3), False),
    ((4, 2), (3, None), True),
    ((2, 2), 99, False),
]
OF_PATTERNS = [([9], [9]), ([3, 7, 1], [3, 7, 1]), ([2, 5, 4], [6, 3, 1]), ([5, 0], [2, 3])]
# Several blocks of queries, and windows that begin far behind the first key.
LONG = [
    ([300], [300], (4, 2), None, True),
    ([300], [300], (2, 2), (5, 3), False),
    ([40, 200], [260, 170], (2, 1), (130, None), False),
]
CASES = [(q, k, (H, H), None, causal) for q, k, causal in LENGTHS]
CASES += [(*lengths, *pattern) for pattern in PATTERNS for lengths in OF_PATTERNS]

compiled = pytest.mark.skipif(
    backends.why_unable("attention", "cpu", "cpu", torch.float32) is not None,
    reason="cpu does not run here",
)


@pytest.fixture(params=["cpu", "sdpa", "reference", "triton"])
def server(request):
    """Each backend that serves attention here."""
    reason = backends.why_unable("attention", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def call(q, k, v, queries, keys, causal, **options):
    cu_q = sentences.offsets(queries, "cpu")
    cu_k = cu_q if queries == keys else sentences.offsets(keys, "cpu")
    options |= {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}
    return attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal, **options)


def operands(queries, keys, heads=(H, H)):
    """q, k and v with this number of heads of q, and of k and v."""
    sizes = (queries, heads[0]), (keys, heads[1]), (keys, heads[1])
    return [torch.randn(sum(n), count, D) for n, count in sizes]


def case_of(queries, keys, heads, window, causal, p=0.0, scale=None):
    heads = sentences.Heads(heads[0], D, heads[0] // heads[1], scale)
    return sentences.attention("", queries, keys, heads, causal=causal, window=window, p=p)


# Triton's kernels have such cases in tests/kernels.
SERVERS = ["cpu", "sdpa", "reference", pytest.param("triton", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("server", SERVERS, indirect=True)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("queries", "keys", "heads", "window", "causal"), CASES, ids=str)
def test_agrees(server, dtype, queries, keys, heads, window, causal):
    assert_agrees(case_of(queries, keys, heads, window, causal), server, dtype)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("queries", "keys", "heads", "window", "causal"), LONG, ids=str)
def test_long_sentences(dtype, queries, keys, heads, window, causal, p):
    assert_agrees(case_of(queries, keys, heads, window, causal, p), "cpu", dtype)


def test_forms_of_a_window():
    q, k, v = operands([7], [7])

    def o(window, causal=False):
        return call(q, k, v, [7], [7], causal, window=window)

    assert torch.equal(o(2), o((2, 2)))
    assert torch.equal(o(None), o((None, -1)))
    assert torch.equal(o((None, 0)), o(None, causal=True))
    assert torch.equal(o((2, 5), causal=True), o((2, 0)))
    assert torch.equal(o([1, 3]), o((1, 3)))


def test_no_tokens_between_other_channels(server):
    """`contiguous` does not change the strides of an empty tensor."""
    leaves = [torch.ones(0, H, 2 * D, requires_grad=True) for _ in range(3)]
    out = call(*(x[..., ::2] for x in leaves), [0], [0], False, backend=server)
    assert out.shape == (0, H, D)
    grads = torch.autograd.grad(out, leaves, torch.ones(0, H, 2 * D)[..., ::2])
    assert [grad.shape for grad in grads] == [(0, H, 2 * D)] * 3


def test_without_a_seed_dropout_draws_one():
    leaves = operands([4, 6], [4, 6])

    def drawn(manual_seed):
        torch.manual_seed(manual_seed)
        return call(*leaves, [4, 6], [4, 6], False, backend="reference", dropout_p=0.4)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [-0.5, 0, 0.3])
def test_any_scale(server, scale, causal):
    """A scale of 0 weighs keys equally, a negative one reverses the order; masks still apply."""
    assert_agrees(case_of([2, 5], [6, 9], (H, H), None, causal, scale=scale), server)


def test_everything_dropped(server):
    q, k, v = (x.requires_grad_() for x in operands([3], [3]))
    o = call(q, k, v, [3], [3], False, backend=server, dropout_p=1.0)
    assert o.eq(0).all()


@compiled
@pytest.mark.parametrize(("queries", "keys"), [(8, 5000), (5000, 8)])
def test_long_sums_stay_accurate(queries, keys):
    """Sums over many keys, and over many queries."""
    case = case_of([queries], [keys], (H, H), None, False)
    case.operands["v"].x += 1
    assert_agrees(case, "cpu")


@compiled
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("window", [None, (3, 2)], ids=str)
def test_a_token_that_is_not_finite(name, bad, window):
    """Queries that do not see it get their result and their gradient. Its own query does not change
    the gradients of the values that it does not see."""
    place, length = 40, 70
    causal = window is None
    case = case_of([length], [length], (H, H), window, causal)

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
