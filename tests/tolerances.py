"""The rule of `deepfast.reference.accuracy` as assertions."""

import torch

from deepfast.reference.accuracy import FLOOR, error, fault, plain_dtype

__all__ = ["FLOOR", "assert_accurate", "assert_all_accurate", "error", "plain_dtype"]


def assert_accurate(got, plain, exact, dtype, what=""):
    """``got`` is as near to ``exact`` (float64) as the rule allows, given the plain form, which
    is computed in ``plain_dtype(dtype)``."""
    assert exact.dtype == torch.float64
    if dtype == torch.float64:
        assert got.dtype == dtype, f"{what}: {got.dtype}"
        assert plain.dtype == torch.float32, f"{what}: the plain form must be in fp32"
    found = fault(got, plain, exact, dtype)
    assert found is None, f"{what}: {found}"


def assert_all_accurate(got, plain, exact, dtype):
    """`assert_accurate` over dictionaries of tensors with the same keys."""
    assert got.keys() == plain.keys() == exact.keys()
    for name in exact:
        assert_accurate(got[name], plain[name], exact[name], dtype, name)
