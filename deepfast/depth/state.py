"""What one forward pass remembers for its backward pass: states, gradients and partial sums.

A state is one (T, D) tensor in a slot. Where sources have layer-norms the slot holds the normalised
output n_k of layer k, and the kernels compute ``z_k = norm_weight[k] n_k + norm_bias[k]`` when they
read it. Elsewhere it holds the output itself. The picture in `deepfast.depth` shows what a slot
holds when. What a pass computes from the states is behind ``weights``. Nothing here knows autograd;
its nodes, in `deepfast.depth.boundary`, call these methods in order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepfast import backend
from deepfast.depth.outside import Begun
from deepfast.depth.schedule import Schedule
from deepfast.depth.slots import BlockSums, Share, empty_slots, sum_shares
from deepfast.depth.weights import AttentionWeights, ConstantWeights

OVERWRITTEN = (
    "DepthHistory: a second backward through one forward pass needs its states, and gradients "
    "have overwritten them; use DepthHistory(inplace=False) or deepfast.connect(..., "
    "inplace=False), or, where a stack such as TransformerEncoder makes the history, run its "
    "forward again"
)


@dataclass(kw_only=True, eq=False)
class DepthState:
    """The buffers and the bookkeeping of one forward pass of a `DepthConnection`."""

    owner: Any
    """The connection."""
    weights: ConstantWeights | AttentionWeights
    """How a row weighs the states."""
    running: tuple[bool, ...]
    """Whether state k is what is pushed plus state k - 1."""
    norm_weight: Tensor | None
    """(L+1, D), compute dtype; row k scales state k. None: states have no layer-norm weights."""
    norm_bias: Tensor | None
    """None with ``rms`` too."""
    norm_source: tuple[bool, ...]
    """Whether state k is stored normalised."""
    out_norm_weight: Tensor | None
    """(L+1, D), compute dtype; row l belongs to the layer-norm of row l's result."""
    out_norm_bias: Tensor | None
    norm_out: tuple[bool, ...]
    """Whether row l's result passes through a layer-norm of this stack."""
    eps: float
    """Added to the variance in all these layer-norms."""
    rms: bool
    """Whether they are RMS norms, which subtract no mean and have no bias."""
    schedule: Schedule
    inplace: bool
    """Whether gradients overwrite states."""
    need_norm_grad: bool
    begun: Begun | None = None
    """What rows begin with in a stage of a pipeline."""

    def __post_init__(self):
        self.rows = len(self.running)
        # After the last state come rows that other stages go on with.
        self.later = tuple(range(self.rows, len(self.schedule.reads)))
        self.later_grads: Tensor | None = None
        self.near = self.schedule.near.__getitem__
        self.pushed = 0
        self.states: Tensor | None = None
        self.source_rstd: list[Tensor | None] = [None] * self.rows
        self._out_mean: tuple[Tensor, ...] | None = None
        self._out_rstd: tuple[Tensor, ...] | None = None
        self._seeds: tuple[Tensor, ...] | None = None
        self._seeds_drawn_by = -1
        self._ahead = BlockSums(self.schedule.block)
        # The lowest boundary with an autograd node. Backward reaches it last.
        self.lowest = self.rows
        # Whether checkpointing may read a state below that one.
        self.needed_below = False
        # Backward: the graph task that is running, and the rows whose gradient it has stored.
        self.task: int | None = None
        self._live: set[int] = set()
        self.grads: Tensor | None = None
        self.dnorm_weight: Tensor | None = None
        self.dnorm_bias: Tensor | None = None
        self._pulled = BlockSums(self.schedule.block)
        # What state k + 1, where it contains state k, adds to the gradient of state k.
        self.carried: Tensor | None = None
        # Which states gradients have overwritten, and whether the whole buffer is freed.
        self._overwritten = [False] * self.rows
        self.released = False

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        buffers = (self.states, self._ahead.sums, self._pulled.sums)
        sizes = (b.numel() * b.element_size() for b in buffers if b is not None)
        return sum(sizes) + self.weights.nbytes

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
            self.states = empty_slots(self.rows + 1 if self.inplace else self.rows, y)
            if any(self.norm_source):
                self.source_rstd = list(self.weights.new_empty(self.rows, y.shape[0]).unbind(0))
            self.weights.begin(y.shape[0])
            if y.device.type == "cpu" and backend.compiled():
                # Any backend's states gain from large pages.
                torch.ops.deepfast.advise_states(self.states)
        self.pushed = k + 1

    def partial(self, row: int) -> Tensor | None:
        """P_row, the sum over the states before row's block; None in the first block.

        The first call for a block computes the partial sums of all its rows.
        """
        start, end = self.schedule.blocks[row]
        if self._ahead.start != start:
            begin = self._begin if self.begun is not None and self.begun.any(start, end) else None
            shares = self._mixes(start, end)
            if not shares and begin is None:
                return None
            self.weights.begin_mix(self.schedule.block)
            self._ahead.compute(start, end, shares, self.states[0], begin)
        return self._ahead.sums[row - start]

    def _mixes(self, start: int, end: int) -> list[Share]:
        """The passes over earlier states for the rows [start, end)."""
        launch = functools.partial(self.weights.mix, self)
        return [Share(*group, launch) for group in self.schedule.far_reads(start, end).items()]

    def _begin(self, sums: Tensor, start: int, end: int) -> None:
        self.begun.fill(sums, self.weights.far_stats, start, end)

    def later_rows(self) -> tuple[Tensor, Tensor | None]:
        """The rows after the last state, (R, T, D), and their lse (R, T)."""
        self._ahead.clear()
        like, block = self.states[0], self.schedule.block
        out, lse = like.new_empty(len(self.later), *like.shape), []
        begin = None if self.begun is None else self._begin
        for start in range(self.rows, self.rows + len(self.later), block):
            end = min(start + block, self.rows + len(self.later))
            sums = out[start - self.rows : end - self.rows]
            self.weights.begin_mix(block)
            sum_shares(sums, start, end, self._mixes(start, end), begin)
            lse.append(self.weights.lse(end - start))
        return out, None if lse[0] is None else torch.cat(lse)

    def seed(self, k: int) -> Tensor:
        """The seed of the dropout before state k.

        The first call draws the seeds of all boundaries from the device's generator. When that
        boundary is recomputed, it draws again, so that the generator advances as in forward.
        """
        if self._seeds is None or self._seeds_drawn_by == k:
            seeds = torch.randint(2**62, (self.rows,), device=self.weights.device)
            if self.owner.shards is not None:
                self.owner.shards.agree(seeds)
            if self._seeds is None:
                self._seeds, self._seeds_drawn_by = seeds.unbind(0), k
        return self._seeds[k]

    def out_parameters(self, row: int) -> tuple[Tensor, Tensor | None]:
        """(D,) weight and bias of the stack's norm on row's result."""
        bias = None if self.out_norm_bias is None else self.out_norm_bias[row]
        return self.out_norm_weight[row], bias

    def out_statistics(self, row: int, rms: bool = False) -> tuple[Tensor | None, Tensor]:
        """(T,) mean and rstd of the norm on row's result; an RMS norm has no mean."""
        tokens = self.states.shape[1]
        if self._out_rstd is None:
            self._out_rstd = self.weights.new_empty(self.rows, tokens).unbind(0)
        if self._out_mean is None and not rms:
            self._out_mean = self.weights.new_empty(self.rows, tokens).unbind(0)
        return None if rms else self._out_mean[row], self._out_rstd[row]

    def token_grad(self, k: int) -> bool:
        """Whether the token that boundary k took requires a gradient."""
        return self.any_learns or k > self.lowest

    @property
    def any_learns(self) -> bool:
        """Whether the pass has gradients that belong to no state."""
        begun = self.begun is not None and self.begun.learns
        return self.weights.learns or self.need_norm_grad or begun

    def check_readable(self, k: int) -> None:
        """Raises where row k cannot be recomputed: a gradient has overwritten a state up to k."""
        if self.released or any(self._overwritten[: k + 1]):
            raise RuntimeError(OVERWRITTEN)

    def end_forward(self, learning: bool) -> None:
        """Called after the last push. Where nothing learns no state is read again."""
        self._ahead.clear()
        if not learning or self.lowest == self.rows:
            self.release()

    def release(self) -> None:
        """Frees the states and everything else that grows with the number of tokens."""
        self._ahead.clear()
        self._pulled.clear()
        self.weights.release()
        self.states = self.grads = self._out_mean = self._out_rstd = self.carried = None
        self.later_grads = None
        self.source_rstd = [None] * self.rows
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

    def enter_later(
        self, task: int, out: Tensor | None, lse: Tensor | None, g: Tensor, dlse: Tensor | None
    ) -> None:
        """Called when backward reaches the rows after the last state, with their gradients.

        g, dlse: shaped like the results of `later_rows`; backward reads g until it ends.
        """
        self._enter_task(task, self.rows - 1)
        self.later_grads = g
        self.weights.end_later(self.rows, out, lse, g, dlse)
        if self.begun is not None:
            for row in self.later:
                self._add_begun(row, g[row - self.rows])

    def _enter_task(self, task: int, k: int) -> None:
        """Called where backward begins or goes on at state k."""
        self.check_task(task)
        new = task != self.task
        # A new backward pass recomputes rows, and reads all the states below them.
        if self.released or self._overwritten[k] or (new and any(self._overwritten[:k])):
            raise RuntimeError(OVERWRITTEN)
        if new:
            # Discards what an earlier backward pass has left.
            self.task, self._pulled.start, self.carried = task, -1, None
            self.later_grads = None
            self._live.clear()
            self.take_parameter_grads()

    def _add_begun(self, row: int, g: Tensor) -> None:
        stats = self.weights.stats
        self.begun.add_grad(row, g, None if stats is None else stats[row])

    def enter(self, k: int, task: int) -> None:
        """Called when backward reaches boundary k in the graph task ``task``."""
        self._enter_task(task, k)
        if self.grads is None:
            self.grads = self.states if self.inplace else empty_slots(self.rows, self.states[0])
        self.weights.begin_grads()
        if self.dnorm_weight is None and self.need_norm_grad:
            shape = self.weights.rows, self.states.shape[2]
            self.dnorm_weight = self.weights.new_empty(*shape).zero_()
            self.dnorm_bias = None if self.rms else torch.zeros_like(self.dnorm_weight)

    def grad_slot(self, row: int) -> int:
        """Where g_row is stored in ``grads``."""
        return row + 1 if self.inplace else row

    def far_pull(self, k: int) -> Tensor | None:
        """Q_k, what the rows after k's block add to dz_k; None where no such row has a gradient.

        The first call for a block computes it for all its states, with their part of dW.
        """
        start, end = self.schedule.blocks[k]
        if end == self.rows and self.later_grads is None:
            return None
        if self._pulled.start != start:
            live = tuple(r for r in range(end, self.rows) if r in self._live)
            # Backward may have started inside this block. Then it reaches no state after k.
            shares = self._pulls(start, k + 1, live, self.grads, self.grad_slot)
            if self.later_grads is not None:
                shares += self._pulls(
                    start, k + 1, self.later, self.later_grads, lambda row: row - self.rows
                )
            if not shares:
                return None
            self._pulled.compute(start, k + 1, shares, self.states[0])
        return self._pulled.sums[k - start]

    def _pulls(
        self, start: int, stop: int, rows: tuple[int, ...], grads: Tensor, slot: Callable
    ) -> list[Share]:
        """The passes over the gradients of ``rows`` for the states [start, stop)."""
        launch = functools.partial(self.weights.pull, self, grads, slot)
        groups = self.schedule.far_readers(start, stop, rows)
        return [Share(*group, launch) for group in groups.items()]

    def pulled(self, k: int) -> Tensor | None:
        """What boundaries after k's block, and state k + 1 where it contains state k, add to dz_k;
        None where that is nothing."""
        far, carried, self.carried = self.far_pull(k), self.carried, None
        if far is None or carried is None:
            return carried if far is None else far
        return far.add_(carried)

    def near_pull(self, k: int) -> list[int]:
        """Rows of k's own block that have a gradient and read state k; row k comes first."""
        _, end = self.schedule.blocks[k]
        reads = self.schedule.reads
        return [r for r in range(k, end) if (r == k or r in self._live) and k in reads[r]]

    def norm_grads(
        self, k: int, has_out: bool, need_weight: bool, need_bias: bool
    ) -> tuple[Tensor | None, ...]:
        """Where boundary k writes dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias."""
        rows: tuple[Tensor | None, ...] = None, None
        if self.need_norm_grad and (self.norm_source[k] or self.norm_out[k]):
            rows = self.dnorm_weight[k], None if self.rms else self.dnorm_bias[k]
        if self.norm_out[k]:
            return (None, None, *(rows if has_out else (None, None)))
        fresh = self.weights.new_empty(self.states.shape[2]) if has_out else None
        return (
            *rows,
            fresh if need_weight else None,
            None if fresh is None or not need_bias else torch.empty_like(fresh),
        )

    def leave(self, k: int) -> None:
        """Called after boundary k has stored g_k, in place over state k + 1."""
        self._live.add(k)
        if self.begun is not None:
            self._add_begun(k, self.grads[self.grad_slot(k)])
        if self.inplace:
            # This boundary was the last to read state k: its slot is free for g_{k-1}.
            self._overwritten[k] = True
            if k + 1 < self.rows:
                self._overwritten[k + 1] = True
            self.source_rstd[k] = None
        if k == self.lowest and not self.needed_below:
            self._ahead.clear()
            self._pulled.clear()
            if self.inplace:
                self.release()

    def take_parameter_grads(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the weights, norm weights and norm biases, and of what rows
        begin with, and keeps none."""
        begun = (None, None) if self.begun is None else self.begun.take_grads()
        grads = *self.weights.take_grads(), self.dnorm_weight, self.dnorm_bias, *begun
        self.dnorm_weight = self.dnorm_bias = None
        return grads
