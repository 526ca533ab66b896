"""Attention residuals: every layer attends to what the layers below it have added."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepfast import checks, ops


@dataclass
class ResidualHistory:
    """What the layers of one forward pass have added so far; `AttentionResiduals` fills it."""

    pushed: int = 0
    """How many of v_0 .. v_L are there."""
    owner: nn.Module | None = None
    """The stack that it serves, and what all of its v are like; both by the first push."""
    kind: tuple | None = None
    sources: list[Tensor] = field(default_factory=list)
    """v_0, and the v_k or the sums of finished blocks."""
    partial: Tensor | None = None
    """The sum over the block at hand."""
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each row of the block at hand what the sources give it, and its lse."""


class AttentionResiduals(nn.Module):
    """Every layer reads a softmax over what the layers below it have added.

    full     ``x_{l+1} = sum_{k<=l} softmax_k(w_l . RMSNorm(v_k)) v_k``
    block    the same over v_0, the sums ``b_n = sum_{k in block n} v_k`` of finished blocks of
             layers, and the sum so far of the block at hand::

        history = deepfast.nn.ResidualHistory()
        x = residuals(embedding, history)             # pushes v_0, returns x_1
        for layer in layers:
            x = residuals(layer(x), history)          # pushes v_l, returns x_{l+1}

    v_0 is the embedding and v_l what layer l adds to its input, all its sublayers together: the
    paper's equation with a whole layer in the place of a sublayer. The last call returns the
    stack's output, which has a query of its own. Queries begin at zero, so that a row begins as
    the mean of its sources. The RMSNorm has no gain: it would only scale the query's channels.

    A push cannot be repeated: under `torch.utils.checkpoint` wrap the layer alone,
    ``residuals(checkpoint(layer, x, use_reentrant=False), history)``.

    In blocks a pass over the finished ones serves all rows of a block at once, one hop for each;
    a row then adds the sum at hand by their lse. Each source is read once for every block of rows,
    where the full form reads it for every row.

    Args:
        num_layers: L.
        dim: D.
        block: layers of a block; None for the full form.
        eps: of the RMSNorm.
        backend: see `deepfast.backend`.

    Attributes:
        query: (L + 1, D); row l feeds layer l + 1.

    Source: Kimi Team, Attention Residuals, arXiv 2603.15031, 2026.
    """

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        block: int | None = None,
        eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        checks.whole(
            "AttentionResiduals", num_layers=num_layers, dim=dim,
            block=1 if block is None else block,
        )  # fmt: skip
        checks.eps("AttentionResiduals", eps)
        self.num_layers, self.dim, self.block = num_layers, dim, block
        self.eps, self.backend = eps, backend
        self.query = nn.Parameter(torch.zeros(num_layers + 1, dim))

    def forward(self, v: Tensor, history: ResidualHistory) -> Tensor:
        """Pushes what a layer adds (v_0: the embedding) and returns the next layer's input.

        Args:
            v: (..., D), all of one pass of one shape and dtype.
            history: of this forward pass.

        Returns:
            x_{k+1}, shaped like v.

        Raises:
            TypeError, ValueError: for operands that do not fit; the history is as before.
            RuntimeError: when the history has all states already, or those of another stack.
        """
        kind = self._check(v, history)
        row = history.pushed
        if row > self.num_layers:
            raise RuntimeError(
                f"AttentionResiduals: {self.num_layers} layers push {self.num_layers + 1} states, "
                "and this history has them all; make a new one for each forward pass, and "
                "checkpoint a layer without its push: residuals(checkpoint(layer, x), history)"
            )
        if self.block is None:
            sources = [*history.sources, v]
            out = self._attend(sources, self.query[row])
            history.sources = sources
        else:
            out = self._blocked(v, history, row)
        history.pushed, history.owner, history.kind = row + 1, self, kind
        return out

    def _check(self, v: Tensor, history: ResidualHistory) -> tuple:
        """Shape, dtype and device of v."""
        for name, value, kind in (("v", v, Tensor), ("history", history, ResidualHistory)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"AttentionResiduals: {name} must be a {kind.__name__}, got "
                    f"{type(value).__name__}"
                )
        if v.dim() == 0 or v.shape[-1] != self.dim:
            raise ValueError(
                f"AttentionResiduals: v must be (..., {self.dim}), got {tuple(v.shape)}"
            )
        if history.owner is not None and history.owner is not self:
            raise RuntimeError(
                "AttentionResiduals: this history belongs to another stack; make a new one for "
                "each forward pass of each stack"
            )
        kind = tuple(v.shape), v.dtype, v.device
        if history.kind is not None and history.kind != kind:
            raise ValueError(
                f"AttentionResiduals: v must be {history.kind[0]}, {history.kind[1]} on "
                f"{history.kind[2]} like v_0, got {kind[0]}, {kind[1]} on {kind[2]}"
            )
        return kind

    def _attend(self, sources, query, **options):
        return ops.depth_attention(sources, query, eps=self.eps, backend=self.backend, **options)

    def _blocked(self, v: Tensor, history: ResidualHistory, row: int) -> Tensor:
        place = row % self.block
        partial = v if history.partial is None else history.partial + v
        if place == 0:
            # The embedding, or the sum of a block that is finished.
            sources = [*history.sources, partial]
            queries = self.query[row : row + self.block]
            outs, lses = self._attend(sources, queries, return_lse=True)
            # Unbound, not indexed: the gradients of all rows come back together.
            rows = list(zip(outs.unbind(-2), lses.unbind(-1), strict=True))
            history.sources, history.partial, history.rows = sources, None, rows
        out, lse = history.rows[place]
        if place:
            # Of a single source the lse is its score.
            _, score = self._attend([partial], self.query[row], return_lse=True)
            out = ops.depth_attention(
                [out, partial], scores=torch.stack((lse, score), -1), backend=self.backend
            )
            history.partial = partial
        # Nothing but its own row needs it from here on.
        history.rows[place] = None
        return out

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, dim={self.dim}, block={self.block}"
