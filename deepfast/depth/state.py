"""The engine behind DLCL: the states of one forward pass and the schedule of reads over them.

Three ideas keep memory linear in depth and traffic near L * sqrt(L):

look-ahead   Rows are taken in blocks of B. When a block [s, e) starts, one pass over the states
             before s makes the partial sums ``P_l = sum_{k<s} W[l,k] z_k`` of all its rows; each
             row then adds only its own block's states.
pull         Backward keeps every row's gradient g_l. When it reaches state k it computes
             ``dz_k = sum_{l>=k} W[l,k] g_l`` once, a block's share of later rows in one pass,
             with ``dW[l,k] = <g_l, z_k>`` from the same tiles. No read-modify-write, no atomics.
in place     State z_{l+1} is dead when g_l is born, so g_l takes its slot.

A state is one (T, D) tensor: the normalised output n_k of layer k where sources are normalised
(gain and shift are applied while mixing), the output itself elsewhere. This module knows no
autograd; `deepfast.depth.boundary` does.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from deepfast.depth.schedule import Schedule


def empty_slots(count: int, like: Tensor) -> Tensor:
    """(count, T, D) for tensors like ``like`` (T, D), neighbouring slots one cache line apart.

    A distance of a whole number of pages would put the same element of every slot into the same
    few cache sets.
    """
    line = 64 // like.element_size()
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride)[:, : like.numel()].unflatten(1, like.shape)


@dataclass(kw_only=True, eq=False)
class DepthState:
    """States, gradients and partial sums of one forward pass."""

    weight: Tensor
    """(L+1, L+1) or (L+1, L+1, D), compute dtype, zero outside the pattern."""
    gain: Tensor | None
    """(L+1, D), compute dtype; row k scales state k. None: states are mixed as they are."""
    shift: Tensor | None
    normalised: tuple[bool, ...]
    """Whether state k is stored normalised."""
    schedule: Schedule
    eps: float
    inplace: bool
    launch: SimpleNamespace
    own_norms: tuple[bool, ...]
    """Whether row l's result passes through a norm of its own, ``own_weight[l]``."""
    own_weight: Tensor | None = None
    own_bias: Tensor | None = None
    need_weight_grad: bool = True
    need_norm_grad: bool = True

    def __post_init__(self):
        self.rows = self.weight.shape[0]
        self.near = self.schedule.near.__getitem__
        self.pushed = 0
        self.states: Tensor | None = None
        self.grads: Tensor | None = None
        self.dweight: Tensor | None = None
        self.dgain: Tensor | None = None
        self.dshift: Tensor | None = None
        self.rstd: list[Tensor | None] = [None] * self.rows
        self._out_statistics: tuple[Tensor, ...] | None = None
        self._seeds: tuple[Tensor, ...] | None = None
        self._drawer = -1
        self._partial: Tensor | None = None
        self._partial_block = -1
        self._pulled: Tensor | None = None
        self._pulled_block = -1
        self._task = None
        self._live: set[int] = set()
        self._consumed = [False] * self.rows
        self.released = False
        # The last boundary that backward will reach.
        self.lowest = self.rows

    # ---- forward -------------------------------------------------------------------------------

    def seed(self, k: int) -> Tensor:
        """Of the dropout in front of state k. All are drawn at once from the device's generator,
        by the first boundary that asks; asking again, it draws again, so that recomputation
        leaves the generator where the first run left it."""
        if self._seeds is None or self._drawer == k:
            seeds = torch.randint(2**62, (self.rows,), device=self.weight.device)
            if self._seeds is None:
                self._seeds, self._drawer = seeds.unbind(0), k
        return self._seeds[k]

    def out_statistics(self, row: int) -> tuple[Tensor, Tensor]:
        """(T,) mean and rstd of the norm applied to row's result; made again they are the same."""
        if self._out_statistics is None:
            tokens = self.states.shape[1]
            self._out_statistics = self.weight.new_empty(2 * self.rows, tokens).unbind(0)
        return self._out_statistics[row], self._out_statistics[self.rows + row]

    def own_norm(self, row: int) -> tuple[Tensor, Tensor]:
        return self.own_weight[row], self.own_bias[row]

    def open_slot(self, k: int, y: Tensor) -> None:
        """Makes room for state k, shaped like y (T, D)."""
        if self.released or (self._task is not None and any(self._consumed)):
            raise RuntimeError(
                "DepthHistory: a backward pass has taken the states' slots, so no further state "
                "can be pushed; use DepthHistory(inplace=False), or a new history"
            )
        if self.states is None:
            # Slot l + 1 takes g_l when it is born, so the last row's gradient needs one more.
            slots = self.rows + 1 if self.inplace else self.rows
            self.states = empty_slots(slots, y)
            if any(self.normalised):
                self.rstd = list(self.weight.new_empty(self.rows, y.shape[0]).unbind(0))
            self.launch.advise_states(self.states)
        self.pushed = k + 1

    def partial(self, row: int) -> Tensor | None:
        """P_row, made for the whole block when its first row asks; None in the first block."""
        start, end = self.schedule.blocks[row]
        if self._partial_block != start:
            groups = self.schedule.far_reads(start, end)
            if not groups:
                return None
            if self._partial is None:
                self._partial = empty_slots(self.schedule.block, self.states[0])
            self._launch_groups(
                groups, self._partial, start, end,
                lambda readers, sources, out, out_rows, accumulate: self.launch.mix_rows(
                    self.states, sources, self.weight, list(readers), self.gain, self.shift,
                    out, out_rows, accumulate,
                ),
            )  # fmt: skip
            self._partial_block = start
        return self._partial[row - start]

    @staticmethod
    def _launch_groups(groups, out, start, end, launch) -> None:
        """One launch per set of targets that share their sources; a full pattern is one launch."""
        everything = tuple(range(start, end))
        if list(groups) == [everything]:
            launch(everything, groups[everything], out, list(range(end - start)), False)
            return
        out[: end - start].zero_()
        for targets, sources in groups.items():
            launch(targets, sources, out, [t - start for t in targets], True)

    def finish_forward(self) -> None:
        """Drops what only the forward pass needs."""
        self._partial, self._partial_block = None, -1

    # ---- backward ------------------------------------------------------------------------------

    def enter(self, k: int, task: int) -> None:
        """Backward reaches boundary k in the graph task ``task``."""
        if task != self._task:
            # Rows are made again from the states below them.
            if self.inplace and any(self._consumed[: k + 1]):
                raise RuntimeError(
                    "DepthHistory: a second backward through one forward pass needs its states, "
                    "and gradients have taken their slots; use DepthHistory(inplace=False)"
                )
            # A new backward pass: gradients of an earlier one are not of this one.
            self._task, self._pulled_block = task, -1
            self._live.clear()
            self.dweight = self.dgain = self.dshift = None
        if self.inplace and (self.released or self._consumed[k]):
            raise RuntimeError(
                "DepthHistory: a second backward through one forward pass needs its states, and "
                "gradients have taken their slots; use DepthHistory(inplace=False)"
            )
        if self.grads is None:
            self.grads = self.states if self.inplace else empty_slots(self.rows, self.states[0])
        if self.dweight is None and self.need_weight_grad:
            self.dweight = torch.zeros_like(self.weight)
        if self.dgain is None and self.need_norm_grad:
            self.dgain = self.weight.new_zeros(self.rows, self.states.shape[2])
            self.dshift = torch.zeros_like(self.dgain)

    def check_readable(self, k: int) -> None:
        """Row k can be mixed again: no gradient has taken the slot of a state up to k."""
        if self.released or (self.inplace and any(self._consumed[: k + 1])):
            raise RuntimeError(
                "DepthHistory: a second backward through one forward pass needs its states, and "
                "gradients have taken their slots; use DepthHistory(inplace=False), or the memory "
                "policy 'states'"
            )

    def norm_grads(
        self, k: int, has_out: bool, need_weight: bool, need_bias: bool
    ) -> tuple[Tensor | None, ...]:
        """Where boundary k writes dgain, dshift, dout_weight and dout_bias."""
        own = (None, None)
        if self.need_norm_grad and (self.normalised[k] or self.own_norms[k]):
            own = self.dgain[k], self.dshift[k]
        if self.own_norms[k]:
            return (None, None, *(own if has_out else (None, None)))
        dim = self.weight.new_empty(self.states.shape[2]) if has_out else None
        return (
            *own,
            dim if need_weight else None,
            None if dim is None or not need_bias else torch.empty_like(dim),
        )

    def take_parameter_grads(self) -> tuple[Tensor | None, ...]:
        """Gradients of W, norm weights and norm biases, whole; they are the caller's now."""
        grads = self.dweight, self.dgain, self.dshift
        self.dweight = self.dgain = self.dshift = None
        return grads

    def grad_slot(self, row: int) -> int:
        return row + 1 if self.inplace else row

    def far_pull(self, k: int) -> Tensor | None:
        """Later blocks' share of dz_k, made for the whole block when backward enters it."""
        start, end = self.schedule.blocks[k]
        if end == self.rows:
            return None
        if self._pulled_block != start:
            later = tuple(r for r in range(end, self.rows) if r in self._live)
            # Backward may have started inside this block: states after k have no use.
            groups = self.schedule.far_readers(start, k + 1, later)
            if not groups:
                return None
            if self._pulled is None:
                self._pulled = empty_slots(self.schedule.block, self.states[0])
            self._launch_groups(
                groups, self._pulled, start, k + 1,
                lambda sources, rows, out, out_rows, accumulate: self.launch.pull_rows(
                    self.grads, [self.grad_slot(r) for r in rows], rows, self.states,
                    list(sources), self.weight, self.gain, self.shift, out, out_rows, accumulate,
                    self.dweight,
                ),
            )  # fmt: skip
            self._pulled_block = start
        return self._pulled[k - start]

    def near_pull(self, k: int) -> list[int]:
        """Rows of k's own block whose gradients are there and that read k, k's own row first."""
        _, end = self.schedule.blocks[k]
        reads = self.schedule.reads
        return [r for r in range(k, end) if (r == k or r in self._live) and k in reads[r]]

    def leave(self, k: int) -> None:
        """Row k's gradient is stored; with gradients in place, state k + 1 is gone."""
        self._live.add(k)
        if self.inplace:
            self._consumed[k] = True
            if k + 1 < self.rows:
                self._consumed[k + 1] = True
            self.rstd[k] = None
        if k == self.lowest:
            self._partial, self._partial_block = None, -1
            self._pulled, self._pulled_block = None, -1
            if self.inplace:
                self.states = self.grads = self._out_statistics = None
                self.released = True
