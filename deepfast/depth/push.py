"""One push to a depth connection."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class OutNorm(NamedTuple):
    """The norm applied to a boundary's output: weight and bias, each (D,) or None, and eps; ``rms``
    makes it an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


NO_NORM = OutNorm(None, None, 0.0)


@dataclass(slots=True, eq=False)
class Push:
    """One push, from `DepthConnection.forward` to the kernels and back: ``y_k = residual +
    dropout(branch)`` becomes state k, and row k and the norm behind it are computed.

    Tensors are (T, D) once the push is in a pass. The push has them only while it runs, because
    autograd keeps it until backward; ``seed`` and ``out_norm`` stay.
    """

    branch: Any
    """This field and those up to ``return_x`` are arguments of `DepthConnection.forward`."""
    residual: Tensor | None = None
    index: int | None = None
    dropout_p: float = 0.0
    seed: Any = None
    out_norm: OutNorm | None = None
    return_x: bool = True
    depth_pass: Any = None
    k: int = -1
    """The number of the state and of the row."""
    recomputed: bool = False
    """Whether the state is there already, and the row is computed again from the states."""
    norm: OutNorm | None = None
    """The norm behind row k, in the compute dtype: the connection's own, or else ``out_norm``."""
    x: Tensor | None = None
    """The results: the row, and its norm."""
    out: Tensor | None = None
    dx: Tensor | None = None
    """The gradients of the results. Backward writes those that follow."""
    dout: Tensor | None = None
    dbranch: Tensor | None = None
    dresidual: Tensor | None = None
    dnorm: tuple[Tensor | None, Tensor | None] = (None, None)
    """The gradients of the norm's weight and bias."""
