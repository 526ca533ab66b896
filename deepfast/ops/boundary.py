"""The boundary between two layers as one autograd node over a `DepthState`.

In the chain ``boundary_l -> layer -> boundary_{l+1}`` the node of state k runs after every
consumer of z_k, so it can pull that state's whole gradient. A token, an empty tensor handed from
node to node, keeps that order even where a layer ignores its input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _common as common
from .depth_state import DepthState


class OutNorm(NamedTuple):
    """The layer-norm applied to a boundary's output: (D,) weight and bias, and eps."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, state, k, want_x, dropout_p, seed, out_norm_eps, branch, residual, column, gain,
        shift, out_weight, out_bias, token,
    ):  # fmt: skip
        replay = k < state.pushed
        y = common.rows(branch)
        rest = None if residual is None else common.rows(residual)
        if not replay:
            state.open_slot(k, y)
        w, b = common.parameter(out_weight, y.dtype), common.parameter(out_bias, y.dtype)
        # Results have the shape of the branch from the start: a view could not be changed in place.
        x = y.new_empty(branch.shape) if want_x else None
        out = mean = rstd = None
        if out_norm_eps is not None:
            out = y.new_empty(branch.shape)
            mean = state.weight.new_empty(y.shape[0])
            rstd = torch.empty_like(mean)
        x_rows, out_rows = (None if r is None else r.view(y.shape) for r in (x, out))
        state.launch.boundary_forward(
            None if replay else y, rest, dropout_p, seed, state.states, k, state.near(k),
            state.weight, k, state.gain, state.shift, state.normalised[k], state.eps,
            state.partial(k), w, b, out_norm_eps or 0.0, x_rows, out_rows, state.rstd[k], mean,
            rstd,
        )  # fmt: skip
        if not replay:
            if any(ctx.needs_input_grad):
                state.lowest = min(state.lowest, k)
            if k == state.rows - 1:
                state.finish_forward()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w, b, mean, rstd)
        ctx.state, ctx.k, ctx.dropout, ctx.shape = state, k, (dropout_p, seed), branch.shape
        ctx.replay = replay
        ctx.dtypes = [None if p is None else p.dtype for p in (column, gain, shift)]
        ctx.out_dtypes = [None if p is None else p.dtype for p in (out_weight, out_bias)]
        return x, out, y.new_empty(0)

    @staticmethod
    @common.first_order("DLCL")
    def backward(ctx, dx, dout, _token):
        state, k = ctx.state, ctx.k
        if ctx.replay:
            raise RuntimeError(
                "DLCL: backward through a boundary that was made again from the states; checkpoint "
                "it with use_reentrant=False, and push each state once"
            )
        w, b, mean, rstd = ctx.saved_tensors
        need = dict(
            zip(
                ("branch", "residual", "column", "gain", "shift", "out_weight", "out_bias"),
                ctx.needs_input_grad[6:13],
                strict=True,
            )
        )
        state.enter(k, torch._C._current_graph_task_id())
        like = state.states[k]
        if dx is None and dout is None:
            dx = torch.zeros_like(like)
        dx, dout = (None if g is None else common.rows(g) for g in (dx, dout))

        def empty(name, shape):
            return shape.new_empty(shape.shape) if need[name] else None

        channels = state.weight.new_empty(like.shape[1])
        dbranch = empty("branch", like)
        same = ctx.dropout[0] == 0 and need["branch"]
        dresidual = dbranch if same and need["residual"] else empty("residual", like)
        dgain, dshift = empty("gain", channels), empty("shift", channels)
        dout_weight = dout_bias = None
        if dout is not None:
            dout_weight, dout_bias = empty("out_weight", channels), empty("out_bias", channels)
        pulls = state.near_pull(k)
        state.launch.boundary_backward(
            state.states, k, state.near(k), state.weight, k, state.gain, state.shift,
            state.normalised[k], state.partial(k) if dout is not None else None, w, b,
            state.rstd[k], mean, rstd, *ctx.dropout, dx, dout, state.grads, state.grad_slot(k),
            k, pulls, [state.grad_slot(r) for r in pulls], state.far_pull(k), dbranch,
            None if dresidual is dbranch else dresidual, state.dweight, dgain, dshift,
            dout_weight, dout_bias,
        )  # fmt: skip
        # One tensor for both inputs where they are alike: two views of it would be taken by two
        # leaves as gradients of their own, and share memory ever after.
        dbranch_out = None if dbranch is None else dbranch.view(ctx.shape)
        dresidual_out = dbranch_out
        if dresidual is not dbranch:
            dresidual_out = None if dresidual is None else dresidual.view(ctx.shape)
        dcolumn = None
        if need["column"]:
            dcolumn = state.dweight[:, k].to(ctx.dtypes[0], copy=True)
        state.leave(k)

        def cast(grad, dtype):
            return None if grad is None else grad.to(dtype)

        return (
            *(None,) * 6,
            dbranch_out,
            dresidual_out if need["residual"] else None,
            dcolumn,
            cast(dgain, ctx.dtypes[1]),
            cast(dshift, ctx.dtypes[2]),
            cast(dout_weight, ctx.out_dtypes[0]),
            cast(dout_bias, ctx.out_dtypes[1]),
            None,
        )


def boundary(
    state: DepthState,
    k: int,
    branch: Tensor,
    *,
    residual: Tensor | None = None,
    column: Tensor,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    out_norm: OutNorm | None = None,
    want_x: bool = True,
    dropout_p: float = 0.0,
    seed: int | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Pushes ``y_k = residual + dropout(branch)`` and reads row k of the depth weights.

    ``x = sum_{j<=k} W[k, j] z_j`` and ``out = LN(x)`` with ``out_norm``. Operands are trusted;
    `deepfast.nn.DLCL` checks them. A ``k`` that was pushed before makes x and out again from the
    states, as recomputation under checkpointing needs; ``branch`` then only tells the shape.

    Args:
        state: the engine's memory of this forward pass.
        k: index of the state and of the row.
        branch, residual: (..., D).
        column: ``W[:, k]``, (L+1,) or (L+1, D), the carrier of the weight's gradient.
        gain, shift: (D,), the carriers of the gradients of state k's gain and shift.
        out_norm: the next layer's first layer-norm.
        want_x: whether x itself is wanted.
        dropout_p, seed: of the mask on ``branch``.
        token: the third result of the boundary before.

    Returns:
        (x or None, out or None, token).
    """
    out_weight, out_bias, eps = out_norm if out_norm is not None else (None, None, None)
    seed = common.draw_seed(seed) if dropout_p > 0 else 0
    return _Boundary.apply(
        state, k, want_x, dropout_p, seed, eps, branch, residual, column, gain, shift,
        out_weight, out_bias, token,
    )  # fmt: skip
