"""The compiled ops of one step of decoding, against their formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import decoding
from tests.tolerances import assert_accurate, plain_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def attend(q, keys, values, sentences, seen, dtype):
    """By torch in ``dtype``; ``seen`` (R, N) bool."""
    k, v = (x[sentences].nan_to_num().to(dtype) for x in (keys, values))
    q = q.to(dtype).unflatten(1, (-1, 1, k.shape[3]))
    mask = seen[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).flatten(1)


def compare(got, *operands):
    plain, exact = (attend(*operands, t) for t in (plain_dtype(got.dtype), torch.float64))
    assert_accurate(got, plain, exact, got.dtype)


HEADS = pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 32), (6, 2, 5), (1, 1, 17)])
IN_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@IN_EACH_DTYPE
@HEADS
def test_cross_attention(heads, groups, width, dtype, monkeypatch):
    keys, values = torch.randn(2, 3, 7, groups, width, dtype=dtype).transpose(2, 3)
    q = torch.randn(9, 3 * heads * width, dtype=dtype)[:, : heads * width]
    sentences = torch.tensor([0, 2, 2, 1, 0, 0, 1, 2, 0])
    padding = torch.arange(7) >= torch.tensor([7, 1, 4])[:, None]
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, shape: x.new_full(shape, math.nan))
    got = decoding.cached_attention(q, keys, values, sentences, padding=padding)
    compare(got, q, keys, values, sentences, ~padding[sentences])
    got = decoding.cached_attention(q, keys, values, sentences)
    compare(got, q, keys, values, sentences, torch.ones(9, 7, dtype=torch.bool))


@IN_EACH_DTYPE
@HEADS
def test_self_attention_adds_a_column_for_each_row(heads, groups, width, dtype):
    sentences = torch.tensor([0, 0, 1, 0])
    for steps in (1, 16, 21):
        # Columns that nobody has written are NaN.
        cache = torch.full((2, 3 * steps, 2, groups, width), math.nan, dtype=dtype)
        keys, values = cache.permute(2, 0, 3, 1, 4)
        columns = torch.randint(3, (4, steps)) + 3 * torch.arange(steps)
        columns[:, -1] = torch.tensor([0, 2, 1, 1]) + 3 * (steps - 1)
        before = cache[:, : 3 * steps - 3]
        written = before.normal_().clone()
        q = torch.randn(4, heads * width, dtype=dtype)
        new = torch.randn(4, 2 * groups * width, dtype=dtype)
        options = {"new": new.chunk(2, 1), "columns": columns}
        got = decoding.cached_attention(q, keys, values, sentences, **options)
        assert torch.equal(cache[sentences, columns[:, -1]].flatten(1), new)
        assert torch.equal(before, written)
        seen = torch.zeros(4, 3 * steps, dtype=torch.bool).scatter_(1, columns, True)
        compare(got, q, keys, values, sentences, seen)


def test_large_scores_nan_and_nothing_seen():
    q = torch.tensor([[1e4, 0.0], [0.0, 0.0], [math.nan, 0.0]])
    keys, values = torch.randn(2, 3, 1, 5, 2)
    keys[0, 0, 2] = torch.tensor([1e4, 0.0])
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    got = decoding.cached_attention(q, keys, values, torch.arange(3), padding=padding)
    assert torch.equal(got[0], values[0, 0, 2])
    assert torch.equal(got[1], torch.zeros(2))
    assert got[2].isnan().all()
    none = decoding.cached_attention(q[:0], keys, values, torch.arange(0))
    assert none.shape == (0, 2)


@pytest.mark.parametrize(("changed", "message"), [
    ({"sentences": torch.tensor([0, 3])}, "expected sentences below 3"),
    ({"sentences": torch.tensor([0])}, "expected 2 contiguous values in int64"),
    ({"columns": torch.tensor([[0], [5]])}, "expected columns below 5"),
    ({"columns": torch.tensor([[-1], [0]])}, "expected columns below 5"),
    ({"columns": None}, "key, value and columns go together"),
    ({"q": torch.randn(2, 7)}, "expected q"),
    ({"q": torch.randn(2, 8).double()}, "in the dtype of q"),
    ({"padding": torch.zeros(3, 5, dtype=torch.bool)}, "and no columns"),
])  # fmt: skip
def test_refused_operands(changed, message):
    keys, values = torch.randn(2, 3, 2, 5, 4)
    given = {"q": torch.randn(2, 8), "keys": keys, "values": values}
    given |= {"sentences": torch.tensor([0, 1]), "columns": torch.tensor([[0], [1]])}
    given |= {"new": (torch.randn(2, 8), torch.randn(2, 8))} | changed
    with pytest.raises(RuntimeError, match=message):
        decoding.cached_attention(**given)
    with pytest.raises(RuntimeError, match="expected eos below 5, got 5"):
        decoding.best_tokens(torch.randn(2, 5), 2, [], 5)


def both(logits, count, banned, eos):
    """By the compiled op and by torch."""
    assert decoding.compiled(logits)
    by_torch = decoding._best_by_torch(logits, min(count, logits.shape[1]), banned, eos)
    return decoding.best_tokens(logits, count, banned, eos), by_torch


def assert_alike(got, want):
    """A log-probability of 0 has no token."""
    torch.testing.assert_close(got[::2], want[::2], equal_nan=True)
    real = got[0] > -math.inf
    assert torch.equal(real, want[0] > -math.inf)
    assert torch.equal(got[1][real], want[1][real])


@IN_EACH_DTYPE
@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 4), (7, 9), (128, 1), (129, 9), (8001, 4)])
def test_best_tokens(count, size, dtype):
    logits = (4 * torch.randn(11, 2 * size, dtype=torch.float64)).to(dtype)[:, :size]
    banned = [0, size // 3] if size > 2 else []
    exact, plain = logits.double().log_softmax(1), logits.float().log_softmax(1)
    best = exact.index_fill(1, torch.tensor(banned).long(), -math.inf)
    best = best.topk(min(count, size), 1).values
    for values, tokens, eos in both(logits, count, banned, size - 1):
        assert_accurate(eos, plain[:, -1], exact[:, -1], eos.dtype)
        real = values > -math.inf
        assert torch.equal(real, best > -math.inf)
        of_tokens = (x.gather(1, tokens.clamp(min=0))[real] for x in (plain, exact))
        assert_accurate(values[real], *of_tokens, values.dtype)
        torch.testing.assert_close(exact.gather(1, tokens.clamp(min=0))[real], best[real])


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_of_equal_tokens_the_lowest_are_taken(levels):
    logits = torch.randint(levels, (50, 300)).float()
    logits[::7, 40:290] = -math.inf
    assert_alike(*both(logits, 6, [3, 299], 5))
    # Distinct logits whose log-probabilities are rounded to the same value.
    assert_alike(*both(torch.rand(50, 300) * 1e-7, 6, [3], 5))


def test_extreme_rows():
    logits = torch.randn(6, 200)
    logits[0, 3], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 1:], logits[4] = -math.inf, 3e38
    logits[5] -= 3e38
    (_, _, eos), (_, _, by_torch) = got, want = both(logits, 3, [1], 7)
    assert torch.equal(eos.isnan(), torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.bool))
    assert torch.equal(by_torch.isnan(), eos.isnan())
    assert_alike([x[3:] for x in got], [x[3:] for x in want])


def test_what_the_compiled_ops_serve(monkeypatch):
    x = torch.randn(2)
    assert decoding.compiled(x)
    assert decoding.compiled(x, "cpu")
    assert not decoding.compiled(x, "reference")
    assert not decoding.compiled(x.to("meta"))
    with torch.inference_mode(False), torch.enable_grad():
        assert not decoding.compiled(x)
    monkeypatch.setenv("DEEPFAST_BACKEND", "reference")
    assert not decoding.compiled(x)
