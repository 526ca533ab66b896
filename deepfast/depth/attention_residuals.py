"""Attention residuals: every layer attends to what the layers below it have added."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepfast import checks, ops


@dataclass
class ResidualHistory:
    """What the layers of one forward pass have added so far; `AttentionResiduals` fills it."""

    pushed: int = 0
    """How many of v_0 .. v_L were pushed."""
    owner: nn.Module | None = None
    """The stack of this history. The first push sets this field and the next two."""
    kind: tuple | None = None
    """Shape, dtype and device of every v."""
    task: int = -1
    """The backward pass (graph task) that the first push was part of; -1 outside of backward."""
    sources: list[Tensor] = field(default_factory=list)
    """v_0, and the v_k or the sums of finished blocks."""
    partial: Tensor | None = None
    """The sum over the current block, so far."""
    rows: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    """For each row of the current block, its attention over the sources and the lse of that."""


class AttentionResiduals(nn.Module):
    """Every layer reads a softmax-weighted sum of what the layers below it have added.

    full     ``x_{l+1} = sum_{k<=l} softmax_k(w_l . RMSNorm(v_k)) v_k``
    block    the same over v_0, the sums ``b_n = sum_{k in block n} v_k`` of finished blocks of
             layers, and the sum so far of the current block::

        history = deepfast.nn.ResidualHistory()
        x = residuals(embedding, history)             # pushes v_0, returns x_1
        for layer in layers:
            x = residuals(layer(x), history)          # pushes v_l, returns x_{l+1}

    v_0 is the embedding. v_l is what all sublayers of layer l together add to its input. (The paper
    has one v per sublayer.) The last call returns the stack's output, which has its own query.
    Queries start at 0, so that each row starts as the mean of its sources. The RMSNorm has no
    weight, because a weight would only scale the query's channels.

    A push cannot be repeated. With `torch.utils.checkpoint` wrap only the layer:
    ``residuals(checkpoint(layer, x, use_reentrant=False), history)``.

    The block form reads the finished blocks once for all rows of the current block. Each row then
    adds the sum of the current block, weighted by the lse of both. So each source is read once per
    block of rows, while the full form reads it once per row.

    Args:
        num_layers: L.
        dim: D.
        block: layers per block; None for the full form.
        eps: added to the mean square in the RMSNorm.
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
        self.query = nn.Parameter(torch.empty(num_layers + 1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, v: Tensor, history: ResidualHistory) -> Tensor:
        """Pushes what a layer adds (v_0: the embedding) and returns the next layer's input.

        Args:
            v: (..., D). Every v of a pass has the same shape, dtype and device.
            history: the history of this forward pass.

        Returns:
            x_{k+1}, shaped like v.

        Raises:
            TypeError, ValueError: for operands that do not fit; the history is then unchanged.
            RuntimeError: when the history already has all states or belongs to another stack, and
                when checkpointing repeats a push.
        """
        kind = self._check(v, history)
        # A compiler cannot trace this call, and a traced push is never repeated.
        task = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
        row = history.pushed
        if row > self.num_layers:
            raise RuntimeError(
                f"AttentionResiduals: {self.num_layers} layers push {self.num_layers + 1} states, "
                "and this history has them all; make a new one for each forward pass, and "
                "checkpoint a layer without its push: residuals(checkpoint(layer, x), history)"
            )
        # A pass that began in this backward pass recomputes a whole stack, which is allowed.
        if row and task not in (-1, history.task):
            raise RuntimeError(
                "AttentionResiduals: a push cannot be repeated during backward; checkpoint a layer "
                "without its push: residuals(checkpoint(layer, x), history)"
            )
        if self.block is None:
            sources = [*history.sources, v]
            out = self._attend(sources, self.query[row])
            history.sources = sources
        else:
            out = self._blocked(v, history, row)
        if row == 0:
            history.owner, history.kind, history.task = self, kind, task
        history.pushed = row + 1
        if row == self.num_layers:
            # Autograd keeps what backward needs.
            history.sources, history.partial, history.rows = [], None, []
        return out

    def _check(self, v: Tensor, history: ResidualHistory) -> tuple:
        """Checks the operands of a push; returns shape, dtype and device of v."""
        for name, value, wanted in (("v", v, Tensor), ("history", history, ResidualHistory)):
            if not isinstance(value, wanted):
                raise TypeError(
                    f"AttentionResiduals: {name} must be a {wanted.__name__}, got "
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
            # The block before is finished. Its sum (or the embedding) becomes a source.
            sources = [*history.sources, partial]
            queries = self.query[row : row + self.block]
            outs, lses = self._attend(sources, queries, return_lse=True)
            # unbind instead of indexing: its backward combines the gradients of all rows at once.
            rows = list(zip(outs.unbind(-2), lses.unbind(-1), strict=True))
            history.sources, history.partial, history.rows = sources, None, rows
        out, lse = history.rows[place]
        if place:
            # The lse of a single source is its score.
            _, score = self._attend([partial], self.query[row], return_lse=True)
            out = ops.depth_attention(  # type: ignore[assignment]
                [out, partial], scores=torch.stack((lse, score), -1), backend=self.backend
            )
            history.partial = partial
        # No other row reads this entry.
        history.rows[place] = None
        return out

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, dim={self.dim}, block={self.block}"
