"""Layer and RMS normalisation as modules."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import OutNorm
from deepfast.nn.recompute import Kept, Recompute, plain
from deepfast.ops.layer_norm import compute, normalise


class Norm(nn.Module):
    """What `LayerNorm` and `RMSNorm` share."""

    op: str
    """The op that it applies, which begins its errors."""
    rms: bool
    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float, backend: str | None):
        super().__init__()
        name = type(self).__name__
        checks.whole(name, dim=dim)
        checks.eps(name, eps)
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.empty(dim))
        self.register_parameter("bias", None if self.rms else nn.Parameter(torch.empty(dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """n of residual + dropout(x); with ``residual`` also the sum."""
        return normalise(
            self.op, x, residual, *self.as_output(), dropout_p, self.training, None, self.backend
        )

    def as_output(self) -> OutNorm:
        """The parameters, for a DLCL boundary that applies this norm in its own pass."""
        return OutNorm(self.weight, self.bias, self.eps, self.rms)

    def keep_output(self) -> Callable[[], OutNorm]:
        """Returns the function that gives `as_output` in backward, as it was in forward."""
        weight, bias = Kept(self.weight), None if self.bias is None else Kept(self.bias)
        eps, rms = self.eps, self.rms
        return lambda: OutNorm(weight(), None if bias is None else bias(), eps, rms)

    def recompute(self, n: Tensor, x: Tensor) -> Recompute:
        """Recomputes n, the norm of x, in backward; it keeps x.

        The result has the bits of a forward pass that returned x as its sum. It differs where a
        DLCL boundary computed n in 16 bits (policy "states"), because a boundary normalises x
        before it rounds x.
        """
        source, norm, backend = Kept(x), self.keep_output(), self.backend

        @torch.no_grad()
        def function() -> Tensor:
            return compute(source(), None, *norm(), 0.0, None, backend)[0]

        return Recompute(n, function)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(Norm):
    """`deepfast.ops.layer_norm` with its parameters: (D,) weight of ones and bias of zeros."""

    op, rms = "layer_norm", False
    bias: nn.Parameter

    def __init__(self, dim: int, eps: float = 1e-5, *, backend: str | None = None):
        super().__init__(dim, eps, backend)


class RMSNorm(Norm):
    """`deepfast.ops.rms_norm` with its parameter: (D,) weight of ones."""

    op, rms = "rms_norm", True
    bias: None

    def __init__(self, dim: int, eps: float = 1e-6, *, backend: str | None = None):
        super().__init__(dim, eps, backend)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}
"""Kind of norm in a stack -> its module."""


def plain_norm(module: nn.Module) -> TypeGuard[Norm]:
    """Whether a fused op may replace ``module``, see `plain`."""
    return any(plain(module, kind) for kind in NORMS.values())
