"""Attention residuals: every layer attends to what the layers below it have added."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.depth.buffers import total_bytes
from deepfast.depth.connection import DepthConnection
from deepfast.depth.depth_pass import DepthPass, Launches
from deepfast.depth.schedule import block_pattern, depth_pattern
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.attention_residual import residual_score


class AttentionPass(DepthPass):
    """``x_{l+1} = sum_k p_{l,k} z_k`` from the scores ``s_{l,k} = q_l . z_k r_k + b[l,k]``, with
    ``r_k = 1 / RMS(z_k)``.

    The query belongs to a row and not to a token. So once a state exists, its scores for
    all later rows can be computed, and the rows are computed in blocks, as in DLCL.

    Its parameters are q (L+1, D), and b (L+1, L+1) or None.
    """

    op, states_per_pull = "attention_boundary", 16
    launches = Launches(
        "attention_boundary_forward",
        "attention_boundary_backward",
        "attend_rows",
        "attend_pull",
    )

    def begin(self, tokens: int) -> None:
        self.query, self.bias = self.parameters
        self.kind, self.eps = self.owner.score_function, self.owner.eps
        self.dquery: Tensor | None = None
        self.dbias: Tensor | None = None
        self.scores = {
            "query": self.query,
            "bias": self.bias,
            "kind": self.kind,
            # (L+1, T): r_k.
            "source_rstd": self.query.new_empty(self.rows, tokens),
        }
        self.stats: Tensor | None = None
        """(L+1, 3, T): of each row the largest score, sum exp(score - largest), and <g, x>."""
        if self.kind == "softmax":
            self.stats = self.query.new_empty(self.rows, 3, tokens)
        self.far_stats: Tensor | None = None
        """(B, 2, T): of the rows of one block, over the earlier states alone."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + total_bytes(self.scores["source_rstd"], self.stats, self.far_stats)

    def release(self) -> None:
        super().release()
        self.stats = self.far_stats = self.scores["source_rstd"] = None

    def partial(self, row: int) -> Tensor | None:
        start, _ = self.schedule.blocks[row]
        if start > 0 and self.partial_sums.start != start and self.kind == "softmax":
            if self.far_stats is None:
                tokens = self.states.shape[1]
                self.far_stats = self.query.new_empty(self.schedule.block, 2, tokens)
            # Rows that several passes compute add to it.
            self.far_stats[:, 0] = float("-inf")
            self.far_stats[:, 1] = 0
        return super().partial(row)

    def forward_weights(self, k: int, partial: Tensor | None) -> dict[str, Any]:
        stats = None
        if partial is not None and self.far_stats is not None:
            stats = self.far_stats[k - self.schedule.blocks[k][0]]
        return {"eps": self.eps, "partial_stats": stats, "stats": self.stats, **self.scores}

    def backward_weights(self, k: int, dout: Tensor | None) -> dict[str, Any]:
        # A softmax needs x again.
        again = dout is not None or self.kind == "softmax"
        partial = self.partial(k) if again else None
        weights = self.forward_weights(k, partial)
        del weights["eps"]
        return {"partial": partial, "dquery": self.dquery, "dbias": self.dbias, **weights}

    def mix_weights(self) -> dict[str, Any]:
        return {"out_stats": self.far_stats, **self.scores}

    def pull_weights(self) -> dict[str, Any]:
        grads = {"dquery": self.dquery, "dbias": self.dbias}
        return {"stats": self.stats, **grads, **self.scores}

    def begin_grads(self) -> None:
        if any(self.learns):
            self.dquery = torch.zeros_like(self.query)
            self.dbias = None if self.bias is None else torch.zeros_like(self.bias)

    def take_grads(self) -> tuple[Tensor | None, ...]:
        grads, self.dquery, self.dbias = (self.dquery, self.dbias), None, None
        return grads


