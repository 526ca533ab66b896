"""How far a result may lie from the float64 reference: one table for all tests.

    error <= 2 * (error of the plain PyTorch form in the same dtype) + FLOOR[dtype] * scale

with the largest absolute error and ``scale`` the largest absolute value of the reference. A
number here is never loosened to make a test pass, and no test is run again.

A result in float64 has the bound of a result in fp32, in float64's units:

    error <= 2^-29 * (the bound of fp32), with the plain form in fp32

The plain form in float64 gives no bound: it may be the reference's own code, with an error of 0.
But the reference rounds as well, and a processor with other vectors adds in another order. A sum
of n terms that is rounded in units of u is off by at most n u / (1 - n u) times the sum of the
terms' absolute values, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
n and the terms are the same in fp32 and in float64, u is 2^-24 and 2^-53. So the plain form's
error in fp32, divided by 2^29, is what so many terms and their cancellation cost in float64.
"""

import torch

# For a lucky plain form: over 30 seeds of a chain of 9 layers both forms have the same
# median error (1e-7 to 5e-7 of the scale in fp32), and the worst excess over twice the plain
# form's error is 7e-7.
FLOOR = {
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def plain_dtype(dtype):
    """The dtype that the plain form is computed in."""
    return torch.float32 if dtype == torch.float64 else dtype


def error(got, exact):
    """The largest absolute error; 0 for empty tensors."""
    return (got.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_accurate(got, plain, exact, dtype, what=""):
    """``got`` is as near to ``exact`` (float64) as the table allows, given the plain form, which
    is computed in ``plain_dtype(dtype)``."""
    assert exact.dtype == torch.float64
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    assert torch.isfinite(exact).all(), f"{what}: the reference itself is not finite"
    assert torch.isfinite(got).all(), f"{what}: not finite"
    scale = exact.abs().max().item() if exact.numel() else 0.0
    allowed = 2 * error(plain, exact) + FLOOR[plain_dtype(dtype)] * scale
    if dtype == torch.float64:
        assert got.dtype == dtype, f"{what}: {got.dtype}"
        assert plain.dtype == torch.float32, f"{what}: the plain form must be in fp32"
        allowed *= 2**-29
    assert error(got, exact) <= allowed, (
        f"{what}: error {error(got, exact):.3g}, allowed {allowed:.3g} "
        f"(plain form {error(plain, exact):.3g}, scale {scale:.3g}, {dtype})"
    )


def assert_all_accurate(got, plain, exact, dtype):
    """`assert_accurate` over dictionaries of tensors with the same keys."""
    assert got.keys() == plain.keys() == exact.keys()
    for name in exact:
        assert_accurate(got[name], plain[name], exact[name], dtype, name)
