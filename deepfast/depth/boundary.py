"""The boundary between two layers: one autograd node that calls the kernels over a `DepthState`.

In the chain ``boundary_l -> layer -> boundary_{l+1}`` the node of state k runs after everything
that reads z_k, so it can compute the whole gradient of that state. A token, which is an empty
tensor passed from node to node, keeps this order even where a layer ignores its input. The chain of
tokens starts at the node of the parameters. Backward reaches that node last, when every row has
added its part of the parameters' gradients.
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepfast.depth.history import DepthHistory
from deepfast.depth.state import DepthState
from deepfast.ops import common


class OutNorm(NamedTuple):
    """The norm applied to a boundary's output: weight and bias, each (D,) or None, and eps; ``rms``
    makes it an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


@common.traced_as("boundary_parameters")
class _Parameters(torch.autograd.Function):
    """Starts the chain of tokens, and returns the parameters' gradients when backward ends."""

    @staticmethod
    def forward(ctx, state, *parameters):
        ctx.state = state
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        return parameters[0].new_empty(0)

    @staticmethod
    @common.first_order("depth connection")
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


def first_token(state: DepthState, *parameters: Tensor | None) -> Tensor | None:
    """The first token of a pass; None where nothing of ``parameters`` needs a gradient.

    parameters: what `DepthState.take_parameter_grads` returns the gradients of.
    """
    if not state.any_learns:
        return None
    return _Parameters.apply(state, *parameters)


