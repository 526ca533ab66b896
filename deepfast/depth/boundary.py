"""The boundary between two layers as one autograd node over a `DepthState`.

In the chain ``boundary_l -> layer -> boundary_{l+1}`` the node of state k runs after every
consumer of z_k, so it can pull that state's whole gradient. A token, an empty tensor handed from
node to node, keeps that order even where a layer ignores its input. The chain of tokens starts at
the node that holds the connection's parameters, so backward reaches it last, when every row's part
of their gradients is there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deepfast.depth.state import DepthState
from deepfast.ops import common


class OutNorm(NamedTuple):
    """The layer-norm applied to a boundary's output: (D,) weight and bias, and eps."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class _Parameters(torch.autograd.Function):
    """Where the gradients of depth weights and norms leave the engine."""

    @staticmethod
    def forward(ctx, state, weight, norm_weight, norm_bias):
        ctx.state = state
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, norm_weight, norm_bias)]
        return weight.new_empty(0)

    @staticmethod
    @common.first_order("DLCL")
    def backward(ctx, _token):
        grads = ctx.state.take_parameter_grads()
        needs = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                grad.to(dtype) if need else None
                for grad, dtype, need in zip(grads, ctx.dtypes, needs, strict=True)
            ),
        )


def parameters(
    state: DepthState, weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> Tensor | None:
    """The token that a pass starts with: backward through it brings the parameters' gradients.

    weight: W as applied, (L+1, L+1) or (L+1, L+1, D). norm_weight, norm_bias: (L+1, D). None where
    nothing is to be learned.
    """
    if not (state.need_weight_grad or state.need_norm_grad):
        return None
    return _Parameters.apply(state, weight, norm_weight, norm_bias)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, branch, residual, out_weight, out_bias, _token):
        state, k, want_x, dropout_p, seed, out_eps = call
        y = common.rows(branch)
        rest = None if residual is None else common.rows(residual)
        replay = k < state.pushed
        if not replay:
            state.open_slot(k, y)
        # Results have the shape of the branch from the start: a view could not be changed in place.
        x = x_rows = out = out_rows = w = b = mean = rstd = None
        if want_x:
            x = common.empty_contiguous(branch)
            x_rows = x if y is branch else x.view(y.shape)
        if out_eps is not None:
            if out_weight is None:
                w, b = state.own_norm(k)
            else:
                w, b = common.parameter(out_weight, y.dtype), common.parameter(out_bias, y.dtype)
            out = common.empty_contiguous(branch)
            out_rows = out if y is branch else out.view(y.shape)
            mean, rstd = state.out_statistics(k)
            ctx.save_for_backward(w, b)
            # Those of the parameters: what is saved is in the compute dtype.
            ctx.dtypes = getattr(out_weight, "dtype", None), getattr(out_bias, "dtype", None)
        state.launch.boundary_forward(
            None if replay else y, rest, dropout_p, seed, state.states, k, state.near(k),
            state.weight, k, state.gain, state.shift, state.normalised[k], state.eps,
            state.partial(k), w, b, out_eps or 0.0, x_rows, out_rows, state.rstd[k], mean, rstd,
        )  # fmt: skip
        if not replay:
            if k < state.lowest and True in ctx.needs_input_grad:
                state.lowest = k
            if k == state.rows - 1:
                state.finish_forward()
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape, ctx.replay = call, branch.shape, replay
        return x, out, torch.empty(0)

    @staticmethod
    @common.first_order("DLCL")
    def backward(ctx, dx, dout, _token):
        state, k, _, dropout_p, seed, out_eps = ctx.call
        if ctx.replay:
            raise RuntimeError(
                "DLCL: backward through a boundary that was made again from the states; checkpoint "
                "it with use_reentrant=False, and push each state once"
            )
        state.enter(k, torch._C._current_graph_task_id())
        w = b = mean = rstd = None
        if out_eps is not None:
            w, b = ctx.saved_tensors
            mean, rstd = state.out_statistics(k)
        need_branch, need_residual, need_weight, need_bias = ctx.needs_input_grad[1:5]
        like = state.states[k]
        if dx is None and dout is None:
            dx = torch.zeros_like(like)
        dx, dout = (None if g is None else common.rows(g) for g in (dx, dout))

        def fresh(need):
            return like.new_empty(ctx.shape) if need else None

        # One tensor for both inputs where they are alike: two views of it would be taken by two
        # leaves as gradients of their own, and share memory ever after.
        shared = dropout_p == 0 and need_branch and need_residual
        dbranch = fresh(need_branch)
        dresidual = None if shared else fresh(need_residual)
        dgain, dshift, dout_weight, dout_bias = state.norm_grads(
            k, dout is not None, need_weight, need_bias
        )
        pulls = state.near_pull(k)
        state.launch.boundary_backward(
            state.states, k, state.near(k), state.weight, k, state.gain, state.shift,
            state.normalised[k], state.partial(k) if dout is not None else None, w, b,
            state.rstd[k], mean, rstd, dropout_p, seed, dx, dout, state.grads, state.grad_slot(k),
            k, pulls, [state.grad_slot(r) for r in pulls], state.far_pull(k),
            *(None if g is None else g.view(like.shape) for g in (dbranch, dresidual)),
            state.dweight, dgain, dshift, dout_weight, dout_bias,
        )  # fmt: skip
        state.leave(k)
        if need_weight and dout_weight is not None:
            dout_weight = dout_weight.to(ctx.dtypes[0])
        if need_bias and dout_bias is not None:
            dout_bias = dout_bias.to(ctx.dtypes[1])
        return (
            None,
            dbranch,
            dbranch if shared else dresidual,
            dout_weight if need_weight else None,
            dout_bias if need_bias else None,
            None,
        )


