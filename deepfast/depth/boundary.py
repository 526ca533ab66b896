"""The boundary between two layers, and the caller's handle on the boundaries of one pass.

A boundary is one autograd node that calls the kernels over a `DepthPass`.

In the chain ``boundary_l -> layer -> boundary_{l+1}`` the node of state k runs after everything
that reads z_k, so it can compute the whole gradient of that state. A token, which is an empty
tensor passed from node to node, keeps this order even where a layer ignores its input. The chain of
tokens starts at the node of the parameters. Backward reaches that node last, when every row has
added its part of the parameters' gradients.
"""

import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepfast import checks
from deepfast.depth import in_graph
from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.rows import OutNorm, RowNorm
from deepfast.ops import common


class DepthHistory:
    """The states that the layers of one stack have produced in one forward pass.

    Make a new history for every forward pass and pass it to every call of the stack's connection
    (`DLCL`, `AttentionResiduals`). It owns one buffer with a state per layer; backward writes
    gradients into the same buffer. The buffer is freed when backward ends, or with the pass's
    outputs and this object. If nothing requires a gradient, as under `torch.no_grad`, the last push
    frees it. Several passes may be in progress at once, each with its own history. One pass belongs
    to one thread at a time: two threads that run backward of the same retained pass at once write
    into the same buffer, and no error is raised.

    Args:
        inplace: whether backward may overwrite states with gradients, so that it needs no more
            memory than one state per layer. False keeps the states, at twice the memory, so that a
            second backward with ``retain_graph=True`` works.
        block: rows per block, see `deepfast.depth`; None chooses by depth.
        eager: whether a push inside `torch.compile` leaves the graph and runs as in eager code, so
            that layers which push and are compiled one by one keep the memory and the traffic of
            eager code. False traces it. None traces where the history is made inside the compiled
            function; with ``fullgraph=True`` the graph then has the launches of eager code.
    """

    def __init__(
        self, *, inplace: bool = True, block: int | None = None, eager: bool | None = None
    ):
        if block is not None:
            checks.whole("DepthHistory", block=block)
        checks.flag("DepthHistory", inplace=inplace)
        if eager is not None:
            checks.flag("DepthHistory", eager=eager)
        # The number of the compiled graph that the history is made in, see in_graph.py.
        self.graph = in_graph.current() if torch.compiler.is_compiling() else 0
        self.eager = self.graph == 0 if eager is None else eager
        self.inplace = inplace
        self.block = block
        # The stack; shape, dtype and device of the first push.
        self.owner: Any = None
        self.kind: tuple[torch.Size, torch.dtype, torch.device] | None = None
        # Autograd nodes refer to the state, and the token refers to autograd nodes. The state must
        # not hold the token, which would be a reference cycle.
        self.state: DepthPass | None = None
        self.token: Tensor | None = None
        # Grad mode of the first push, and the backward pass (graph task) that it ran in; -1 outside
        # of backward.
        self.grad_mode = False
        self.task = -1
        # A traced pass has no `state`. It keeps the connection's `pass_parameters` and, until the
        # last push, the states as they are mixed; None each, where the graph holds the pass.
        self.parameters: tuple[Tensor | None, ...] = ()
        self.traced: list[Tensor | None] = []
        self.far: Any = None
        self.closed = False

    def __len__(self) -> int:
        """States pushed so far."""
        return len(self.traced) if self.state is None else self.state.pushed

    def __bool__(self) -> bool:
        """True, also before the first push: ``history or DepthHistory()`` keeps an empty one."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return 0 if self.state is None else self.state.nbytes

    def close(self) -> None:
        """Drops the reference to the graph; no further state can be pushed. The last push does it.

        Call it when a pass stops early and a checkpointed function refers to this history: the
        graph, the function and the history would otherwise keep each other alive.
        ``with DepthHistory() as history:`` closes it too.
        """
        self.token, self.parameters = None, ()
        self.closed = True

    def __enter__(self) -> "DepthHistory":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DepthHistory(states={len(self)}, inplace={self.inplace}, nbytes={self.nbytes})"


class Call(NamedTuple):
    """The arguments of one call of a connection, see `DepthConnection.forward`."""

    y: Tensor
    history: DepthHistory
    k: int | None
    """The argument ``index``; a named tuple has a method of that name."""
    residual: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    out_norm: OutNorm | None
    return_x: bool


class Push(NamedTuple):
    """One push without its tensors: ``y_k = residual + dropout(branch)``, and then row k."""

    run: DepthPass
    k: int
    dropout_p: float = 0.0
    seed: Tensor | None = None
    return_x: bool = True
    norm: tuple[float, bool] | None = None
    """eps and rms of an `OutNorm` that came with it."""
    indexed: bool = False
    """Whether the caller gave k; checkpointing may then repeat the push."""

    def row_norm(self, weight: Tensor | None, bias: Tensor | None) -> RowNorm:
        """The norm behind row k; weight and bias are those that came with the push."""
        given = None if self.norm is None else (weight, bias, *self.norm)
        return self.run.row_norm(self.k, given)


class PerThread(threading.local):
    """Attributes that each thread sets for itself. They are neither copied nor pickled."""

    def __reduce__(self):
        return type(self), ()


@common.traced_as("boundary_parameters")
class Parameters(torch.autograd.Function):
    """The first token of a pass. Returns the parameters' gradients when backward ends.

    parameters: those whose gradients `DepthPass.take_grads` returns.
    """

    @staticmethod
    def forward(ctx, run, *parameters):
        ctx.run = run
        return parameters[0].new_empty(0)

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, _token):
        ctx.run.check_task(torch._C._current_graph_task_id())
        grads = ctx.run.take_grads()
        pairs = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(grad if need else None for grad, need in pairs)


@common.traced_as("boundary")
class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, push, branch, residual, norm_weight, norm_bias, _token):
        run, k = push.run, push.k
        branch_rows, residual_rows = common.rows(branch), common.rows(residual)
        recomputed = k < run.pushed
        if not recomputed:
            run.open_slot(k, branch_rows)
            if run.running[k]:
                before = run.states[k - 1]
                residual_rows = before if residual is None else residual_rows + before
        if push.norm is not None:
            norm_weight = common.parameter(norm_weight, branch.dtype)
            norm_bias = common.parameter(norm_bias, branch.dtype)
        norm = push.row_norm(norm_weight, norm_bias)
        # Results are allocated in the branch's shape. The caller could not modify a view of a
        # (T, D) tensor in place.
        x = common.empty_contiguous(branch) if push.return_x else None
        out = None if norm.rstd is None else common.empty_contiguous(branch)
        pushed = None if recomputed else branch_rows, residual_rows
        run.forward_row(push, norm, pushed, (common.rows(x), common.rows(out)))
        if not recomputed and k < run.lowest:
            if True in ctx.needs_input_grad:
                run.lowest = k
            elif push.indexed:
                run.needed_below = True
        if push.indexed:
            # Checkpointing compares the shapes of saved tensors. The last one has another shape
            # when a recomputed push has another index.
            ctx.save_for_backward(norm_weight, norm_bias, torch.empty(0, k))
        elif push.norm is not None:
            ctx.save_for_backward(norm_weight, norm_bias)
        ctx.set_materialize_grads(False)
        ctx.push, ctx.shape, ctx.recomputed = push, branch.shape, recomputed
        return x, out, torch.empty(0)

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, dx, dout, _token):
        push = ctx.push
        run, k = push.run, push.k
        if ctx.recomputed:
            raise RuntimeError(
                f"{run.owner.name}: backward through a recomputed push; checkpoint it with "
                "use_reentrant=False, and push each state once"
            )
        run.enter(k, torch._C._current_graph_task_id())
        norm_weight = norm_bias = None
        if push.indexed or push.norm is not None:
            # Under checkpointing this line may recompute the push. Its states still exist.
            norm_weight, norm_bias = ctx.saved_tensors[:2]
        norm = push.row_norm(norm_weight, norm_bias)
        need_branch, need_residual, *need_norm = ctx.needs_input_grad[1:5]
        states = run.states
        if dx is None and dout is None:
            dx = states.new_zeros(ctx.shape)
        like = dx if dout is None else dout
        # Where both inputs have the same gradient, both get the same tensor object. Two views of it
        # would become the .grad of two leaves, which would then share memory.
        shared = push.dropout_p == 0 and need_branch and need_residual
        dbranch = common.empty_contiguous(like) if need_branch else None
        dresidual = common.empty_contiguous(like) if need_residual and not shared else None
        dnorm: Any = None, None
        if dout is not None and push.norm is None:
            dnorm = run.row_norm_grads[k] or dnorm
        elif dout is not None:
            dim = states.shape[2]
            dnorm = [norm.rstd.new_empty(dim) if need else None for need in need_norm]
        given = common.rows(dx), common.rows(dout)
        run.backward(push, norm, given, (common.rows(dbranch), common.rows(dresidual)), dnorm)
        # Autograd casts them to the dtypes of the norm's weight and bias.
        dnorm = (None, None) if push.norm is None else dnorm
        return None, dbranch, dbranch if shared else dresidual, *dnorm, None


# `apply` without the slow Python layer of autograd.Function.
_apply = common.bare_apply(_Boundary)


def boundary(
    history: DepthHistory,
    push: Push,
    branch: Tensor,
    residual: Tensor | None,
    out_norm: OutNorm | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Pushes ``y_k = residual + dropout(branch)`` and reads row k of W.

    ``x = sum_{j<=k} W[k,j] z_j`` and ``out = LN(x)``. `DepthConnection` has checked the operands.
    Where state k was pushed before, x and out are recomputed from the states, and ``branch`` only
    gives the shape.

    Args:
        history: the history of this forward pass, which has begun.
        branch, residual: (..., D).
        out_norm: the next layer's first norm. Where row k has a norm of the connection's own, x is
            None and out is the result of that one.

    Returns:
        (x or None, out or None).
    """
    run, k = push.run, push.k
    recomputed = k < run.pushed
    token = history.token
    if recomputed:
        # Only the results of this node are used. Checkpointing counts the tensors that it saves.
        # That number depends on what requires a gradient, so the token must be like the first one.
        token = torch.empty(0, requires_grad=run.any_learns or k > run.lowest)
    weight, bias = (None, None) if out_norm is None else out_norm[:2]
    x, out, token = _apply(push, branch, residual, weight, bias, token)
    if not recomputed:
        history.token = token
        if k == run.rows - 1:
            history.close()
            run.end_forward(history.grad_mode)
    return x, out


