"""The caller's handle on one forward pass through a stack with depth connections."""

import threading
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.depth.state import DepthState


class DepthHistory:
    """The states that the layers of one stack have produced in one forward pass.

    Make a new history for every forward pass and pass it to every call of the stack's connection
    (`DLCL`, `AttentionResiduals`). It owns one buffer with a state per layer; backward writes
    gradients into the same buffer. The buffer is freed when backward ends, or with the pass's
    outputs and this object. Where nothing learns, as under `torch.no_grad`, the last push frees it.
    Several passes may be in progress at once, each with its own history. One pass belongs to one
    thread at a time: two threads that run backward of the same retained pass at once write into the
    same buffer, and nothing notices it.

    Args:
        inplace: whether backward may overwrite states with gradients, so that it needs no more
            memory than one state per layer. False keeps the states, at twice the memory, so that a
            second backward with ``retain_graph=True`` works.
        block: rows per block, see `deepfast.depth`; None chooses by depth.
        eager: whether a push inside `torch.compile` leaves the graph and runs as in eager code, so
            that layers which push and are compiled one by one keep the memory and the traffic of
            eager code. False traces it: a stack compiled as a whole is one graph, whose traffic is
            quadratic in depth. None traces where the history is made inside the compiled function.
    """

    def __init__(
        self, *, inplace: bool = True, block: int | None = None, eager: bool | None = None
    ):
        if block is not None:
            checks.whole("DepthHistory", block=block)
        checks.flag("DepthHistory", inplace=inplace)
        if eager is not None:
            checks.flag("DepthHistory", eager=eager)
        self.eager = not torch.compiler.is_compiling() if eager is None else eager
        self.inplace = inplace
        self.block = block
        # The stack; shape, dtype and device of the first push.
        self.owner: Any = None
        self.kind: tuple[torch.Size, torch.dtype, torch.device] | None = None
        # Autograd nodes refer to the state, and the token refers to autograd nodes. The state must
        # not hold the token, which would be a reference cycle.
        self.state: DepthState | None = None
        self.token: Tensor | None = None
        # Grad mode of the first push, and the backward pass (graph task) that it ran in; -1 outside
        # of backward.
        self.grad_mode = False
        self.task = -1
        # A traced pass has no `state`. It keeps W and the states as they are mixed; the last push
        # replaces the states by None.
        self.traced_weight: Tensor | None = None
        self.traced: list[Tensor | None] = []
        self.closed = False

    def __len__(self) -> int:
        """States pushed so far."""
        return len(self.traced) if self.state is None else self.state.pushed

    def __bool__(self) -> bool:
        """True, also before the first push: ``history or DepthHistory()`` keeps an empty one."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return 0 if self.state is None else self.state.nbytes

    def close(self) -> None:
        """Drops the reference to the graph; no further state can be pushed. The last push does it.

        Call it when a pass stops early and a checkpointed function refers to this history: the
        graph, the function and the history would otherwise keep each other alive.
        ``with DepthHistory() as history:`` closes it too.
        """
        self.token = self.traced_weight = None
        self.closed = True

    def __enter__(self) -> "DepthHistory":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DepthHistory(states={len(self)}, inplace={self.inplace}, nbytes={self.nbytes})"


class PerThread(threading.local):
    """Attributes that each thread sets for itself. They are neither copied nor pickled."""

    def __reduce__(self):
        return type(self), ()


class OpenPass(PerThread):
    """The pass of a module whose callers hold no history."""

    history: DepthHistory | None = None
    x: Tensor | None = None
    """What the newest row returned."""

    def begin(self) -> None:
        self.end()
        self.history, self.x = DepthHistory(), None

    def end(self) -> None:
        if self.history is not None:
            self.history.close()
        self.history = None
