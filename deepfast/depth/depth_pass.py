"""One forward and backward pass of a stack: its states, partial sums and gradients.

A state is one (T, D) tensor in a slot; the picture in `deepfast.depth` shows which.
Nothing here knows autograd. Its nodes, in boundary.py, call the methods of `DepthPass` in order.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepfast import backend
from deepfast.depth.schedule import FarPass, Schedule, one_for_all
from deepfast.dtypes import compute_dtype
from deepfast.ops.common import empty_slots, parameter
from deepfast.ops.graph_launches import graph_launches

OVERWRITTEN = (
    "DepthHistory: a second backward through one forward pass needs its states, and gradients "
    "have overwritten them; use DepthHistory(inplace=False) or deepfast.connect(..., "
    "inplace=False), or, where a stack such as TransformerEncoder makes the history, run its "
    "forward again"
)


class OutNorm(NamedTuple):
    """The norm applied to a boundary's output: weight and bias, each (D,) or None, and eps; ``rms``
    makes it an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


class Push:
    """One push, from `DepthConnection.forward` to the kernels and back: ``y_k = residual +
    dropout(branch)`` becomes state k, and row k and the norm behind it are computed.

    Tensors are (T, D) once the push is in a pass. The push has them only while it runs, because
    autograd keeps it until backward.
    """

    depth_pass: "DepthPass"
    k: int
    recomputed = False
    """Whether state k is there already, and the results are computed again from the states."""
    norm: OutNorm | None = None
    """The norm behind row k, in the compute dtype: the connection's own, or else ``out_norm``."""
    x: Tensor | None = None
    """The results: the row, and its norm."""
    out: Tensor | None = None
    dx: Tensor | None = None
    """The gradients of the results, and those that backward writes."""
    dout: Tensor | None = None
    dbranch: Tensor | None = None
    dresidual: Tensor | None = None
    dnorm: tuple[Tensor | None, Tensor | None] = (None, None)

    def __init__(
        self, branch: Tensor | None, residual: Tensor | None = None, *, index: int | None = None,
        dropout_p: float = 0.0, seed: int | Tensor | None = None, out_norm: OutNorm | None = None,
        return_x: bool = True,
    ):  # fmt: skip
        self.branch, self.residual, self.index = branch, residual, index
        self.dropout_p, self.seed = dropout_p, seed
        self.out_norm, self.return_x = out_norm, return_x

    def clear(self) -> None:
        """Keeps no tensor but the seed."""
        self.branch = self.residual = self.norm = self.x = self.out = None
        self.dx = self.dout = self.dbranch = self.dresidual = None
        self.dnorm = None, None


class BlockSums:
    """The sums of one block of rows or states, in a buffer that the next block uses again."""

    sums: Tensor | None = None
    """(B, T, D), in the compute dtype: a sum is rounded when its row is, and not before."""
    start = -1
    """The first row or state; -1 for no block."""
    of_target: Sequence[Tensor | None] = ()
    """Each sum (T, D); None where the block has none."""

    def compute(
        self, start: int, count: int, passes: Sequence[FarPass], block: int, like: Tensor,
        launch: Callable[..., None],
    ) -> None:  # fmt: skip
        """Computes the sums of ``count`` targets by ``launch``, which takes operands by name.

        like: a state, (T, D).
        """
        self.start = start
        if not passes:
            self.of_target = (None,) * block
            return
        if self.sums is None:
            self.sums = empty_slots(block, like, compute_dtype(like.dtype))
        self.of_target = self.sums.unbind(0)
        add = not one_for_all(passes, count)
        if add:
            self.sums[:count].zero_()
        for far in passes:
            launch(far, out=self.sums, out_rows=far.entries, accumulate=add)

    def clear(self) -> None:
        self.sums, self.of_target, self.start = None, (), -1


def numbers_of_rows(like: Tensor, rows: int, tokens: int) -> Sequence[Tensor]:
    """Room for a number of each token, (T,) for each row, in the dtype of ``like``."""
    if isinstance(tokens, torch.SymInt):
        # Inductor of torch 2.13 loses the offset of a view that a launch writes where the offset is
        # a multiple of a size that it does not know.
        return [like.new_empty(tokens) for _ in range(rows)]
    return like.new_empty(rows, tokens).unbind(0)