@common.traced_as("boundary")
class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, branch, residual, out_norm_weight, out_norm_bias, _token):
        state, k, indexed, want_x, dropout_p, seed, out_eps, out_rms = call
        branch_rows = common.rows(branch)
        residual_rows = None if residual is None else common.rows(residual)
        recomputed = k < state.pushed
        if not recomputed:
            state.open_slot(k, branch_rows)
            if state.running[k]:
                before = state.states[k - 1]
                residual_rows = before if residual is None else residual_rows + before
        # Results are allocated in the branch's shape. The caller could not modify a view of a
        # (T, D) tensor in place.
        x = x_rows = out = out_rows = out_mean = out_rstd = None
        flat = branch_rows is branch
        if want_x:
            x = common.empty_contiguous(branch)
            x_rows = x if flat else x.view(branch_rows.shape)
        if out_eps is not None:
            # The parameters' own dtypes; the saved copies have the compute dtype.
            weight_dtype = getattr(out_norm_weight, "dtype", None)
            ctx.dtypes = weight_dtype, getattr(out_norm_bias, "dtype", None)
            if state.norm_out[k]:
                out_norm_weight, out_norm_bias = state.out_parameters(k)
            else:
                out_norm_weight = common.parameter(out_norm_weight, branch.dtype)
                out_norm_bias = common.parameter(out_norm_bias, branch.dtype)
            out = common.empty_contiguous(branch)
            out_rows = out if flat else out.view(branch_rows.shape)
            out_mean, out_rstd = state.out_statistics(k, out_rms)
        state.weights.forward(
            state, k, None if recomputed else branch_rows, residual_rows, dropout_p, seed,
            state.partial(k), out_norm_weight, out_norm_bias, out_eps or 0.0, out_rms, x_rows,
            out_rows, out_mean, out_rstd,
        )  # fmt: skip
        if not recomputed and k < state.lowest:
            if True in ctx.needs_input_grad:
                state.lowest = k
            elif indexed:
                state.needed_below = True
        if indexed:
            # Checkpointing compares the shapes of saved tensors. The last one has another shape
            # when a recomputed push has another index.
            ctx.save_for_backward(out_norm_weight, out_norm_bias, torch.empty(0, k))
        elif out_eps is not None:
            ctx.save_for_backward(out_norm_weight, out_norm_bias)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape, ctx.recomputed = call, branch.shape, recomputed
        return x, out, torch.empty(0)

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, dx, dout, _token):
        state, k, indexed, _, dropout_p, seed, out_eps, out_rms = ctx.call
        if ctx.recomputed:
            raise RuntimeError(
                f"{state.owner.name}: backward through a recomputed push; checkpoint it with "
                "use_reentrant=False, "
                "and push each state once"
            )
        state.enter(k, torch._C._current_graph_task_id())
        out_norm_weight = out_norm_bias = out_mean = out_rstd = None
        if indexed or out_eps is not None:
            # Under checkpointing this line may recompute the push. Its states still exist.
            out_norm_weight, out_norm_bias = ctx.saved_tensors[:2]
        if out_eps is not None:
            out_mean, out_rstd = state.out_statistics(k, out_rms)
        need_branch, need_residual, need_weight, need_bias = ctx.needs_input_grad[1:5]
        like = state.states[k]
        if dx is None and dout is None:
            dx = torch.zeros_like(like)
        dx, dout = (None if g is None else common.rows(g) for g in (dx, dout))

        def fresh(need):
            return like.new_empty(ctx.shape) if need else None

        # Where both inputs have the same gradient, both get the same tensor object. Two views of it
        # would become the .grad of two leaves, which would then share memory.
        shared = dropout_p == 0 and need_branch and need_residual
        dbranch = fresh(need_branch)
        dresidual = None if shared else fresh(need_residual)
        # A tensor of its own, because callers may modify the gradients that they get.
        carried = torch.empty_like(like) if state.running[k] else None
        pulled = state.pulled(k)
        dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias = state.norm_grads(
            k, dout is not None, need_weight, need_bias
        )
        partial = state.partial(k) if dout is not None or state.weights.mixes_again else None
        written = dresidual if carried is None else carried
        dbranch_rows, written = (
            None if d is None else d.view(like.shape) for d in (dbranch, written)
        )
        state.weights.backward(
            state, k, partial, out_norm_weight, out_norm_bias, out_rms, out_mean, out_rstd,
            dropout_p, seed, dx, dout, state.near_pull(k), pulled, dbranch_rows, written,
            dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias,
        )  # fmt: skip
        if carried is not None and dresidual is not None:
            dresidual.copy_(carried.view(ctx.shape))
        state.carried = carried
        state.leave(k)
        if not need_weight or dout_norm_weight is None:
            dout_norm_weight = None
        else:
            dout_norm_weight = dout_norm_weight.to(ctx.dtypes[0])
        if not need_bias or dout_norm_bias is None:
            dout_norm_bias = None
        else:
            dout_norm_bias = dout_norm_bias.to(ctx.dtypes[1])
        dresidual = dbranch if shared else dresidual
        return None, dbranch, dresidual, dout_norm_weight, dout_norm_bias, None


# `apply` without the slow Python layer of autograd.Function.
_apply = common.bare_apply(_Boundary)


