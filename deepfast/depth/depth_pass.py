"""One forward and backward pass of a stack: its states, partial sums and gradients.

A state is one (T, D) tensor in a slot; the picture in `deepfast.depth` shows which.
Nothing here knows autograd. Its nodes, in boundary.py, call the methods of `DepthPass` in order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast import backend
from deepfast.depth.rows import NO_NORM, BlockSums, Pair, RowGrads, RowNorm, numbers_of_rows
from deepfast.depth.schedule import FarPass, Schedule, one_for_all
from deepfast.dtypes import compute_dtype
from deepfast.ops.common import empty_slots
from deepfast.ops.graph_launches import graph_launches

OVERWRITTEN = (
    "DepthHistory: a second backward through one forward pass needs its states, and gradients "
    "have overwritten them; use DepthHistory(inplace=False) or deepfast.connect(..., "
    "inplace=False), or, where a stack such as TransformerEncoder makes the history, run its "
    "forward again"
)


class DepthPass:
    """The buffers and the bookkeeping of one forward pass of a connection, and of its backward.

    Each connection has a subclass beside it, which knows how a row weighs the states and launches
    the kernels: `mix`, `forward_row`, `pull`, `backward_row`. `deepfast.launches` lists their
    operands.

    Args:
        owner: the connection.
        y: the first push.
        schedule: which row reads which state when.
        inplace: whether gradients overwrite states.
        parameters: those whose gradients `take_grads` returns.
    """

    op: str
    """The name of its launches in `deepfast.backend`."""
    pulled = 8
    """States for which a launch on a GPU reads the far gradients."""
    mix: Callable[[FarPass, Tensor, bool], None]
    """(far, sums, add). Forward: writes the sums of earlier states to ``sums`` (B, T, D), or adds
    to them."""
    forward_row: Callable[[Any, RowNorm, Pair, Pair], None]
    """(push, norm, (branch, residual), (x, out)), with a `boundary.Push`. Stores what is pushed as
    state k, and computes row k and the norm behind it. Without a branch the state is there."""
    pull: Callable[[FarPass, Tensor, bool], None]
    """(far, sums, add). Backward: writes what later rows give to the gradients of states to
    ``sums`` (B, T, D), or adds it, and computes the part of dW that goes with it."""
    backward_row: Callable[[Any, RowNorm, RowGrads], None]
    """One boundary: stores g_k, and computes the gradient of what was pushed as state k."""
    begin: Callable[[int], None]
    """Called last in ``__init__``, with T: makes the subclass's own buffers."""
    begin_grads: Callable[[], None]
    """Called where backward begins: sets the gradients of the parameters to 0."""
    take_grads: Callable[[], tuple[Tensor | None, ...]]
    """Returns the gradients of the parameters and keeps none."""

    def __init__(
        self,
        owner: Any,
        y: Tensor,
        schedule: Schedule,
        inplace: bool,
        parameters: Sequence[Tensor | None],
    ):
        self.owner, self.schedule, self.inplace = owner, schedule, inplace
        dtype, learning = compute_dtype(y.dtype), torch.is_grad_enabled()
        # Copies: a parameter changed before backward must not change this pass.
        self.parameters: list[Any] = [
            None if p is None else p.detach().to(dtype, copy=True).contiguous() for p in parameters
        ]
        self.learns = [learning and p is not None and p.requires_grad for p in parameters]
        self.like = self.parameters[0]
        width = y.shape[-1]
        name, self.launch = backend.choose(self.op, owner.backend, y.device, y.dtype, width)
        if name != "cpu" and torch._guards.TracingContext.try_get():
            self.launch = graph_launches(self.op, owner.backend)
        self.row_norms: Sequence[tuple | None] = (None,) * len(self.like)
        """The connection's own norm behind each row (post-norm), the fields of an `OutNorm` in the
        compute dtype."""
        self.row_norm_grads: Sequence[tuple | None] = (None,) * len(self.like)
        """Where the gradients of these weights and biases go, (D,) each."""
        self.rows, self.running = schedule.rows, owner.running
        self.pushed = 0
        self.states: Tensor | None = None
        # Of the norms behind rows.
        self._out_mean: Sequence[Tensor] | None = None
        self._out_rstd: Sequence[Tensor] | None = None
        self._seeds: tuple[Tensor, ...] | None = None
        self._seeds_drawn_by = -1
        # P of the rows of one block, and Q of the states of one.
        self.ahead, self._pulled = BlockSums(), BlockSums()
        # The lowest boundary with an autograd node. Backward reaches it last.
        self.lowest = self.rows
        # Whether checkpointing may read a state below that one.
        self.needed_below = False
        # Backward: the graph task that is running, and the rows whose gradient it has stored.
        self.task: int | None = None
        self._live: set[int] = set()
        self.grads: Tensor | None = None
        # The gradient of row l is stored at l + first_grad. In place that is the slot of z_{l+1}.
        self.first_grad = int(inplace)
        # What state k + 1, where it contains state k, adds to the gradient of state k.
        self._carried: Tensor | None = None
        # Which states gradients have overwritten, and whether the whole buffer is freed.
        self._overwritten = [False] * (self.rows + 1)
        self.released = False
        self.begin(y.numel() // y.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        buffers = (self.states, self.ahead.sums, self._pulled.sums)
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    @property
    def any_learns(self) -> bool:
        """Whether the pass has gradients that belong to no state."""
        return any(self.learns)

    # ---- forward -------------------------------------------------------------------------------

    def open_slot(self, k: int, y: Tensor) -> None:
        """Makes room for state k, shaped like y (T, D)."""
        if self.released or (self.task is not None and any(self._overwritten)):
            raise RuntimeError(
                "DepthHistory: a backward pass has overwritten states, so no further state can be "
                "pushed; use DepthHistory(inplace=False), or a new history"
            )
        if self.states is None:
            # In place g_l is stored in slot l + 1, so the last row needs one more slot.
            self.states = empty_slots(self.rows + self.first_grad, y)
            if y.device.type == "cpu" and backend.compiled():
                # Any backend's states gain from large pages.
                torch.ops.deepfast.advise_states(self.states)
        self.pushed = k + 1

    def partial(self, row: int) -> Tensor | None:
        """P_row, the sum over the states before row's block; None in the first block.

        The first call for a block computes the partial sums of all its rows.
        """
        (start, end), ahead = self.schedule.blocks[row], self.ahead
        if ahead.start != start:
            passes = self.schedule.far_reads(start, end)
            if passes:
                sums = ahead.open(self.schedule.block, self.states[0])
                self.open_block(self.schedule.block)
                add = not one_for_all(passes, end - start)
                if add:
                    sums[: end - start].zero_()
                for far in passes:
                    self.mix(far, sums, add)
            else:
                ahead.skip(self.schedule.block)
            ahead.start = start
        return ahead.of[row - start]

    def open_block(self, block: int) -> None:
        """Called before the sums of a block of rows."""

    def row_norm(self, k: int, given: tuple | None) -> RowNorm:
        """The norm behind row k, the connection's own or else ``given``, with its statistics."""
        norm = self.row_norms[k] or given
        if norm is None:
            return NO_NORM
        (weight, bias, eps, rms), like = norm, self.like
        tokens = self.states.shape[1]
        if self._out_rstd is None:
            self._out_rstd = numbers_of_rows(like, self.rows, tokens)
        if self._out_mean is None and not rms:
            self._out_mean = numbers_of_rows(like, self.rows, tokens)
        mean = None if rms else self._out_mean[k]
        return RowNorm(weight, bias, eps, rms, mean, self._out_rstd[k])

    def seed(self, k: int) -> Tensor:
        """The seed of the dropout before state k.

        The first call draws the seeds of all boundaries from the device's generator. When that
        boundary is recomputed, it draws again, so that the generator advances as in forward.
        """
        if self._seeds is None or self._seeds_drawn_by == k:
            seeds = torch.randint(2**62, (self.rows,), device=self.like.device)
            if self._seeds is None:
                self._seeds, self._seeds_drawn_by = seeds.unbind(0), k
        return self._seeds[k]

    def end_forward(self, learning: bool) -> None:
        """Called after the last push. If nothing requires a gradient, no state is read again."""
        self.ahead.clear()
        if not learning or self.lowest == self.rows:
            self.release()

    def release(self) -> None:
        """Frees the states and everything else that grows with the number of tokens."""
        self.ahead.clear()
        self._pulled.clear()
        self.states = self.grads = self._out_mean = self._out_rstd = self._carried = None
        self.released = True

    # ---- backward ------------------------------------------------------------------------------

    def check_task(self, task: int) -> None:
        """Raises where a later backward pass has begun, which discards what this one has left."""
        # Each graph task has a larger number than those that began before it.
        if self.task is not None and task < self.task:
            raise RuntimeError(
                "DepthHistory: another backward pass through the same forward pass began before "
                "this one ended; run them one after the other"
            )

    def check_readable(self, k: int) -> None:
        """Raises where row k cannot be recomputed: a gradient has overwritten a state up to k."""
        if self.released or any(self._overwritten[: k + 1]):
            raise RuntimeError(OVERWRITTEN)

    def enter(self, k: int, task: int) -> None:
        """Called when backward reaches boundary k in the graph task ``task``."""
        self.check_task(task)
        new = task != self.task
        # A new backward pass recomputes rows, and reads all the states below them.
        if self.released or self._overwritten[k] or (new and any(self._overwritten[:k])):
            raise RuntimeError(OVERWRITTEN)
        if new:
            # Discards what an earlier backward pass has left.
            self.task, self._pulled.start, self._carried = task, -1, None
            self._live.clear()
            self.take_grads()
            self.begin_grads()
        if self.grads is None:
            self.grads = self.states if self.inplace else empty_slots(self.rows, self.states[0])

    def _far_pull(self, k: int) -> Tensor | None:
        """Q_k, what the rows after k's block add to dz_k; None where no such row has a gradient.

        The first call for a block computes it for all its states, with their part of dW.
        """
        (start, end), pulled = self.schedule.blocks[k], self._pulled
        if end == self.rows:
            return None
        if pulled.start != start:
            # Backward may have started inside this block. Then it reaches no state after k.
            stop = k + 1
            live = tuple(r for r in range(end, self.rows) if r in self._live)
            passes = self.schedule.far_readers(start, stop, live)
            pulled.start = start
            if not passes:
                pulled.skip(self.schedule.block)
                return None
            sums = pulled.open(self.schedule.block, self.states[0])
            add = not one_for_all(passes, stop - start)
            if add:
                sums[: stop - start].zero_()
            for far in passes:
                self.pull(far, sums, add)
        return pulled.of[k - start]

    def backward(self, push: Any, norm: RowNorm, given: Pair, pushed: Pair, dnorm: Pair) -> None:
        """Boundary k: stores g_k and writes the gradients of what was pushed, and of the norm.

        given: the gradients (T, D) of the row and of its norm's result.
        pushed, dnorm: where those of branch and residual, and of the norm's weight and bias go.
        """
        k, carried = push.k, self._carried
        far, self._carried = self._far_pull(k), None
        if carried is not None:
            far = carried.to(self.like.dtype) if far is None else far.add_(carried)
        dbranch, dresidual = pushed
        written = dresidual
        if self.running[k]:
            # A tensor of its own, because callers may modify the gradients that they get.
            written = self._carried = torch.empty_like(self.states[k])
        near = self.schedule.near_readers(k, self._live)
        grads = RowGrads(*given, near, far, dbranch, written, *dnorm)
        self.backward_row(push, norm, grads)
        if self.running[k] and dresidual is not None:
            dresidual.copy_(written)
        self._leave(k)

    def _leave(self, k: int) -> None:
        """Boundary k has stored g_k, in place over state k + 1."""
        self._live.add(k)
        if self.inplace:
            # This boundary was the last to read state k: its slot is free for g_{k-1}.
            self._overwritten[k] = self._overwritten[k + 1] = True
        if k == self.lowest and not self.needed_below:
            self.ahead.clear()
            self._pulled.clear()
            if self.inplace:
                self.release()
