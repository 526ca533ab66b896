"""The rows of one pass that begin or end outside of it, for a stack in several stages.

A stage of a pipeline has the states of its own layers. The sum of a row over the states below them
comes from the stage before (`Begun`). What its own states add to the rows of later stages are rows
after its last state, see `deepfast.depth.boundary.later_rows`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


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


def end_stats(stats: Tensor, mean: Tensor, lse: Tensor, g: Tensor, dlse: Tensor | None) -> None:
    """Sets ``stats`` (R, 3, T) of the rows after the last state, of which ``mean`` (R, T, D) and
    ``lse`` (R, T) have left the pass, from their gradients g and dlse."""
    stats[:, 0], stats[:, 1] = lse, 1
    for i, (x, dx) in enumerate(zip(mean, g, strict=True)):
        stats[i, 2] = (x.to(lse.dtype) * dx).sum(-1)
    if dlse is not None:
        stats[:, 2] -= dlse