@torch.no_grad()
def recompute_row(
    run: DepthPass, k: int, out_norm: OutNorm | None, return_x: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Recomputes (x, out) of boundary k, (T, D), from the states up to k, bit for bit as forward.

    The first call for a block computes the partial sums of all its rows. Backward goes through the
    rows from the top down, so it reads each state as often as forward did.
    """
    run.check_readable(k)
    like = run.states[k]
    if run.row_norms[k] is not None:
        return_x = False
    elif out_norm is not None:
        weight, bias = (common.parameter(p, like.dtype) for p in out_norm[:2])
        out_norm = out_norm._replace(weight=weight, bias=bias)
    norm = run.row_norm(k, out_norm)
    x = like.new_empty(like.shape) if return_x else None
    out = None if norm.rstd is None else like.new_empty(like.shape)
    run.forward_row(Push(run, k), norm, (None, None), (x, out))
    return x, out


def nearest_passes(node: torch.autograd.graph.Node | None, owner: object) -> set[DepthPass]:
    """The passes of the stack ``owner`` that the gradient of ``node`` flows into.

    On each path the search stops at the first boundary of this stack. A boundary below it may
    belong to another pass.
    """
    # torch's types do not say what a node of ours has.
    kind: Any = _Boundary._backward_cls
    found, seen, queue = set(), {node}, deque([node])
    while queue:
        node = queue.popleft()
        if isinstance(node, kind) and node.push.run.owner is owner:
            found.add(node.push.run)
            continue
        for below, _ in () if node is None else node.next_functions:
            if below not in seen:
                seen.add(below)
                queue.append(below)
    return found
