"""deepfast.ops.attention: torch's own attention and ours against the reference in float64."""

from functools import partial

import pytest
import torch

from deepfast import backend as backends
from deepfast.cases import sentences
from deepfast.cases.case import differentiate
from deepfast.ops import attention
from tests.ops.cases import LOW, assert_agrees

H, D = 2, 16
SERVERS = [
    by
    for by in ("cpu", "sdpa", "reference", "triton")
    if backends.why_unable("attention", by, "cpu", torch.float32) is None
]
EACH_SERVER = pytest.mark.parametrize("server", SERVERS)
ON_A_CPU = pytest.mark.skipif("cpu" not in SERVERS, reason="needs the compiled library")

# Queries and keys of the sentences, None for the queries again; heads of q and of k, their width,
# window, causal, dropout, scale. Between them every path: whole rows in one tile and by tiles of
# queries. A scale of 0 weighs keys equally, a negative one reverses their order.
SHORT = [
    ([3, 0, 17, 1], None, (2, 2), 17, None, True, 0.3),
    ([2, 5, 4], [6, 9, 4], (2, 2), 16, None, True, 0.0),
    ([3, 5, 0, 20], [4, 0, 5, 7], (1, 1), 1, None, True, 0.0),
    ([20, 33], None, (1, 1), 128, None, False, 0.1),
    ([], None, (2, 2), 16, None, True, 0.0),
    ([0, 0, 3], [3, 130, 0], (2, 2), 16, None, True, 0.1),
    ([3, 5, 0], [4, 0, 5], (4, 2), 32, None, True, 0.1),
    ([2, 5, 4], [6, 3, 1], (4, 1), 16, 1, True, 0.0),
    ([5, 0], [2, 3], (2, 2), 16, (2, None), False, 0.0),
    ([3, 7, 1], None, (2, 2), 16, (-1, 1), False, 0.0),
    ([2, 5, 4], [6, 3, 1], (2, 2), 16, (1, 3), False, 0.0),
    ([5, 0], [2, 3], (2, 2), 16, 99, False, 0.0),
    ([3, 5, 0, 20], [4, 0, 50, 7], (1, 1), 16, (2, 1), False, 0.1),
    ([3], None, (2, 2), 16, None, False, 1.0),
    *(([2, 5], [6, 9], (2, 2), 16, None, scale < 0, 0.0, scale) for scale in (-0.5, 0, 0.3)),
]
# Several tiles of queries, longer rows than a tile, windows that begin far behind the first key.
LONG = [
    ([63, 2], [63, 64], (1, 1), 64, None, True, 0.1),
    ([128, 17], None, (1, 1), 64, None, False, 0.3),
    ([130, 10], [33, 20], (2, 1), 32, None, True, 0.5),
    ([17, 150], [200, 0], (1, 1), 16, None, False, 0.0),
    ([150, 1, 0], [150, 5, 3], (4, 2), 16, None, True, 0.2),
    ([300, 20], None, (2, 1), 16, (40, None), True, 0.2),
    ([200, 7], None, (1, 1), 16, (-1, 5), False, 0.0),
    ([40, 200], [260, 170], (2, 1), 16, (130, None), False, 0.3),
    ([300, 140], [150, 3], (1, 1), 16, (10, 10), False, 0.1),
    ([140], None, (1, 1), 16, (139, 200), False, 0.0),
]
# Dtypes take turns. torch's attention has another dropout, and Triton's interpreter is slow.
CALLS = []
for i, call in enumerate(SHORT + LONG):
    CALLS += [("cpu", dtype, call) for dtype in (torch.float32, (*LOW[1:], torch.float64)[i % 3])]
    CALLS += [("sdpa", LOW[i % 3], call)] if not call[6] else []
    slow = [pytest.mark.slow] * (i % 4 or call in LONG)
    CALLS += [pytest.param("triton", LOW[i % 3], call, marks=slow)] if i % 2 == 0 else []
CALLS = [call for call in CALLS if getattr(call, "values", call)[0] in SERVERS]


def case_of(queries, keys, heads=(H, H), width=D, window=None, causal=False, p=0.0, scale=None):
    heads = sentences.Heads(heads[0], width, heads[0] // heads[1], scale)
    return sentences.attention("", queries, keys, heads, causal=causal, window=window, p=p)


@pytest.mark.parametrize(("server", "dtype", "of"), CALLS, ids=str)
def test_agrees(server, dtype, of):
    assert_agrees(case_of(*of), server, dtype)


@EACH_SERVER
def test_no_tokens_between_other_channels(server):
    """`contiguous` does not change the strides of an empty tensor."""
    leaves = [torch.ones(0, H, 2 * D, requires_grad=True) for _ in range(3)]
    starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), sentences.offsets([0], "cpu"))
    given = starts | {"max_seqlen_q": 0, "max_seqlen_k": 0, "backend": server}
    out = attention(*(x[..., ::2] for x in leaves), **given)
    assert out.shape == (0, H, D)
    grads = torch.autograd.grad(out, leaves, torch.ones(0, H, 2 * D)[..., ::2])
    assert [grad.shape for grad in grads] == [(0, H, 2 * D)] * 3


@EACH_SERVER
def test_large_scores_do_not_overflow(server):
    case = case_of([5, 40], None, (1, 1), causal=True)
    for operand in case.operands.values():
        operand.x *= 8
    assert_agrees(case, server)


@ON_A_CPU
@pytest.mark.parametrize(("queries", "keys"), [(8, 5000), (5000, 8)])
def test_long_sums_stay_accurate(queries, keys):
    """Sums over many keys, and over many queries."""
    case = case_of([queries], [keys])
    case.operands["v"].x += 1
    assert_agrees(case, "cpu")


@ON_A_CPU
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", "qkv")
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
    # The queries that see this token, and the keys that its query sees.
    queries = slice(place, length) if causal else slice(place - 2, place + 4)
    keys = slice(0, place + 1) if causal else slice(place - 3, place + 3)
    changed = {"output 0": queries, "d q": queries}
    if name == "q":
        changed = dict.fromkeys(changed, slice(place, place + 1)) | {"d v": keys}
    for result, part in changed.items():
        for untouched in (slice(part.start), slice(part.stop, None)):
            assert torch.equal(got[result][untouched], want[result][untouched])
    assert not got["output 0"][changed["output 0"]].isfinite().all()
