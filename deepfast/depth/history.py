"""The caller's handle on one forward pass of a stack."""

import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.depth.depth_pass import DepthPass

SEVERAL = -1
"""The number of a pass whose launches cannot be in one graph: a compiled function may break into
several graphs, and an exported program may go to a runtime that does not have the launches."""

_numbers = itertools.count(1)


def graph_number() -> int:
    """The number of the graph that is being traced, where it holds all that the function does
    (``fullgraph=True``). Else `SEVERAL`, or 0 where `DepthHistory()` is all that is traced."""
    if torch.compiler.is_exporting():
        return SEVERAL
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    if tx.output.root_tx.f_code is DepthHistory.__init__.__code__:
        return 0
    if not tx.one_graph:
        return SEVERAL
    if not hasattr(tx.output, "deepfast_number"):
        tx.output.deepfast_number = next(_numbers)  # type: ignore[attr-defined]
    return tx.output.deepfast_number  # type: ignore[attr-defined]


# What torch.compiler.assume_constant_result does, without importing all of torch's compiler.
graph_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


class PerThread(threading.local):
    """Attributes that each thread sets for itself. They are neither copied nor pickled."""

    def __reduce__(self):
        return type(self), ()


class DepthHistory:
    """The states that the layers of one stack have produced in one forward pass.

    Make a new history for every forward pass and pass it to every call of the stack's connection
    (`DLCL`, `AttentionResiduals`). It owns one buffer with a state per layer; backward writes
    gradients into the same buffer. The buffer is freed when backward ends, or with the pass's
    outputs and this object. If nothing requires a gradient, as under `torch.no_grad`, the last push
    frees it. Several passes may be in progress at once, each with its own history. One pass belongs
    to one thread at a time: two threads that run backward of the same retained pass at once write
    into the same buffer, and no error is raised.

    Args:
        inplace: whether backward may overwrite states with gradients, so that it needs no more
            memory than one state per layer. False keeps the states, at twice the memory, so that a
            second backward with ``retain_graph=True`` works.
        block: rows per block, see `deepfast.depth`; None chooses by depth.
        eager: whether a push inside `torch.compile` leaves the graph and runs as in eager code, so
            that layers which push and are compiled one by one keep the memory and the traffic of
            eager code. False traces it. None traces where the history is made inside the compiled
            function; with ``fullgraph=True`` the graph then has the launches of eager code.
    """

    def __init__(
        self, *, inplace: bool = True, block: int | None = None, eager: bool | None = None
    ):
        if block is not None:
            checks.whole("DepthHistory", block=block)
        checks.flag("DepthHistory", inplace=inplace)
        if eager is not None:
            checks.flag("DepthHistory", eager=eager)
        # The compiled graph that the history is made in.
        self.graph = graph_number() if torch.compiler.is_compiling() else 0
        self.eager = self.graph == 0 if eager is None else eager
        self.inplace = inplace
        self.block = block
        # The connection.
        self.owner: Any = None
        # Autograd nodes refer to the pass, and the token refers to autograd nodes. The pass must
        # not hold the token, which would be a reference cycle.
        self.depth_pass: DepthPass | None = None
        self.token: Tensor | None = None
        # A traced pass has no `depth_pass`. It keeps the connection's `pass_parameters` and, until
        # the last push, the states as they are mixed; None each, where the graph holds the pass.
        self.parameters: tuple[Tensor | None, ...] = ()
        self.traced: list[Tensor | None] = []
        # The partial sums of the block of rows that the traced pass is in.
        self.far: Any = None
        self.closed = False

    def __len__(self) -> int:
        """States pushed so far."""
        return len(self.traced) if self.depth_pass is None else self.depth_pass.pushed

    def __bool__(self) -> bool:
        """True, also before the first push: ``history or DepthHistory()`` keeps an empty one."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return 0 if self.depth_pass is None else self.depth_pass.nbytes

    def close(self) -> None:
        """Drops the reference to the graph; no further state can be pushed. The last push does it.

        Call it when a pass stops early and a checkpointed function refers to this history: the
        graph, the function and the history would otherwise keep each other alive.
        ``with DepthHistory() as history:`` closes it too.
        """
        self.token, self.parameters = None, ()
        self.closed = True

    def __enter__(self) -> "DepthHistory":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DepthHistory(states={len(self)}, inplace={self.inplace}, nbytes={self.nbytes})"
