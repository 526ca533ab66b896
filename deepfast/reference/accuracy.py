"""How far a result may lie from the float64 reference: one rule for tests and selfchecks.

    error <= 2 * (error of the plain PyTorch form in the same dtype) + FLOOR[dtype] * scale

with the largest absolute error and ``scale`` the largest absolute value of the reference. A
number here is never loosened to make a kernel pass, and no test is run again.

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
from torch import Tensor

# For a lucky plain form: over 30 seeds of a chain of 9 layers both forms have the same
# median error (1e-7 to 5e-7 of the scale in fp32), and the worst excess over twice the plain
# form's error is 7e-7.
FLOOR = {
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the plain form is computed in."""
    return torch.float32 if dtype == torch.float64 else dtype


def error(got: Tensor, exact: Tensor) -> float:
    """The largest absolute error; 0 for empty tensors."""
    return (got.double() - exact).abs().max().item() if exact.numel() else 0.0


def fault(got: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> str | None:
    """Why ``got`` is further from ``exact`` (float64) than the rule allows; None where it is not.

    plain: the plain form, computed in ``plain_dtype(dtype)``.
    """
    if got.shape != exact.shape:
        return f"shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    # The log of a sum over no key is -inf.
    empty = exact == -torch.inf
    if (got[empty] != -torch.inf).any():
        return f"expected -inf as in the reference, got {got[empty]}"
    got, plain, exact = (x.masked_fill(empty, 0) for x in (got, plain, exact))
    if not torch.isfinite(exact).all():
        return "the reference itself is not finite"
    if not torch.isfinite(got).all():
        return "not finite"
    scale = exact.abs().max().item() if exact.numel() else 0.0
    allowed = 2 * error(plain, exact) + FLOOR[plain_dtype(dtype)] * scale
    if dtype == torch.float64:
        allowed *= 2**-29
    if error(got, exact) <= allowed:
        return None
    return (
        f"error {error(got, exact):.3g}, allowed {allowed:.3g} "
        f"(plain form {error(plain, exact):.3g}, scale {scale:.3g}, {dtype})"
    )


def first_fault(
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> str | None:
    """The name of the first of several results that is too far from the reference, and why."""
    for name, value in got.items():
        if reason := fault(value, plain[name], exact[name], dtype):
            return f"{name}: {reason}"
    return None
