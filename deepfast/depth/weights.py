"""How a row weighs the states, which is all that differs between the kinds of depth connections.

`DepthState` knows slots, blocks and layer-norms. What a pass over the states computes is behind the
methods of one of two classes:

    ConstantWeights     ``x_{l+1} = sum_k W[l,k] z_k``, the same weights for all tokens
    AttentionWeights    ``x_{l+1} = sum_k p_{l,k} z_k``, weights from each token's scores

    mix        the far pass of forward: the sums of a block of rows over earlier states
    pull       the far pass of backward: what later rows add to the gradients of a block of states
    forward    one boundary: stores a state and computes its row
    backward   one boundary: stores the row's gradient and computes that of its state

``launch`` has the kernels of the backend that `deepfast.backend` chose; `deepfast.launches` lists
their operands.
"""

from types import SimpleNamespace

import torch
from torch import Tensor


class ConstantWeights:
    """W of DLCL and DenseFormer.

    Args:
        launch: the launches of the op "boundary".
        weight: W (L+1, L+1) or (L+1, L+1, D), compute dtype, zero outside the pattern.
        learns: whether W needs a gradient.
    """

    def __init__(self, launch: SimpleNamespace, weight: Tensor, learns: bool):
        self.launch, self.weight, self.learns = launch, weight, learns
        self.rows, self.device = weight.shape[0], weight.device
        self.dweight: Tensor | None = None

    nbytes = 0
    """Bytes of what grows with the number of tokens, beside states and sums."""
    mixes_again = False
    """Whether backward needs a row's x even where no layer-norm follows it."""
    stats = far_stats = None
    """See `AttentionWeights`."""

    def new_empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor in the compute dtype, on the device of the pass."""
        return self.weight.new_empty(shape)

    def begin(self, tokens: int) -> None:
        """Called when the first state comes."""

    def release(self) -> None:
        """Frees what grows with the number of tokens."""

    def begin_mix(self, block: int) -> None:
        """Called before the passes that compute the partial sums of a block of rows."""

    def mix(self, state, rows, sources, out, out_rows, accumulate) -> None:
        self.launch.mix_rows(
            states=state.states, sources=sources, weight=self.weight, rows=list(rows),
            norm_weight=state.norm_weight, norm_bias=state.norm_bias, out=out, out_rows=out_rows,
            accumulate=accumulate,
        )  # fmt: skip

    def pull(self, state, grads, slot, sources, rows, out, out_rows, accumulate) -> None:
        self.launch.pull_rows(
            grads=grads, grad_slots=[slot(r) for r in rows], rows=rows, states=state.states,
            sources=list(sources), weight=self.weight, norm_weight=state.norm_weight,
            norm_bias=state.norm_bias, out=out, out_rows=out_rows, accumulate=accumulate,
            dweight=self.dweight,
        )  # fmt: skip

    def forward(
        self, state, k, branch, residual, dropout_p, seed, partial, out_norm_weight, out_norm_bias,
        out_eps, out_rms, x, out, out_mean, out_rstd,
    ) -> None:  # fmt: skip
        self.launch.boundary_forward(
            branch=branch, residual=residual, dropout_p=dropout_p, seed=seed, states=state.states,
            k=k, near=state.near(k), weight=self.weight, norm_weight=state.norm_weight,
            norm_bias=state.norm_bias, norm_source=state.norm_source[k], source_eps=state.eps,
            source_rms=state.rms, partial=partial, out_norm_weight=out_norm_weight,
            out_norm_bias=out_norm_bias, out_eps=out_eps, out_rms=out_rms, x=x, out=out,
            source_rstd=state.source_rstd[k], out_mean=out_mean, out_rstd=out_rstd,
        )  # fmt: skip

    def backward(
        self, state, k, partial, out_norm_weight, out_norm_bias, out_rms, out_mean, out_rstd,
        dropout_p, seed, dx, dout, pull_rows, pulled, dbranch, dresidual, dnorm_weight, dnorm_bias,
        dout_norm_weight, dout_norm_bias,
    ) -> None:  # fmt: skip
        pull_slots = [state.grad_slot(r) for r in pull_rows]
        self.launch.boundary_backward(
            states=state.states, k=k, near=state.near(k), weight=self.weight,
            norm_weight=state.norm_weight, norm_bias=state.norm_bias,
            norm_source=state.norm_source[k], source_rms=state.rms, partial=partial,
            out_norm_weight=out_norm_weight, out_norm_bias=out_norm_bias, out_rms=out_rms,
            source_rstd=state.source_rstd[k], out_mean=out_mean, out_rstd=out_rstd,
            dropout_p=dropout_p, seed=seed, dx=dx, dout=dout, grads=state.grads,
            grad_slot=state.grad_slot(k), pull_rows=pull_rows, pull_slots=pull_slots,
            pulled=pulled, dbranch=dbranch, dresidual=dresidual, dweight=self.dweight,
            dnorm_weight=dnorm_weight, dnorm_bias=dnorm_bias, dout_norm_weight=dout_norm_weight,
            dout_norm_bias=dout_norm_bias,
        )  # fmt: skip

    def lse(self, rows: int) -> None:
        """(rows, T): the lse of the first rows of the block; None without a softmax."""

    def end_later(self, first: int, mean: Tensor, lse: Tensor | None, g, dlse) -> None:
        """Called in backward with the rows after the last state, and their gradients."""

    def begin_grads(self) -> None:
        """Called before a boundary of backward adds to the gradients."""
        if self.learns and self.dweight is None:
            self.dweight = torch.zeros_like(self.weight)

    def take_grads(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the parameters and keeps none."""
        dweight, self.dweight = self.dweight, None
        return (dweight,)


