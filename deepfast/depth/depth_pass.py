"""One forward and backward pass of a stack: its states, partial sums and gradients.

A state is one (T, D) tensor in a slot; the picture in `deepfast.depth` shows which.
Nothing here knows autograd. Its nodes, in boundary.py, call the methods of `DepthPass` in order.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepfast import backend
from deepfast.depth.buffers import BlockSums, numbers_of_rows, total_bytes
from deepfast.depth.push import NO_NORM, OutNorm, Push
from deepfast.depth.schedule import Schedule
from deepfast.dtypes import compute_dtype
from deepfast.ops.common import empty_slots, parameter
from deepfast.ops.graph_launches import graph_launches

OVERWRITTEN = (
    "DepthHistory: a second backward through one forward pass needs its states, and gradients "
    "have overwritten them; use DepthHistory(inplace=False) or deepfast.connect(..., "
    "inplace=False), or, where a stack such as TransformerEncoder makes the history, run its "
    "forward again"
)


class Launches(NamedTuple):
    """The launches of a pass, by name or as functions; `deepfast.launches` lists their operands."""

    forward: Any
    """Forward of a boundary."""
    backward: Any
    """Backward of a boundary."""
    mix: Any
    """The pass over earlier states, for the partial sums of a block."""
    pull: Any
    """The pass over the gradients of later rows, for the sums that the states of a block pull."""


class DepthPass(abc.ABC):
    """The buffers of one forward pass of a connection, and of its backward.

    Each connection has a subclass beside it, which knows how a row weighs the states: it names the
    kernels, and gives those of their operands that belong to the weights.

    Args:
        owner: the connection.
        push: the first one.
        schedule: which row reads which state when.
        inplace: whether gradients overwrite states.
        parameters: what the states are weighed with; `take_grads` returns their gradients.
    """

    op: str
    """The op of its launches in `deepfast.backend`."""
    launches: Launches
    states_per_pull = 8
    """States for which a launch on a GPU reads the far gradients."""

    def __init__(
        self,
        owner: Any,
        push: Push,
        schedule: Schedule,
        inplace: bool,
        parameters: Sequence[Tensor | None],
    ):
        y: Any = push.branch
        self.owner, self.schedule, self.inplace = owner, schedule, inplace
        self.state_kind = y.shape, y.dtype, y.device
        """Shape, dtype and device of every state that is pushed."""
        self.learning = torch.is_grad_enabled()
        self.began_in = torch._C._current_graph_task_id()
        """The backward pass (graph task) that the pass was begun in; -1 outside of backward."""
        dtype = compute_dtype(y.dtype)
        # Copies: a parameter changed before backward must not change this pass.
        self.parameters: list[Any] = [
            None if p is None else p.detach().to(dtype, copy=True).contiguous() for p in parameters
        ]
        self.learns = [self.learning and p is not None and p.requires_grad for p in parameters]
        self.like = self.parameters[0]
        name, found = backend.choose(self.op, owner.backend, y.device, y.dtype, y.shape[-1])
        if name != "cpu" and torch._guards.TracingContext.try_get():
            found = graph_launches(self.op, owner.backend)
        self.launch = Launches(*(getattr(found, name) for name in self.launches))
        self.rows, self.continues = schedule.rows, owner.continues
        self.pushed = 0
        self.states: Tensor | None = None
        # The statistics of the norms behind rows.
        self._out_mean: Sequence[Tensor] | None = None
        self._out_rstd: Sequence[Tensor] | None = None
        self._seeds: tuple[Tensor, ...] | None = None
        self._seeds_drawn_by = -1
        # P of the rows of one block, and Q of the states of one.
        self.partial_sums, self.pulled_sums = BlockSums(), BlockSums()
        # The lowest boundary with an autograd node. Backward reaches it last.
        self.lowest = self.rows
        # Whether checkpointing may read a state below that one.
        self.needed_below = False
        # Backward: the graph task that is running, and the highest row whose gradient it stored.
        self.task: int | None = None
        self.top = -1
        # In place the gradient of row l is in the slot of z_{l+1}.
        self.grads: Tensor | None = None
        # What state k + 1, where it contains state k, adds to the gradient of state k.
        self._carried: Tensor | None = None
        # The lowest state that a gradient has overwritten.
        self._overwritten = self.rows + 1
        self.own_norms: Sequence[OutNorm | None] = (None,) * self.rows
        """The connection's own norm behind each row (post-norm), in the compute dtype."""
        self.own_norm_grads: list[tuple] = [(None, None)] * self.rows
        """Where the gradients of their weights and biases go, (D,) each."""
        self.begin(y.numel() // y.shape[-1])

    # ---- what a subclass has -------------------------------------------------------------------

    @abc.abstractmethod
    def begin(self, tokens: int) -> None:
        """Makes the subclass's own buffers."""

    @abc.abstractmethod
    def forward_weights(self, k: int, partial: Tensor | None) -> dict[str, Any]:
        """Operands of boundary k's forward: those that weigh the states."""

    @abc.abstractmethod
    def backward_weights(self, k: int, dout: Tensor | None) -> dict[str, Any]:
        """Operands of its backward: the same, their gradients, and the partial sum if row k is
        computed again."""

    @abc.abstractmethod
    def mix_weights(self) -> dict[str, Any]:
        """Operands of the pass over earlier states."""

    @abc.abstractmethod
    def pull_weights(self) -> dict[str, Any]:
        """Operands of the pass over the gradients of later rows."""

    @abc.abstractmethod
    def begin_grads(self) -> None:
        """Called where backward begins: sets the gradients of the parameters to 0."""

    @abc.abstractmethod
    def take_grads(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the parameters and keeps none."""

    # ---- forward -------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return total_bytes(self.states, self.partial_sums.sums, self.pulled_sums.sums)

    @property
    def any_learns(self) -> bool:
        """Whether a parameter of the pass needs a gradient."""
        return any(self.learns)

    @property
    def released(self) -> bool:
        """Whether the states are freed."""
        return self.pushed > 0 and self.states is None

    def forward(self, push: Push) -> None:
        """Stores state k of a push and computes row k, or the row alone where it is recomputed."""
        k = push.k
        if not push.recomputed:
            if self.states is None or self.task is not None:
                self._open(push)
            self.pushed = k + 1
            if self.continues[k]:
                before = self.states[k - 1]
                push.residual = before if push.residual is None else push.residual + before
        partial, norm = self.partial(k), push.norm or NO_NORM
        mean, rstd = self._statistics(push)
        self.launch.forward(
            branch=push.branch,
            residual=push.residual,
            dropout_p=push.dropout_p,
            seed=push.seed,
            states=self.states,
            k=k,
            near=self.schedule.near[k],
            partial=partial,
            x=push.x,
            out_norm_weight=norm.weight,
            out_norm_bias=norm.bias,
            out_eps=norm.eps,
            out_rms=norm.rms,
            out=push.out,
            out_mean=mean,
            out_rstd=rstd,
            **self.forward_weights(k, partial),
        )

    def _open(self, push: Push) -> None:
        """Makes room for the states with the first push, and refuses one after a backward pass
        that has overwritten states."""
        if self.released or self._overwritten <= self.rows:
            raise RuntimeError(
                "DepthHistory: a backward pass has overwritten states, so no further state can be "
                "pushed; use DepthHistory(inplace=False), or a new history"
            )
        if self.states is None:
            # In place g_l is stored in slot l + 1, so the last row needs one more slot.
            self.states = empty_slots(self.rows + self.inplace, push.branch)
            if push.branch.device.type == "cpu" and backend.compiled():
                # Any backend's states gain from large pages.
                torch.ops.deepfast.advise_states(self.states)

    def norm_behind(self, k: int, out_norm: OutNorm | None) -> OutNorm | None:
        """The norm behind row k, in the compute dtype: the connection's own, or else the given."""
        if out_norm is None:
            return self.own_norms[k]
        weight, bias, eps, rms = out_norm
        dtype = self.like.dtype
        return OutNorm(parameter(weight, dtype), parameter(bias, dtype), eps, rms)

    def _statistics(self, push: Push) -> tuple[Tensor | None, Tensor | None]:
        """Mean and 1 / standard deviation (T,) of the norm behind the row."""
        norm = push.norm
        if norm is None:
            return None, None
        if self._out_rstd is None:
            self._out_rstd = numbers_of_rows(self.like, self.rows, self.states.shape[1])
        if norm.rms:
            return None, self._out_rstd[push.k]
        if self._out_mean is None:
            self._out_mean = numbers_of_rows(self.like, self.rows, self.states.shape[1])
        return self._out_mean[push.k], self._out_rstd[push.k]

    def partial(self, row: int) -> Tensor | None:
        """P_row, the sum over the states before row's block; None in the first block.

        The first call for a block computes the partial sums of all its rows.
        """
        (start, end), partial_sums = self.schedule.blocks[row], self.partial_sums
        if partial_sums.start != start:
            block, passes = range(start, end), self.schedule.far_reads(start, end)
            for far, sums in partial_sums.passes_into(
                block, self.schedule.block, passes, self.states[0]
            ):
                self.launch.mix(
                    states=self.states,
                    sources=far.sources,
                    rows=far.targets,
                    **sums,
                    **self.mix_weights(),
                )
        return partial_sums.of_target[row - start]

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

    def end_forward(self) -> None:
        """Called after the last push. If nothing requires a gradient, no state is read again."""
        self.partial_sums.clear()
        if not self.learning or self.lowest == self.rows:
            self.release()

    def release(self) -> None:
        """Frees the states and everything else that grows with the number of tokens."""
        self.partial_sums.clear()
        self.pulled_sums.clear()
        self.states = self.grads = self._out_mean = self._out_rstd = self._carried = None

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
        if self.released or self._overwritten <= k:
            raise RuntimeError(OVERWRITTEN)

    def enter(self, k: int, task: int) -> None:
        """Called when backward reaches boundary k in the graph task ``task``."""
        self.check_task(task)
        self.check_readable(k)
        if task != self.task:
            # Discards what an earlier backward pass has left.
            self.task, self.top, self.pulled_sums.start, self._carried = task, k, -1, None
            self.begin_grads()
        if self.grads is None:
            self.grads = self.states if self.inplace else empty_slots(self.rows, self.states[0])

    def _far_pull(self, k: int) -> Tensor | None:
        """Q_k, what the rows after k's block add to dz_k; None where no such row has a gradient.

        The first call for a block computes it for all its states, with their part of dW.
        """
        (start, end), pulled_sums = self.schedule.blocks[k], self.pulled_sums
        if end == self.rows:
            return None
        if pulled_sums.start != start:
            # Backward may have started inside this block. Then it reaches no state after k.
            block, size = range(start, k + 1), self.schedule.block
            passes = self.schedule.far_readers(start, k + 1, range(end, self.top + 1))
            for far, sums in pulled_sums.passes_into(block, size, passes, self.states[0]):
                # The launch calls the states, whose sums it writes, its sources.
                self.launch.pull(
                    grads=self.grads,
                    grad_slots=[row + self.inplace for row in far.sources],
                    rows=far.sources,
                    states=self.states,
                    sources=far.targets,
                    **sums,
                    **self.pull_weights(),
                )
        return pulled_sums.of_target[k - start]

    def backward(self, push: Push) -> None:
        """Boundary k: stores g_k and writes the gradients of what was pushed, and of the norm."""
        k, carried = push.k, self._carried
        pulled, self._carried = self._far_pull(k), None
        if carried is not None:
            pulled = carried.to(self.like.dtype) if pulled is None else pulled.add_(carried)
        dresidual = push.dresidual
        if self.continues[k]:
            # A tensor of its own, because callers may modify the gradients that they get.
            dresidual = self._carried = torch.empty_like(self.states[k])
        readers = self.schedule.near_readers(k, self.top)
        norm = push.norm or NO_NORM
        mean, rstd = self._statistics(push)
        self.launch.backward(
            states=self.states,
            k=k,
            near=self.schedule.near[k],
            out_norm_weight=norm.weight,
            out_norm_bias=norm.bias,
            out_rms=norm.rms,
            out_mean=mean,
            out_rstd=rstd,
            dropout_p=push.dropout_p,
            seed=push.seed,
            dx=push.dx,
            dout=push.dout,
            grads=self.grads,
            grad_slot=k + self.inplace,
            pull_rows=readers,
            pull_slots=[row + self.inplace for row in readers],
            pulled=pulled,
            dbranch=push.dbranch,
            dresidual=dresidual,
            dout_norm_weight=push.dnorm[0],
            dout_norm_bias=push.dnorm[1],
            **self.backward_weights(k, push.dout),
        )
        if self.continues[k] and push.dresidual is not None:
            push.dresidual.copy_(dresidual)
        if self.inplace:
            # This boundary was the last to read state k: its slot is free for g_{k-1}.
            self._overwritten = k
        if k == self.lowest and not self.needed_below:
            self.partial_sums.clear()
            self.pulled_sums.clear()
            if self.inplace:
                self.release()
