"""The table of tolerances allows rounding and nothing more."""

import pytest
import torch

from tests.tolerances import assert_accurate, plain_dtype


def sums(dtype, terms):
    """Sums of products that nearly cancel: in another order, plainly, and by the reference."""
    a, b = torch.randn(2, 40, terms).to(dtype).double().unbind()
    b[:, 1::2] = -b[:, ::2]
    a[:, 1::2] = a[:, ::2] * (1 + torch.randn(40, terms // 2) / 16).double()
    a = a.to(dtype).double()

    def added(dtype):
        total = torch.zeros(40, dtype=dtype)
        for x, y in zip(a.to(dtype).unbind(1), b.to(dtype).unbind(1), strict=True):
            total += x * y
        return total

    other = (a.flip(1).to(dtype) * b.flip(1).to(dtype)).view(40, 4, -1).sum(1).sum(1)
    return other, added(plain_dtype(dtype)), added(torch.float64), a * b


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_another_order_passes_and_one_wrong_term_fails(dtype):
    for seed in range(10):
        torch.manual_seed(seed)
        got, plain, exact, _ = sums(dtype, 1000)
        assert_accurate(got, plain, exact, dtype)
    got, plain, exact, terms = sums(dtype, 100)
    at = terms[3].abs().argmax()
    # In a lower dtype a term in fp32 is no mistake: everything is computed in fp32.
    rounded = terms[3, at].float() - terms[3, at]
    faults = [-terms[3, at], terms[4, at] - terms[3, at]]
    for fault in faults + [rounded] * (dtype == torch.float64):
        off = got.clone()
        off[3] += fault
        with pytest.raises(AssertionError, match="allowed"):
            assert_accurate(off, plain, exact, dtype)


def test_a_plain_form_in_float64_is_refused():
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="the plain form must be in fp32"):
        assert_accurate(x, x, x, torch.float64)