class AttentionWeights:
    """Weights from the scores ``s_{l,k} = q_l . z_k r_k + b[l,k]``, ``r_k = 1 / RMS(z_k)``.

    The query belongs to a row and not to a token. So the score of a state for every later row is
    known as soon as the state is, and the rows are computed in the blocks of DLCL.

    Args:
        launch: the launches of the op "attention_boundary".
        query: q (L+1, D), compute dtype.
        bias: b (L+1, L+1), compute dtype, or None.
        kind: "softmax" over the states that a row reads, or "relu".
        eps: added to the mean square in the RMSNorm.
        learns: whether the query or the bias needs a gradient.
    """

    def __init__(
        self,
        launch: SimpleNamespace,
        query: Tensor,
        bias: Tensor | None,
        kind: str,
        eps: float,
        learns: bool,
    ):
        self.launch, self.query, self.bias, self.kind = launch, query, bias, kind
        self.mixes_again = kind == "softmax"
        self.eps, self.learns, self.rows = eps, learns, query.shape[0]
        self.device = query.device
        self.dquery: Tensor | None = None
        self.dbias: Tensor | None = None
        self.source_rstd: Tensor | None = None
        """(L+1, T): r_k."""
        self.stats: Tensor | None = None
        """(L+1, 3, T): of each row the largest score, sum exp(score - largest), and <g, x>."""
        self.far_stats: Tensor | None = None
        """(B, 2, T): the first two over the earlier states alone, for the rows of one block."""

    @property
    def nbytes(self) -> int:
        tensors = (self.source_rstd, self.stats, self.far_stats)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def new_empty(self, *shape: int) -> Tensor:
        return self.query.new_empty(shape)

    def begin(self, tokens: int) -> None:
        self.source_rstd = self.query.new_empty(self.rows, tokens)
        if self.kind == "softmax":
            self.stats = self.query.new_empty(self.rows, 3, tokens)

    def release(self) -> None:
        self.source_rstd = self.stats = self.far_stats = None

    def begin_mix(self, block: int) -> None:
        if self.kind == "relu":
            return
        if self.far_stats is None:
            self.far_stats = self.query.new_empty(block, 2, self.source_rstd.shape[1])
        # Of no states yet. Rows that several passes compute add to it.
        self.far_stats[:, 0] = float("-inf")
        self.far_stats[:, 1] = 0

    def mix(self, state, rows, sources, out, out_rows, accumulate) -> None:
        out_stats = None if self.far_stats is None else self.far_stats[: out.shape[0]]
        self.launch.attend_rows(
            states=state.states, sources=sources, query=self.query, bias=self.bias, kind=self.kind,
            source_rstd=self.source_rstd, rows=list(rows), out=out, out_stats=out_stats,
            out_rows=out_rows, accumulate=accumulate,
        )  # fmt: skip

    def pull(self, state, grads, slot, sources, rows, out, out_rows, accumulate) -> None:
        self.launch.attend_pull(
            grads=grads, grad_slots=[slot(r) for r in rows], rows=rows, states=state.states,
            sources=list(sources), query=self.query, bias=self.bias, kind=self.kind,
            source_rstd=self.source_rstd, stats=self.stats, out=out, out_rows=out_rows,
            accumulate=accumulate, dquery=self.dquery, dbias=self.dbias,
        )  # fmt: skip

    def _partial_stats(self, state, k: int, partial: Tensor | None) -> Tensor | None:
        if partial is None or self.far_stats is None:
            return None
        return self.far_stats[k - state.schedule.blocks[k][0]]

    def forward(
        self, state, k, branch, residual, dropout_p, seed, partial, out_norm_weight, out_norm_bias,
        out_eps, out_rms, x, out, out_mean, out_rstd,
    ) -> None:  # fmt: skip
        self.launch.attention_boundary_forward(
            branch=branch, residual=residual, dropout_p=dropout_p, seed=seed, states=state.states,
            k=k, near=state.near(k), query=self.query, bias=self.bias, kind=self.kind,
            eps=self.eps, partial=partial, partial_stats=self._partial_stats(state, k, partial),
            out_norm_weight=out_norm_weight, out_norm_bias=out_norm_bias, out_eps=out_eps,
            out_rms=out_rms, x=x, out=out, source_rstd=self.source_rstd, stats=self.stats,
            out_mean=out_mean, out_rstd=out_rstd,
        )  # fmt: skip

    def backward(
        self, state, k, partial, out_norm_weight, out_norm_bias, out_rms, out_mean, out_rstd,
        dropout_p, seed, dx, dout, pull_rows, pulled, dbranch, dresidual, dnorm_weight, dnorm_bias,
        dout_norm_weight, dout_norm_bias,
    ) -> None:  # fmt: skip
        pull_slots = [state.grad_slot(r) for r in pull_rows]
        self.launch.attention_boundary_backward(
            states=state.states, k=k, near=state.near(k), query=self.query, bias=self.bias,
            kind=self.kind, partial=partial, partial_stats=self._partial_stats(state, k, partial),
            out_norm_weight=out_norm_weight, out_norm_bias=out_norm_bias, out_rms=out_rms,
            source_rstd=self.source_rstd, stats=self.stats, out_mean=out_mean, out_rstd=out_rstd,
            dropout_p=dropout_p, seed=seed, dx=dx, dout=dout, grads=state.grads,
            grad_slot=state.grad_slot(k), pull_rows=pull_rows, pull_slots=pull_slots,
            pulled=pulled, dbranch=dbranch, dresidual=dresidual, dquery=self.dquery,
            dbias=self.dbias, dout_norm_weight=dout_norm_weight, dout_norm_bias=dout_norm_bias,
        )  # fmt: skip

    def lse(self, rows: int) -> Tensor | None:
        if self.kind == "relu":
            return None
        return self.far_stats[:rows, 0] + self.far_stats[:rows, 1].log()

    def end_later(self, first: int, mean: Tensor, lse: Tensor | None, g, dlse) -> None:
        if self.kind == "relu":
            return
        of_rows = self.stats[first:]
        of_rows[:, 0], of_rows[:, 1] = lse, 1
        for i, (x, dx) in enumerate(zip(mean, g, strict=True)):
            of_rows[i, 2] = (x.to(lse.dtype) * dx).sum(-1)
        if dlse is not None:
            of_rows[:, 2] -= dlse

    def begin_grads(self) -> None:
        if self.learns and self.dquery is None:
            self.dquery = torch.zeros_like(self.query)
            self.dbias = None if self.bias is None else torch.zeros_like(self.bias)

    def take_grads(self) -> tuple[Tensor | None, ...]:
        grads = self.dquery, self.dbias
        self.dquery = self.dbias = None
        return grads
