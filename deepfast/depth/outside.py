"""The rows that are only partly computed in one pass, for a stack in several stages.

A stage of a pipeline has the states of its own layers. The sum of a row over the states below them
comes from the stage before (`Begun`). What its own states add to the rows of later stages are rows
after its last state (`later_rows`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepfast.ops import common


@dataclass(eq=False)
class Begun:
    """The sums that rows of a pass begin with, and their gradients.

    The gradient of a sum is g_l, the gradient of its row. Attention residuals have weighted means
    in place of sums, and lse, the logarithm of the sum of exponentials that a mean belongs to.
    """

    rows: tuple[int, ...]
    """The rows, ascending; entry i of the tensors belongs to rows[i]."""
    sums: Tensor
    """(R, T, D), detached."""
    lse: Tensor | None
    """(R, T), compute dtype, detached; None without a softmax."""
    learns: bool
    dsums: Tensor | None = field(default=None, init=False)
    dlse: Tensor | None = field(default=None, init=False)

    def __post_init__(self):
        self.index = {row: i for i, row in enumerate(self.rows)}
        self._received = [
            (t, t._version) for t in (self.sums, self.lse) if t is not None and not t.is_inference()
        ]

    def any(self, start: int, stop: int) -> bool:
        """Whether a row of [start, stop) begins with a sum."""
        return any(start <= row < stop for row in self.rows)

    def fill(self, sums: Tensor, stats: Tensor | None, start: int, stop: int) -> None:
        """Sets ``sums[row - start]`` to what each row of [start, stop) begins with, else 0.

        stats: (B, 2, T), the largest score and the sum of exponentials of the same rows, which are
            those of no states yet.
        """
        self._check_unchanged()
        for row in range(start, stop):
            i = self.index.get(row)
            if i is None:
                sums[row - start].zero_()
                continue
            sums[row - start].copy_(self.sums[i])
            if stats is not None:
                stats[row - start, 0] = self.lse[i]
                stats[row - start, 1] = 1

    def add_grad(self, row: int, g: Tensor, stats: Tensor | None) -> None:
        """Stores the gradient of what ``row`` begins with.

        g: (T, D), the gradient of the row.
        stats: (3, T) of the whole row: the largest score, the sum of exponentials, <g, x>.
        """
        i = self.index.get(row)
        if i is None or not self.learns:
            return
        self._check_unchanged()
        if self.dsums is None:
            self.dsums = torch.zeros_like(self.sums)
            self.dlse = None if self.lse is None else torch.zeros_like(self.lse)
        if stats is None:
            self.dsums[i].copy_(g)
            return
        # The share of the weights that belongs to the states below.
        p = (self.lse[i] - stats[0]).exp() / stats[1]
        g = g.to(p.dtype)
        self.dsums[i].copy_(p.unsqueeze(-1) * g)
        self.dlse[i] = p * ((g * self.sums[i]).sum(-1) - stats[2])

    def _check_unchanged(self) -> None:
        if any(t._version != version for t, version in self._received):
            raise RuntimeError(
                "deepfast.parallel: expected the sums that a stage received as they were until its "
                "backward has run, got sums that an inplace operation has changed"
            )

    def take_grads(self) -> tuple[Tensor | None, Tensor | None]:
        grads, self.dsums, self.dlse = (self.dsums, self.dlse), None, None
        return grads


@common.traced_as("later_rows")
class _LaterRows(torch.autograd.Function):
    """Its backward runs before that of the boundaries, and gives them the rows' gradients."""

    @staticmethod
    def forward(ctx, run, _token):
        ctx.run = run
        run.ahead.clear()
        shape, parts = (len(run.later), *run.states.shape[1:]), []
        sums = run.like.new_empty(shape)
        for start in run.later[:: run.schedule.block]:
            end = min(start + run.schedule.block, run.later.stop)
            stats = run.mix_block(sums[start - run.rows : end - run.rows], start, end)
            if stats is not None:
                parts.append(stats[: end - start, 0] + stats[: end - start, 1].log())
        ctx.set_materialize_grads(False)
        # The next stage gets them as it gets states.
        out = sums.to(run.states.dtype)
        if not parts:
            return out, None
        lse = torch.cat(parts)
        ctx.save_for_backward(out, lse)
        return out, lse

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, g, dlse):
        run = ctx.run
        out, lse = ctx.saved_tensors or (None, None)
        if g is None and dlse is None:
            return None, None
        g = torch.zeros_like(out) if g is None else g.contiguous()
        run.enter_task(torch._C._current_graph_task_id(), run.rows - 1)
        run.later_grads = g
        if lse is not None:
            stats = run.stats[run.rows :]
            stats[:, 0], stats[:, 1] = lse, 1
            for i, (x, dx) in enumerate(zip(out, g, strict=True)):
                stats[i, 2] = (x.to(lse.dtype) * dx).sum(-1)
            if dlse is not None:
                stats[:, 2] -= dlse
        if run.begun is not None:
            for row in run.later:
                run.add_begun(row, g[row - run.rows])
        return None, None


def later_rows(history) -> tuple[Tensor, Tensor | None]:
    """Ends a pass that has rows after its last state: their sums (R, T, D) and lse (R, T).

    Other stages of a pipeline go on with these rows. The gradient of a sum is its row's g_l.

    history: the pass's `deepfast.depth.DepthHistory`.
    """
    run = history.state
    out, lse = _LaterRows.apply(run, history.token)
    history.close()
    run.end_forward(history.grad_mode)
    return out, lse