class DepthPass(abc.ABC):
    """The buffers of one forward pass of a connection, and of its backward.

    Each connection has a subclass beside it, which knows how a row weighs the states. Its methods
    that launch a kernel get the operands that all connections share, by their names in
    `deepfast.launches`, and add those of the weights.

    Args:
        owner: the connection.
        push: the first one.
        schedule: which row reads which state when.
        inplace: whether gradients overwrite states.
        parameters: what the states are weighed with; `take_grads` returns their gradients.
    """

    op: str
    """The name of its launches in `deepfast.backend`."""
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
        """Of every state that is pushed."""
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
        name, self.launch = backend.choose(self.op, owner.backend, y.device, y.dtype, y.shape[-1])
        if name != "cpu" and torch._guards.TracingContext.try_get():
            self.launch = graph_launches(self.op, owner.backend)
        self.rows = schedule.rows
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
        self.grads: Tensor | None = None
        # What state k + 1, where it contains state k, adds to the gradient of state k.
        self._carried: Tensor | None = None
        # The lowest state that a gradient has overwritten.
        self._overwritten = self.rows + 1
        self.begin(y.numel() // y.shape[-1])

    # ---- what a subclass has -------------------------------------------------------------------

    @abc.abstractmethod
    def begin(self, tokens: int) -> None:
        """Makes the subclass's own buffers."""

    @abc.abstractmethod
    def mix(self, **operands) -> None:
        """Writes what earlier states add to rows of a block, or adds it to what is there."""

    @abc.abstractmethod
    def boundary_forward(self, k: int, partial: Tensor | None, **operands) -> None:
        """Stores what is pushed as state k, and computes row k and the norm behind it."""

    @abc.abstractmethod
    def pull(self, **operands) -> None:
        """Writes what later rows add to the gradients of states of a block, or adds it to what is
        there, and computes the part of dW that goes with it."""

    @abc.abstractmethod
    def boundary_backward(self, k: int, dout: Tensor | None, **operands) -> None:
        """Stores g_k, and computes the gradient of what was pushed as state k."""

    @abc.abstractmethod
    def begin_grads(self) -> None:
        """Called where backward begins: sets the gradients of the parameters to 0."""

    @abc.abstractmethod
    def take_grads(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the parameters and keeps none."""

    def own_norm(self, k: int) -> OutNorm | None:
        """The connection's own norm behind row k (post-norm), in the compute dtype."""
        return None

    def norm_behind(self, k: int, out_norm: OutNorm | None) -> OutNorm | None:
        """The norm behind row k, in the compute dtype: the connection's own, or else the given."""
        if out_norm is None:
            return self.own_norm(k)
        weight, bias, eps, rms = out_norm
        dtype = self.like.dtype
        return OutNorm(parameter(weight, dtype), parameter(bias, dtype), eps, rms)

    def own_norm_grads(self, k: int) -> tuple[Tensor | None, Tensor | None]:
        """Where the gradients of that norm's weight and bias go, (D,) each."""
        return None, None

    # ---- forward -------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return total_bytes(self.states, self.partial_sums.sums, self.pulled_sums.sums)

    @property
    def any_learns(self) -> bool:
        """Whether the pass has gradients that belong to no state."""
        return any(self.learns)

    @property
    def released(self) -> bool:
        """Whether the states are freed."""
        return self.pushed > 0 and self.states is None

    def forward(self, push: Push) -> None:
        """Stores state k of a push and computes row k, or the row alone where it is recomputed."""
        k = push.k
        if not push.recomputed:
            self._open_slot(push)
        norm = push.norm
        self.boundary_forward(
            partial=self.partial(k), branch=push.branch, residual=push.residual, x=push.x,
            out=push.out, out_eps=0.0 if norm is None else norm.eps, **self._of_row(push),
        )  # fmt: skip

    def _open_slot(self, push: Push) -> None:
        """Makes room for the state of the next push."""
        k = push.k
        if self.released or (self.task is not None and self._overwritten <= self.rows):
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
        self.pushed = k + 1
        if self.owner.running[k]:
            before = self.states[k - 1]
            push.residual = before if push.residual is None else push.residual + before

    def _of_row(self, push: Push) -> dict[str, Any]:
        """The operands that both kernels of a boundary have."""
        k, norm, mean, rstd = push.k, push.norm or NO_NORM, None, None
        if push.norm is not None:
            if self._out_rstd is None:
                self._out_rstd = numbers_of_rows(self.like, self.rows, self.states.shape[1])
            if self._out_mean is None and not norm.rms:
                self._out_mean = numbers_of_rows(self.like, self.rows, self.states.shape[1])
            mean, rstd = None if norm.rms else self._out_mean[k], self._out_rstd[k]
        return {
            "states": self.states,
            "k": k,
            "near": self.schedule.near[k],
            "dropout_p": push.dropout_p,
            "seed": push.seed,
            "out_norm_weight": norm.weight,
            "out_norm_bias": norm.bias,
            "out_rms": norm.rms,
            "out_mean": mean,
            "out_rstd": rstd,
        }

    def partial(self, row: int) -> Tensor | None:
        """P_row, the sum over the states before row's block; None in the first block.

        The first call for a block computes the partial sums of all its rows.
        """
        (start, end), partial_sums = self.schedule.blocks[row], self.partial_sums
        if partial_sums.start != start:
            passes, block = self.schedule.far_reads(start, end), self.schedule.block
            partial_sums.compute(start, end - start, passes, block, self.states[0], self._mix)
        return partial_sums.of_target[row - start]

    def _mix(self, far: FarPass, **sums) -> None:
        self.mix(states=self.states, sources=far.sources, rows=far.targets, **sums)

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

    def _slots(self, rows: Sequence[int]) -> list[int]:
        """Where the gradients of these rows are. In place g_l is in the slot of z_{l+1}."""
        return [row + self.inplace for row in rows]

    def _far_pull(self, k: int) -> Tensor | None:
        """Q_k, what the rows after k's block add to dz_k; None where no such row has a gradient.

        The first call for a block computes it for all its states, with their part of dW.
        """
        (start, end), pulled_sums = self.schedule.blocks[k], self.pulled_sums
        if end == self.rows:
            return None
        if pulled_sums.start != start:
            # Backward may have started inside this block. Then it reaches no state after k.
            passes = self.schedule.far_readers(start, k + 1, range(end, self.top + 1))
            count, block = k + 1 - start, self.schedule.block
            pulled_sums.compute(start, count, passes, block, self.states[0], self._pull)
        return pulled_sums.of_target[k - start]

    def _pull(self, far: FarPass, **sums) -> None:
        self.pull(
            grads=self.grads, grad_slots=self._slots(far.sources), rows=far.sources,
            states=self.states, sources=far.targets, **sums,
        )  # fmt: skip

    def backward(self, push: Push) -> None:
        """Boundary k: stores g_k and writes the gradients of what was pushed, and of the norm."""
        k, carried = push.k, self._carried
        pulled, self._carried = self._far_pull(k), None
        if carried is not None:
            pulled = carried.to(self.like.dtype) if pulled is None else pulled.add_(carried)
        running, dresidual = self.owner.running[k], push.dresidual
        if running:
            # A tensor of its own, because callers may modify the gradients that they get.
            dresidual = self._carried = torch.empty_like(self.states[k])
        near = self.schedule.near_readers(k, self.top)
        dnorm_weight, dnorm_bias = push.dnorm
        self.boundary_backward(
            dx=push.dx, dout=push.dout, grads=self.grads, grad_slot=k + self.inplace,
            pull_rows=near, pull_slots=self._slots(near), pulled=pulled, dbranch=push.dbranch,
            dresidual=dresidual, dout_norm_weight=dnorm_weight, dout_norm_bias=dnorm_bias,
            **self._of_row(push),
        )  # fmt: skip
        if running and push.dresidual is not None:
            push.dresidual.copy_(dresidual)
        if self.inplace:
            # This boundary was the last to read state k: its slot is free for g_{k-1}.
            self._overwritten = k
        if k == self.lowest and not self.needed_below:
            self.partial_sums.clear()
            self.pulled_sums.clear()
            if self.inplace:
                self.release()


NO_NORM = OutNorm(None, None, 0.0)


def total_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