def push(
    history: DepthHistory,
    k: int,
    branch: Tensor,
    *,
    residual: Tensor | None,
    out_norm: OutNorm | None,
    want_x: bool,
    dropout_p: float,
    seed: Tensor | None,
    indexed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Pushes ``y_k = residual + dropout(branch)`` and reads row k of W.

    ``x = sum_{j<=k} W[k,j] z_j`` and ``out = LN(x)``. `DLCL` has checked the operands. Where state
    k was pushed before, x and out are recomputed from the states, and ``branch`` only gives the
    shape.

    Args:
        history: the history of this forward pass, which has begun.
        k: index of the state and of the row.
        branch, residual: (..., D).
        out_norm: the next layer's first norm. Where row k has a layer-norm of the stack
            (``state.norm_out``), x is None and out is the result of that one.
        want_x: whether to return x.
        dropout_p, seed: probability and seed (a 0-dim int64 tensor) of the mask on ``branch``.
        indexed: whether the caller gave k; checkpointing may then repeat the push.

    Returns:
        (x or None, out or None).
    """
    state = history.state
    recomputed = k < state.pushed
    token = history.token
    if recomputed:
        # Only the results of this node are used. Checkpointing counts the tensors that it saves.
        # That number depends on what requires a gradient, so the token must be like the first one.
        token = torch.empty(0, requires_grad=state.token_grad(k))
    weight = bias = eps = None
    rms = False
    if state.norm_out[k]:
        want_x, eps, rms = False, state.eps, state.rms
    elif out_norm is not None:
        weight, bias, eps, rms = out_norm
    call = state, k, indexed, want_x, dropout_p, seed, eps, rms
    x, out, token = _apply(call, branch, residual, weight, bias, token)
    if not recomputed:
        history.token = token
        if k == state.rows - 1 and not state.later:
            history.close()
            state.end_forward(history.grad_mode)
    return x, out


@common.traced_as("later_rows")
class _LaterRows(torch.autograd.Function):
    """Its backward runs before that of the boundaries, and gives them the rows' gradients."""

    @staticmethod
    def forward(ctx, state, _token):
        ctx.state = state
        out, lse = state.later_rows()
        if lse is not None:
            ctx.save_for_backward(out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, g, dlse):
        state = ctx.state
        out, lse = ctx.saved_tensors or (None, None)
        if g is None and dlse is not None:
            g = torch.zeros_like(out)
        if g is not None:
            state.enter_later(torch._C._current_graph_task_id(), out, lse, g.contiguous(), dlse)
        return None, None


def later_rows(history: DepthHistory) -> tuple[Tensor, Tensor | None]:
    """Ends a pass that has rows after its last state: their sums (R, T, D) and lse (R, T).

    Other stages of a pipeline go on with these rows. The gradient of a sum is its row's g_l.
    """
    state = history.state
    out, lse = _LaterRows.apply(state, history.token)
    history.close()
    state.end_forward(history.grad_mode)
    return out, lse


@torch.no_grad()
def recompute_row(
    state: DepthState, k: int, out_norm: OutNorm | None, want_x: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Recomputes (x, out) of boundary k, (T, D), from the states up to k, bit for bit as `push`.

    The first call for a block computes the partial sums of all its rows. Backward goes through the
    rows from the top down, so it reads each state as often as forward did.
    """
    state.check_readable(k)
    like = state.states[k]
    x = out = out_norm_weight = out_norm_bias = out_mean = out_rstd = out_eps = None
    out_rms = False
    if state.norm_out[k]:
        out_norm_weight, out_norm_bias = state.out_parameters(k)
        out_eps, out_rms, want_x = state.eps, state.rms, False
    elif out_norm is not None:
        out_norm_weight = common.parameter(out_norm.weight, like.dtype)
        out_norm_bias = common.parameter(out_norm.bias, like.dtype)
        out_eps, out_rms = out_norm.eps, out_norm.rms
    if want_x:
        x = like.new_empty(like.shape)
    if out_eps is not None:
        out = like.new_empty(like.shape)
        out_mean, out_rstd = state.out_statistics(k, out_rms)
    state.weights.forward(
        state, k, None, None, 0.0, None, state.partial(k), out_norm_weight, out_norm_bias,
        out_eps or 0.0, out_rms, x, out, out_mean, out_rstd,
    )  # fmt: skip
    return x, out


def nearest_passes(node: torch.autograd.graph.Node | None, owner: object) -> set[DepthState]:
    """The passes of the stack ``owner`` that the gradient of ``node`` flows into.

    On each path the search stops at the first boundary of this stack. A boundary below it may
    belong to another pass.
    """
    # torch's types do not tell what a node of ours has.
    boundary: Any = _Boundary._backward_cls
    found, seen, queue = set(), {node}, deque([node])
    while queue:
        node = queue.popleft()
        if isinstance(node, boundary) and node.call[0].owner is owner:
            found.add(node.call[0])
            continue
        for below, _ in () if node is None else node.next_functions:
            if below not in seen:
                seen.add(below)
                queue.append(below)
    return found
