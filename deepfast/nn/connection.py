"""How layers of a stack are joined: plain residual, or DLCL."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from deepfast.ops import _common as common

from .dlcl import DLCL
from .history import DepthHistory
from .layer_norm import LayerNorm

CONNECTIONS = ("dlcl", "residual")

Body = Callable[[Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]
"""Pre-norm: from a layer's input and its normalised form to the layer's last residual and branch.
Post-norm: from a layer's input, and None, to its output."""


class Connection(nn.Module):
    """Runs a stack of layer bodies, with everything between two of them in one pass.

    pre-norm, residual   ``x_{l+1} = y_l``
    pre-norm, DLCL       ``x_{l+1} = sum_k W[l,k] LN_k(y_k)``
    then ``n = LN(x_{l+1})`` for the next layer, and a final LN after the last.
    post-norm            ``y_l = LN(r + f)``; with DLCL ``x_{l+1} = LN_l(sum_k W[l,k] y_k)``.

    Under DLCL the mixed inputs x are not kept for backward: they are made again from the states,
    block by block, so the stack holds no more memory than the plain residual one.

    The pre-norm layer-norms between layers belong to this module, not to the layers, so that a
    sharding wrapper around a layer never hides them.
    """

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        connection: str,
        norm: str,
        dropout: float,
        backend: str | None,
        dlcl: dict | None = None,
    ):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if connection not in CONNECTIONS:
            raise ValueError(f"connection must be one of {CONNECTIONS}, got {connection!r}")
        if dlcl and connection != "dlcl":
            raise ValueError(f"dlcl options need connection='dlcl', got {connection!r}")
        self.norm, self.dropout = norm, dropout
        self.dlcl = None
        if connection == "dlcl":
            self.dlcl = DLCL(num_layers, dim, norm=norm, backend=backend, **(dlcl or {}))
        # Pre-norm: entry l is layer l's first LN, the last one the stack's final LN.
        self.norms = None
        if norm == "pre":
            self.norms = nn.ModuleList(
                LayerNorm(dim, backend=backend) for _ in range(num_layers + 1)
            )

    def forward(self, x: Tensor, layers: Iterable[Body]) -> Tensor:
        """From the embedding (T, D) to the stack's output (T, D)."""
        (x,) = common.autocast(x)
        layers = list(layers)
        run = self._pre_norm if self.norm == "pre" else self._post_norm
        return run(x, layers)

    def _pre_norm(self, x: Tensor, layers: list[Body]) -> Tensor:
        history = DepthHistory() if self.dlcl is not None else None
        last = len(layers)
        branch, residual, p = x, None, 0.0
        for index, norm in enumerate(self.norms):
            if history is not None:
                x, n = self.dlcl(
                    branch,
                    history,
                    residual=residual,
                    dropout_p=p,
                    out_norm=norm.as_output(),
                    want_x=index < last,
                )
            elif residual is None:
                x, n = branch, norm(branch)
            else:
                n, x = norm(branch, residual=residual, dropout_p=p)
            if index < last:
                residual, branch = layers[index](x, n)
                p = self.dropout
        return n

    def _post_norm(self, x: Tensor, layers: list[Body]) -> Tensor:
        history = DepthHistory() if self.dlcl is not None else None
        if history is not None:
            x = self.dlcl(x, history)
        for body in layers:
            x = body(x, None)
            if history is not None:
                x = self.dlcl(x, history)
        return x
