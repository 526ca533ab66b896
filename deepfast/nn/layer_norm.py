"""Layer and RMS normalisation as modules."""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.connections import names
from deepfast.depth.push import OutNorm
from deepfast.nn.linear import plain
from deepfast.nn.recompute import Kept, kept
from deepfast.ops.add_dropout import add_dropout
from deepfast.ops.layer_norm import normalise


class Norm(nn.Module):
    """The common base of `LayerNorm` and `RMSNorm`."""

    op: str
    """The op that it applies, which begins its errors."""
    rms: bool
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float, affine: bool, bias: bool, backend, device, dtype):
        super().__init__()
        name = type(self).__name__
        checks.whole(name, dim=dim)
        checks.eps(name, eps)
        checks.flag(name, elementwise_affine=affine, bias=bias)
        self.dim, self.eps, self.backend = dim, eps, backend
        for parameter, has in (("weight", affine), ("bias", affine and bias)):
            p = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if has else None
            self.register_parameter(parameter, p)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """n of residual + dropout(x); with ``residual`` also the sum."""
        checks.probability(self.op, dropout_p)
        p = dropout_p if self.training else 0.0
        n, total = normalise(self.op, x, residual, self.as_output(), p, None, self.backend)
        return n if residual is None else (n, total)

    @property
    def norm_type(self) -> str:
        return "rms" if self.rms else "layer"

    def as_output(self) -> OutNorm:
        """The parameters, for a boundary that applies this norm in its own pass."""
        return OutNorm(self.weight, self.bias, self.eps, self.rms)

    def keep_output(self) -> Callable[[], OutNorm]:
        """Returns the function that gives `as_output` in backward, as it was in forward."""
        affine, eps, rms = kept(self.weight, self.bias), self.eps, self.rms
        return lambda: OutNorm._make((*affine(), eps, rms))

    def recompute(self, x: Tensor) -> Callable[[], Tensor]:
        """Returns the function that computes the norm of x again in backward; it keeps x.

        The result has the bits of a forward pass that returned x as its sum. It differs where a
        boundary computed n in 16 bits (policy "layer"), because a boundary normalises x
        before it rounds x.
        """
        op, source, norm, backend = self.op, Kept(x), self.keep_output(), self.backend
        return lambda: normalise(op, source(), None, norm(), 0.0, None, backend)[0]

    def extra_repr(self) -> str:
        options = "" if self.weight is not None else ", elementwise_affine=False"
        if not self.rms and self.weight is not None and self.bias is None:
            options = ", bias=False"
        return f"{self.dim}, eps={self.eps}{options}"


class LayerNorm(Norm):
    """`deepfast.ops.layer_norm` with its parameters: (D,) weight of ones and bias of zeros.

    As in torch: ``bias=False`` leaves out the bias, ``elementwise_affine=False`` weight and bias;
    ``device`` and ``dtype`` are those of the parameters.
    """

    op, rms = "layer_norm", False

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim, eps, elementwise_affine, bias, backend, device, dtype)


class RMSNorm(Norm):
    """`deepfast.ops.rms_norm` with its parameter: (D,) weight of ones.

    As in torch: with ``elementwise_affine=False`` it has none; ``device`` and ``dtype`` are the
    parameter's.
    """

    op, rms = "rms_norm", True
    bias: None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim, eps, elementwise_affine, False, backend, device, dtype)


class NoNorm(nn.Module):
    """Stands where a stack has a norm, and returns its input."""

    def __init__(self, dim: int, *, backend: str | None = None, **_factory: Any):
        super().__init__()
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return x


NORMS: dict[str, Any] = {"layer": LayerNorm, "rms": RMSNorm, "none": NoNorm}
"""Kind of norm in a stack -> its module."""


def check_norms(op: str, connection: str, norm: str, norm_type: str) -> None:
    """Refuses an unknown kind of norm, and "none" where the connection needs norms."""
    checks.choice(op, NORMS, norm_type=norm_type)
    if norm_type == "none" and (connection not in names("without_norm") or norm != "pre"):
        raise ValueError(
            f"{op}: norm_type='none' needs norm='pre' and the connection "
            f"{' or '.join(names('without_norm'))}, got "
            f"norm={norm!r} and {connection!r}"
        )


def plain_norm(module: nn.Module) -> TypeGuard[Norm]:
    """Whether a fused op may replace ``module``, see `plain`."""
    return plain(module, LayerNorm) or plain(module, RMSNorm)


def add_norm(
    norm: nn.Module, x: Tensor, residual: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """``norm(s)`` and ``s = residual + dropout(x)``; without a residual s is x.

    A norm that is not plain is called with s alone, as its hooks and any other module expect.
    """
    if residual is None:
        return norm(x), x
    if plain_norm(norm):
        return norm(x, residual=residual, dropout_p=dropout_p)
    p, backend = dropout_p if norm.training else 0.0, getattr(norm, "backend", None)
    s = add_dropout(type(norm).__name__, x, residual, p, None, backend)
    return norm(s), s