class AttentionResiduals(DepthConnection):
    """Every layer reads a sum of what the layers below it have added, weighted for each token.

    full      ``x_{l+1} = sum_{k<=l} p_{l,k} v_k``, ``p_{l,.} = softmax_k(scale * w_l . n_k)`` with
              ``n_k = RMSNorm(v_k) * norm_weight_l``
    block     the same over v_0, the sums ``b_n = sum_{k in block n} v_k`` of finished blocks, and
              the sum so far of the current block
    "relu"    ``p_{l,k} = relu(scale * w_l . n_k + b_{l,k})`` in place of the softmax

    v_0 is the embedding. v_k is what the k-th layer adds, or with ``reads=2`` the k-th sublayer:
    its output without its input::

        history = deepfast.nn.DepthHistory()
        x = residuals(embedding, history)             # pushes v_0, returns x_1
        for layer in layers:
            x = residuals(layer(x), history)          # pushes v_l, returns x_{l+1}

    The last call returns the stack's output, which has its own query. Queries start at 0: each
    softmax starts as the mean of its sources, and "relu" as their sum, the plain residual.

    Memory is one state and four numbers per token for each row, gradients included: the weights are
    computed again in backward. Each state is read about sqrt(L) times, see `deepfast.depth`.

    Args:
        num_layers: L.
        dim: D.
        reads: rows per layer: 2 where attention and feed-forward block each push and read, as
            published and in `TransformerEncoder`; 3 in a decoder with cross-attention. A pass has
            ``rows = reads * L + 1`` pushes, the embedding first.
        block: layers per block; None for the full form.
        window: how many of the newest states a row reads; None for all. Only in the full form.
        score_function: "softmax" or "relu": the function from scores to weights.
        norm_affine: whether each row's RMSNorm has a learnable weight.
        scale: multiplies the scores.
        state_dtype: dtype of the states under autocast, as in `DLCL`.
        eps: added to the mean square in the RMSNorm.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Attributes:
        query: w (rows, D); row l feeds the reader l + 1.
        norm_weight: (rows, D), or None.
        bias: b (rows, rows) with "relu", else None.

    Sources: Kimi Team, Attention Residuals, arXiv 2603.15031, 2026; for "relu" Heddes et al.,
    DeepCrossAttention, arXiv 2502.06785, 2025.
    """

    name, pass_kind = "AttentionResiduals", AttentionPass

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        reads: int = 1,
        block: int | None = None,
        window: int | None = None,
        score_function: str = "softmax",
        norm_affine: bool = False,
        scale: float = 1.0,
        state_dtype: torch.dtype | None = torch.float32,
        eps: float = 1e-6,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = {"block": block, "window": window}
        given = {name: size for name, size in sizes.items() if size is not None}
        checks.whole(self.name, num_layers=num_layers, dim=dim, reads=reads, **given)
        checks.choice(self.name, ("softmax", "relu"), score_function=score_function)
        checks.flag(self.name, norm_affine=norm_affine)
        checks.finite(self.name, "scale", scale)
        checks.eps(self.name, eps)
        if len(given) == 2:
            raise ValueError(f"{self.name}: expected block or window, got both")
        rows = reads * num_layers + 1
        if block is None:
            pattern, continues = depth_pattern(rows, window, 1, 1), None
        else:
            pattern, continues = block_pattern(rows, reads * block)
        super().__init__(
            num_layers, dim, pattern, continues=continues, norm=None, state_dtype=state_dtype,
            eps=eps, backend=backend,
        )  # fmt: skip
        self.reads, self.block, self.window = reads, block, window
        self.score_function, self.scale = score_function, scale
        factory: dict = {"device": device, "dtype": dtype}
        self.query = nn.Parameter(torch.empty(rows, dim, **factory))
        self.norm_weight = self.bias = None
        if norm_affine:
            self.norm_weight = nn.Parameter(torch.empty(rows, dim, **factory))
        if score_function == "relu":
            self.bias = nn.Parameter(torch.empty(rows, rows, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        for p in (self.norm_weight, self.bias):
            if p is not None:
                nn.init.ones_(p)

    def effective_query(self) -> Tensor:
        """q of the scores ``q . RMSNorm(v)``: ``scale * query * norm_weight``, with gradient."""
        query = self._checked("query", self.rows, self.dim)
        norm_weight = self._checked("norm_weight", self.rows, self.dim, needed=False)
        # Not in half precision, where the product of finite numbers may be infinite.
        scaled = query.to(compute_dtype(query.dtype)) * self.scale
        return scaled if norm_weight is None else scaled * norm_weight

    def own_bias(self) -> Tensor | None:
        """The bias (rows, rows), or None, with gradient."""
        return self._checked("bias", self.rows, self.rows, needed=False)

    @torch.no_grad()
    def mean_weights(self, pushed: Sequence[Tensor]) -> Tensor:
        """The mean of p over all tokens, (rows, rows); 0 where row l does not read state k.

        pushed: what the pushes of one pass add, (..., D) each, in their order.

        Raises:
            TypeError, ValueError: for tensors that are not those of one pass.
        """
        pushed = common.checked_sources(self.name, "pushed", pushed)
        if len(pushed) != self.rows:
            raise ValueError(
                f"{self.name}: pushed must hold {self.rows} tensors, got {len(pushed)}"
            )
        self._check_state(pushed[0])
        if not pushed[0].numel():
            raise ValueError(f"{self.name}: pushed must have tokens, got {tuple(pushed[0].shape)}")
        states: list[Tensor] = []
        for y, continues in zip(pushed, self.continues, strict=True):
            v = y.reshape(-1, self.dim).to(compute_dtype(y.dtype))
            states.append(v + states[-1] if continues else v)
        query, means = self.effective_query(), states[0].new_zeros(self.rows, self.rows)
        for row, reads in enumerate(self.pattern):
            s = torch.stack([self._score(states[k], query, row, k) for k in reads], -1)
            p = s.softmax(-1) if self.score_function == "softmax" else s.relu()
            means[row, list(reads)] = p.mean(0)
        return means

    def _score(self, v: Tensor, query: Tensor, row: int, k: int) -> Tensor:
        """The score (...) of state k, v (..., D) in the compute dtype, for ``row``."""
        score = residual_score(v, query[row], self.eps)
        bias = self.own_bias()
        return score if bias is None else score + bias[row, k]

    def pass_parameters(self) -> tuple[Tensor | None, ...]:
        return self.effective_query(), self.own_bias()

    def traced_far(self, states, indices, rows, weights) -> list[tuple[Tensor, int]] | None:
        if self.score_function == "relu":
            return None
        queries = weights[rows.start : rows.stop]
        x, lse = self._attend(states, queries, eps=self.eps, return_lse=True)
        return [(x, -2), (lse, -1)]

    def _attend(self, states: list[Tensor], *query, **options):
        return ops.depth_attention(states, *query, backend=self.backend, **options)

    def traced_row(self, states, indices, k, weights, partial) -> Tensor:
        if self.score_function == "softmax":
            x, lse = self._attend(states, weights[k], eps=self.eps, return_lse=True)
            if partial is None:
                return x
            below, lse_below = partial
            return self._attend([below, x], scores=torch.stack((lse_below, lse), -1))
        dtype = compute_dtype(states[0].dtype)
        total = torch.zeros_like(states[0], dtype=dtype)
        for j, source in zip(indices, states, strict=True):
            v = source.to(dtype)
            total = total + self._score(v, weights, k, j).relu().unsqueeze(-1) * v
        return total.to(states[0].dtype)

    def extra_repr(self) -> str:
        return (
            f"num_layers={self.num_layers}, dim={self.dim}, reads={self.reads}, "
            f"block={self.block}, score_function={self.score_function!r}"
        )
