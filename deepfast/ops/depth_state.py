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
autograd; `deepfast.ops.boundary` does.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor


def default_block(rows: int) -> int:
    """Rows per block, by measurement: traffic falls until near sqrt(rows), but a pass over more
    than 8 rows is bound by arithmetic, not by memory."""
    return 4 if rows <= 32 else 8


def empty_slots(count: int, like: Tensor) -> Tensor:
    """(count, T, D) for tensors like ``like`` (T, D), neighbouring slots one cache line apart.

    A distance of a whole number of pages would put the same element of every slot into the same
    few cache sets.
    """
    line = 64 // like.element_size()
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride)[:, : like.numel()].unflatten(1, like.shape)


def near_rows(block: int, k: int, rows: int) -> tuple[int, int]:
    """The block [s, e) that row or state k belongs to."""
    start = block * (k // block)
    return start, min(start + block, rows)


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
    pattern: tuple[tuple[int, ...], ...]
    """pattern[l]: the states that row l reads, ascending."""
    eps: float
    block: int
    inplace: bool
    launch: SimpleNamespace
    need_weight_grad: bool = True

    def __post_init__(self):
        self.rows = self.weight.shape[0]
        self.pushed = 0
        self.states: Tensor | None = None
        self.grads: Tensor | None = None
        self.dweight: Tensor | None = None
        self.rstd: list[Tensor | None] = [None] * self.rows
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

    def open_slot(self, k: int, y: Tensor) -> None:
        """Makes room for state k, shaped like y (T, D)."""
        if self.released or any(self._consumed):
            raise RuntimeError(
                "DepthHistory: a backward pass has taken the states' slots, so no further state "
                "can be pushed; use DepthHistory(inplace=False), or a new history"
            )
        if self.states is None:
            # Slot l + 1 takes g_l when it is born, so the last row's gradient needs one more.
            slots = self.rows + 1 if self.inplace else self.rows
            self.states = empty_slots(slots, y)
            self.launch.advise_states(self.states)
        if self.normalised[k]:
            self.rstd[k] = self.weight.new_empty(y.shape[0])
        self.pushed = k + 1

    def near(self, row: int) -> list[int]:
        """The states of its own block that ``row`` reads."""
        start, _ = near_rows(self.block, row, self.rows)
        return [k for k in self.pattern[row] if k >= start]

    def partial(self, row: int) -> Tensor | None:
        """P_row, made for the whole block when its first row asks; None in the first block."""
        start, end = near_rows(self.block, row, self.rows)
        if start == 0:
            return None
        if self._partial_block != start:
            if self._partial is None:
                self._partial = empty_slots(self.block, self.states[0])
            groups = defaultdict(list)
            for k in range(start):
                readers = tuple(r for r in range(start, end) if k in self._reads[r])
                if readers:
                    groups[readers].append(k)
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

    @property
    def _reads(self) -> list[frozenset[int]]:
        if not hasattr(self, "_reads_cache"):
            self._reads_cache = [frozenset(p) for p in self.pattern]
        return self._reads_cache

    def finish_forward(self) -> None:
        """Drops what only the forward pass needs."""
        self._partial, self._partial_block = None, -1

    # ---- backward ------------------------------------------------------------------------------

    def enter(self, k: int, task: int) -> None:
        """Backward reaches boundary k in the graph task ``task``."""
        if task != self._task:
            # A new backward pass: gradients of an earlier one are not of this one.
            self._task, self._pulled_block = task, -1
            self._live.clear()
            self.dweight = None
        if self.inplace and (self.released or self._consumed[k]):
            raise RuntimeError(
                "DepthHistory: a second backward through one forward pass needs its states, and "
                "gradients have taken their slots; use DepthHistory(inplace=False)"
            )
        if self.grads is None:
            self.grads = self.states if self.inplace else empty_slots(self.rows, self.states[0])
        if self.dweight is None and self.need_weight_grad:
            self.dweight = torch.zeros_like(self.weight)

    def grad_slot(self, row: int) -> int:
        return row + 1 if self.inplace else row

    def far_pull(self, k: int) -> Tensor | None:
        """Later blocks' share of dz_k, made for the whole block when backward enters it."""
        start, end = near_rows(self.block, k, self.rows)
        later = [r for r in range(end, self.rows) if r in self._live]
        if not later:
            return None
        if self._pulled_block != start:
            if self._pulled is None:
                self._pulled = empty_slots(self.block, self.states[0])
            # Backward may have started inside this block: states after k have no use.
            groups = defaultdict(list)
            for row in later:
                sources = tuple(j for j in range(start, k + 1) if j in self._reads[row])
                if sources:
                    groups[sources].append(row)
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
        _, end = near_rows(self.block, k, self.rows)
        return [r for r in range(k, end) if (r == k or r in self._live) and k in self._reads[r]]

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
            self.dweight = None
            if self.inplace:
                self.states = self.grads = None
                self.released = True
