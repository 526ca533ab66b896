"""The boundary between two layers: one autograd node that calls the kernels over a `DepthPass`.

In the chain ``boundary_l -> layer -> boundary_{l+1}`` the node of state k runs after everything
that reads z_k, so it can compute the whole gradient of that state. A token, which is an empty
tensor passed from node to node, keeps this order even where a layer ignores its input. The chain of
tokens starts at the node of the parameters. Backward reaches that node last, when every row has
added its part of the parameters' gradients.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.history import DepthHistory
from deepfast.depth.push import OutNorm, Push
from deepfast.ops import common


@common.traced_as("boundary_parameters")
class ParameterGradients(torch.autograd.Function):
    """The first token of a pass. Returns the parameters' gradients when backward ends.

    parameters: those whose gradients `DepthPass.take_grads` returns.
    """

    @staticmethod
    def forward(ctx, depth_pass, *parameters):
        ctx.depth_pass = depth_pass
        return parameters[0].new_empty(0)

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, _token):
        ctx.depth_pass.check_task(torch._C._current_graph_task_id())
        grads = ctx.depth_pass.take_grads()
        pairs = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(grad if need else None for grad, need in pairs)


@common.traced_as("boundary")
class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, push, branch, residual, _norm_weight, _norm_bias, _token):
        depth_pass, k = push.depth_pass, push.k
        push.branch = None if push.recomputed else common.rows(branch)
        push.residual = common.rows(residual)
        push.norm = depth_pass.norm_behind(k, push.out_norm)
        # Results are allocated in the branch's shape. The caller could not modify a view of a
        # (T, D) tensor in place.
        x = common.empty_contiguous(branch) if push.return_x else None
        out = None if push.norm is None else common.empty_contiguous(branch)
        push.x, push.out = common.rows(x), common.rows(out)
        depth_pass.forward(push)
        if not push.recomputed and k < depth_pass.lowest:
            if True in ctx.needs_input_grad:
                depth_pass.lowest = k
            elif push.index is not None:
                depth_pass.needed_below = True
        saved = [] if push.out_norm is None else [push.norm.weight, push.norm.bias]
        if push.index is not None:
            # Checkpointing compares the shapes of saved tensors. This one has another shape when a
            # recomputed push has another index.
            saved.append(torch.empty(0, k))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        push.branch = push.residual = push.norm = push.x = push.out = None
        ctx.push, ctx.shape = push, branch.shape
        return x, out, torch.empty(0)

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, dx, dout, _token):
        push = ctx.push
        depth_pass, k, given = push.depth_pass, push.k, push.out_norm
        if push.recomputed:
            raise RuntimeError(
                f"{depth_pass.owner.name}: backward through a recomputed push; checkpoint it with "
                "use_reentrant=False, and push each state once"
            )
        depth_pass.enter(k, torch._C._current_graph_task_id())
        # Under checkpointing this line may recompute the push. Its states still exist.
        saved = ctx.saved_tensors
        push.norm = depth_pass.own_norms[k] if given is None else OutNorm(*saved[:2], *given[2:])
        need_branch, need_residual, *need_norm = ctx.needs_input_grad[1:5]
        if dx is None and dout is None:
            dx = depth_pass.states.new_zeros(ctx.shape)
        like = dx if dout is None else dout
        # Where both inputs have the same gradient, both get the same tensor object. Two views of it
        # would become the .grad of two leaves, which would then share memory.
        shared = push.dropout_p == 0 and need_branch and need_residual
        dbranch = common.empty_contiguous(like) if need_branch else None
        dresidual = common.empty_contiguous(like) if need_residual and not shared else None
        push.dnorm = None, None
        if dout is not None and given is None:
            push.dnorm = depth_pass.own_norm_grads[k]
        elif dout is not None:
            dim = depth_pass.states.shape[2]
            push.dnorm = tuple(depth_pass.like.new_empty(dim) if n else None for n in need_norm)
        push.dx, push.dout = common.rows(dx), common.rows(dout)
        push.dbranch, push.dresidual = common.rows(dbranch), common.rows(dresidual)
        depth_pass.backward(push)
        # Autograd casts them to the dtypes of the norm's weight and bias.
        dnorm = (None, None) if given is None else push.dnorm
        push.norm = push.dx = push.dout = push.dbranch = push.dresidual = None
        push.dnorm = None, None
        return None, dbranch, dbranch if shared else dresidual, *dnorm, None


# `apply` without the slow Python layer of autograd.Function.
_apply = common.bare_apply(_Boundary)


def boundary(push: Push, history: DepthHistory) -> tuple[Tensor | None, Tensor | None]:
    """Pushes ``y_k = residual + dropout(branch)`` and reads row k of W.

    ``x = sum_{j<=k} W[k,j] z_j`` and ``out = LN(x)``. `DepthConnection` has checked the push. Where
    state k was pushed before, the branch only gives the shape.

    Returns:
        (x or None, out or None).
    """
    depth_pass, k = push.depth_pass, push.k
    token = history.token
    if push.recomputed:
        # Only the results of this node are used. Checkpointing counts the tensors that it saves.
        # That number depends on what requires a gradient, so the token must be like the first one.
        token = torch.empty(0, requires_grad=depth_pass.any_learns or k > depth_pass.lowest)
    branch, residual, given = push.branch, push.residual, push.out_norm
    weight, bias = (None, None) if given is None else given[:2]
    x, out, token = _apply(push, branch, residual, weight, bias, token)
    if not push.recomputed:
        history.token = token
        if k == depth_pass.rows - 1:
            history.close()
            depth_pass.end_forward()
    return x, out


@torch.no_grad()
def recompute_row(
    depth_pass: DepthPass, k: int, out_norm: OutNorm | None, return_x: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Recomputes the results of boundary k, (T, D), from the states up to k, bit for bit as
    forward: the layer's input, which is x or its norm, and the norm of x beside it or None.

    The first call for a block computes the partial sums of all its rows. Backward goes through the
    rows from the top down, so it reads each state as often as forward did.
    """
    depth_pass.check_readable(k)
    norm, like = depth_pass.norm_behind(k, out_norm), depth_pass.states[k]
    push = Push(None, out_norm=out_norm)
    push.depth_pass, push.k, push.recomputed, push.norm = depth_pass, k, True, norm
    if return_x and depth_pass.own_norms[k] is None:
        push.x = like.new_empty(like.shape)
    if norm is not None:
        push.out = like.new_empty(like.shape)
    depth_pass.forward(push)
    return (push.out, None) if push.x is None else (push.x, push.out)


def nearest_passes(node: torch.autograd.graph.Node | None, owner: object) -> set[DepthPass]:
    """The passes of the stack ``owner`` that the gradient of ``node`` flows into.

    On each path the search stops at the first boundary of this stack. A boundary below it may
    belong to another pass.
    """
    # torch's types do not say what a node of ours has.
    kind: Any = _Boundary._backward_cls
    passes, seen, queue = set(), {node}, deque([node])
    while queue:
        node = queue.popleft()
        if isinstance(node, kind) and node.push.depth_pass.owner is owner:
            passes.add(node.push.depth_pass)
            continue
        for below, _ in () if node is None else node.next_functions:
            if below not in seen:
                seen.add(below)
                queue.append(below)
    return passes
