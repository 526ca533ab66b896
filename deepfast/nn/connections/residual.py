"""The plain residual connection. Latent depth has it too: its layers scale their own branches."""

from collections.abc import Sequence

from torch import Tensor

from deepfast.nn.connections.base import Connection, Note, StackCall, run_layer
from deepfast.nn.layer_norm import add_norm
from deepfast.ops import common


class Residual(Connection):
    """``x_{l+1} = y_l``: a layer reads the layer below it."""

    def forward(self, x: Tensor, calls: Sequence[StackCall | None], note: Note = None) -> Tensor:
        (x,) = common.autocast(x)
        if self.norms is not None:
            return self._pre_norm(x, calls, note)
        if note is not None:
            note(x)
        for call in calls:
            x = run_layer(call, x, None, None, None)
            if note is not None:
                note(x)
        return x

    def _pre_norm(self, x: Tensor, calls: Sequence[StackCall | None], note: Note) -> Tensor:
        branch, residual = x, None
        used = [(call, norm) for call, norm in zip(calls, self.norms, strict=False) if call]
        for call, norm in (*used, (None, self.norms[-1])):
            n, x = add_norm(norm, branch, residual, self.dropout)
            if note is not None:
                note(x)
            if call is None:
                return n
            # Freed here, so that only the layer holds its input.
            branch = residual = None
            residual, branch = run_layer(call, x, n, norm, None)
        raise AssertionError("the last norm, which has no layer, returns")