_apply = common.bare_apply(_Boundary)


def boundary(
    state: DepthState,
    k: int,
    branch: Tensor,
    *,
    residual: Tensor | None = None,
    out_norm: OutNorm | None = None,
    want_x: bool = True,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
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
        out_norm: the next layer's first layer-norm. Where row k has a norm of its own
            (``state.own_norms``), x is None and out is normed by that.
        want_x: whether x itself is wanted.
        dropout_p, seed: of the mask on ``branch``; a 0-dim int64 tensor.
        token: the third result of the boundary before, or of `parameters`.

    Returns:
        (x or None, out or None, token).
    """
    if state.own_norms[k]:
        call = (state, k, False, dropout_p, seed, state.eps)
        return _apply(call, branch, residual, None, None, token)
    weight, bias, eps = (None, None, None) if out_norm is None else out_norm
    call = (state, k, want_x, dropout_p, seed, eps)
    return _apply(call, branch, residual, weight, bias, token)


@torch.no_grad()
def mixed_again(
    state: DepthState, k: int, out_norm: OutNorm | None, want_x: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """(x, out) of boundary k as it gave them, (T, D), mixed again from the states below it.

    Its block's partial sums are made for the block's last row and serve the others: backward, which
    asks from the top, reads each state as often as forward did.
    """
    state.check_readable(k)
    like = state.states[k]
    x = out = w = b = mean = rstd = None
    eps = 0.0
    if state.own_norms[k]:
        (w, b), eps, want_x = state.own_norm(k), state.eps, False
    elif out_norm is not None:
        w, b = (common.parameter(p, like.dtype) for p in out_norm[:2])
        eps = out_norm.eps
    if want_x:
        x = like.new_empty(like.shape)
    if w is not None:
        out = like.new_empty(like.shape)
        mean, rstd = state.out_statistics(k)
    state.launch.boundary_forward(
        None, None, 0.0, None, state.states, k, state.near(k), state.weight, k, state.gain,
        state.shift, state.normalised[k], state.eps, state.partial(k), w, b, eps, x, out,
        state.rstd[k], mean, rstd,
    )  # fmt: skip
    return x, out
