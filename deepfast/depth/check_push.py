"""What a `DepthConnection` checks before a push: its operands, and its place in the pass."""

import torch
from torch import Tensor

from deepfast import checks
from deepfast.depth.boundary import OutNorm, nearest_passes
from deepfast.depth.history import DepthHistory


def check_push(
    connection,
    y: Tensor,
    residual: Tensor | None,
    history: DepthHistory,
    index: int | None,
    dropout_p: float,
    out_norm: OutNorm | None,
) -> int:
    """Checks a push and returns its index k. It changes nothing."""
    op = connection.name
    if not isinstance(history, DepthHistory):
        raise TypeError(f"{op}: history must be a DepthHistory, got {type(history).__name__}")
    kind = y.shape, y.dtype, y.device
    # A state of the same kind as the first one of this pass needs no further check.
    if history.owner is not connection or history.kind != kind:
        check_state(connection, y)
        _check_alike(connection, y, history)
    checks.probability(op, dropout_p)
    if residual is not None and (residual.shape, residual.dtype, residual.device) != kind:
        checks.like(op, "residual", residual, "the branch", y)
    if out_norm is not None:
        _check_out_norm(connection, out_norm, y)
    k = _check_index(connection, history, index)
    if out_norm is not None and connection.norm == "post" and connection.has_norm(k):
        raise ValueError(f"{op}: a post-norm boundary has its own LN; out_norm must be None")
    return k


def check_state(connection, y: Tensor) -> None:
    """Checks the width, the dtype and the device of what is pushed."""
    op = connection.name
    if not y.is_floating_point():
        raise ValueError(f"{op}: the input must have a floating-point dtype, got {y.dtype}")
    if y.shape[-1] != connection.dim:
        raise ValueError(f"{op}: the input must be (..., {connection.dim}), got {tuple(y.shape)}")
    if y.device != connection.device:
        raise ValueError(f"{op}: the input must be on {connection.device}, got {y.device}")


def _check_alike(connection, y: Tensor, history: DepthHistory) -> None:
    if history.owner is not connection or history.kind is None:
        return
    shape, dtype, device = history.kind
    expected, got = shape.numel() // connection.dim, y.numel() // connection.dim
    if (expected, dtype, device) != (got, y.dtype, y.device):
        raise ValueError(
            f"{connection.name}: the states of a pass must be alike: expected {expected} tokens of "
            f"{dtype} on {device}, got {got} of {y.dtype} on {y.device}"
        )


def _check_out_norm(connection, out_norm: OutNorm, y: Tensor) -> None:
    op = connection.name
    if not isinstance(out_norm, OutNorm):
        raise TypeError(
            f"{op}: out_norm must be an OutNorm (LayerNorm.as_output() or RMSNorm.as_output()), "
            f"got {type(out_norm).__name__}"
        )
    checks.eps(op, out_norm.eps, argument="out_norm.eps")
    for name, p in (("weight", out_norm.weight), ("bias", out_norm.bias)):
        checks.parameter(op, f"out_norm.{name}", p, (connection.dim,), y.device)


def _check_index(connection, history: DepthHistory, index: int | None) -> int:
    """The index k of this push: the next one or, in backward, a recomputed one."""
    op = connection.name
    if history.owner is not None and history.owner is not connection:
        raise RuntimeError(
            f"{op}: this history belongs to another stack; make a DepthHistory for each stack "
            "and each forward pass"
        )
    if history.traced:
        raise RuntimeError(
            f"{op}: this pass began inside torch.compile and goes on outside; make its history "
            "outside of the compiled function or with eager=True, or compile the whole stack with "
            "fullgraph=True"
        )
    if index is not None and not checks.is_whole(index):
        raise TypeError(f"{op}: index must be a whole number, got {index!r}")
    pushed, begun = len(history), history.state is not None
    k = pushed if index is None else index
    task = torch._C._current_graph_task_id()
    # A pass that began in this backward pass recomputes a whole stack, which is allowed.
    if k >= pushed and begun and task not in (-1, history.task):
        raise RuntimeError(
            f"{op}: a push during the backward pass of another forward pass; under checkpointing "
            "pass index= and use, in each recomputation, the history of its own forward pass"
        )
    if k >= connection.rows:
        raise RuntimeError(
            f"{op}: {connection.num_layers} layers push {connection.rows} states, and this "
            f"history has them all; expected a new DepthHistory for a new forward pass"
        )
    if not 0 <= k <= pushed or (k < pushed and task == -1):
        already = ", which is pushed already" if 0 <= k < pushed else ""
        raise RuntimeError(
            f"{op}: layer called out of order: expected index {pushed}, got {k}{already}"
        )
    if k < pushed:
        _check_recomputed(history, k, task)
        return k
    if history.closed:
        raise RuntimeError(f"{op}: this history is closed; make a new one")
    if begun and history.state.released:
        raise RuntimeError(f"{op}: this history's backward has ended; make a new one")
    if begun and history.grad_mode != torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: grad mode changed within a pass; push every state under the grad mode of the "
            "first push (reentrant checkpointing changes it: use use_reentrant=False), and "
            "detach the output of a layer that must not learn"
        )
    return k


def _check_recomputed(history: DepthHistory, k: int, task: int) -> None:
    """Checks a push that checkpointing repeats: it must belong to the pass of ``history``.

    The checkpointed function may refer to the wrong history, for example when a module keeps only
    the history of its last pass. So the check follows the graph down from the autograd node that
    runs now. The first boundaries on the way must belong to this pass. If there is no boundary on
    the way, this pass must be in the middle of its backward. The states up to k must still exist.
    """
    state, op = history.state, history.owner.name
    passes = nearest_passes(torch._C._current_autograd_node(), history.owner)
    if state not in passes and (passes or state.task != task):
        raise RuntimeError(
            f"{op}: push {k} is recomputed for another forward pass than its history's; make a "
            "DepthHistory in each forward pass, and let the checkpointed function refer to it, "
            "not to an attribute that the next forward pass replaces"
        )
    state.check_readable(k)
