"""Layer normalisation as a module."""

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.depth.boundary import OutNorm
from deepfast.nn.recompute import Kept, Recompute
from deepfast.ops.layer_norm import compute


class LayerNorm(nn.Module):
    """`deepfast.ops.layer_norm` with its parameters: (D,) weight of ones and bias of zeros."""

    def __init__(self, dim: int, eps: float = 1e-5, *, backend: str | None = None):
        super().__init__()
        checks.whole("LayerNorm", dim=dim)
        checks.eps("LayerNorm", eps)
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """LN(residual + dropout(x)); with ``residual`` also the sum."""
        return ops.layer_norm(
            x,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            dropout_p=dropout_p,
            training=self.training,
            backend=self.backend,
        )

    def as_output(self) -> OutNorm:
        """The parameters, for a DLCL boundary that applies this norm in its own pass."""
        return OutNorm(self.weight, self.bias, self.eps)

    def recompute(self, n: Tensor, x: Tensor) -> Recompute:
        """Recomputes n = LN(x) in backward; it keeps x.

        The result has the bits of a forward pass that returned x as its sum. It differs where a
        DLCL boundary computed n in 16 bits (policy "states"), because a boundary normalises x
        before it rounds x.
        """
        source, weight, bias = Kept(x), Kept(self.weight), Kept(self.bias)
        eps, backend = self.eps, self.backend

        @torch.no_grad()
        def function() -> Tensor:
            return compute(source(), None, weight(), bias(), eps, False, 0.0, None, backend)[0]

        return Recompute(n, function)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
