"""How far a result may lie from the float64 reference: one table for all tests.

    error <= 2 * (error of the plain PyTorch form in the same dtype) + FLOOR[dtype] * scale

with the largest absolute error and ``scale`` the largest absolute value of the reference. A
number here is never loosened to make a test pass, and no test is run again.
"""

import torch

# For a plain form that is lucky: over 30 seeds of a chain of 9 layers both forms have the same
# median error (1e-7 to 5e-7 of the scale in fp32), and the worst excess over twice the plain
# form's error is 7e-7.
FLOOR = {
    torch.float64: 4e-15,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}

DTYPES = tuple(FLOOR)
LOW = (torch.float32, torch.bfloat16, torch.float16)


def error(got, exact):
    """The largest absolute error; 0 for empty tensors."""
    return (got.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_accurate(got, plain, exact, dtype, what=""):
    """``got`` is as near to ``exact`` (float64) as the table allows, given the plain form."""
    assert exact.dtype == torch.float64
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    assert torch.isfinite(exact).all(), f"{what}: the reference itself is not finite"
    assert torch.isfinite(got).all(), f"{what}: not finite"
    scale = exact.abs().max().item() if exact.numel() else 0.0
    allowed = 2 * error(plain, exact) + FLOOR[dtype] * scale
    assert error(got, exact) <= allowed, (
        f"{what}: error {error(got, exact):.3g}, allowed {allowed:.3g} "
        f"(plain form {error(plain, exact):.3g}, scale {scale:.3g}, {dtype})"
    )


def assert_all_accurate(got, plain, exact, dtype):
    """`assert_accurate` over dictionaries of tensors with the same keys."""
    assert got.keys() == plain.keys() == exact.keys()
    for name in exact:
        assert_accurate(got[name], plain[name], exact[name], dtype, name)
