"""What `DLCL` checks before a push: its operands, and its place in the pass."""

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import OutNorm, nearest_passes
from deepfast.depth.history import DepthHistory


def check_push(
    dlcl,
    y: Tensor,
    residual: Tensor | None,
    history: DepthHistory,
    index: int | None,
    dropout_p: float,
    out_norm: OutNorm | None,
) -> int:
    """Checks a push and returns its index k. It changes nothing."""
    if not isinstance(history, DepthHistory):
        raise TypeError(f"DLCL: history must be a DepthHistory, got {type(history).__name__}")
    kind = y.shape, y.dtype, y.device
    # A state of the same kind as the first one of this pass needs no further check.
    if history.owner is not dlcl or history.kind != kind:
        _check_state(dlcl, y, history)
    checks.probability("DLCL", dropout_p)
    if residual is not None and (residual.shape, residual.dtype, residual.device) != kind:
        checks.like("DLCL", "residual", residual, "the branch", y)
    if out_norm is not None:
        _check_out_norm(dlcl, out_norm, y)
    k = _check_index(dlcl, history, index)
    if out_norm is not None and dlcl.norm == "post" and dlcl.has_norm(k):
        raise ValueError("DLCL: a post-norm boundary has its own LN; out_norm must be None")
    return k


def _check_state(dlcl: nn.Module, y: Tensor, history: DepthHistory) -> None:
    if y.shape[-1] != dlcl.dim:
        raise ValueError(f"DLCL: the input must be (..., {dlcl.dim}), got {tuple(y.shape)}")
    if y.device != dlcl.weight.device:
        raise ValueError(f"DLCL: the input must be on {dlcl.weight.device}, got {y.device}")
    if history.owner is not dlcl or history.kind is None:
        return
    shape, dtype, device = history.kind
    expected, got = shape.numel() // dlcl.dim, y.numel() // dlcl.dim
    if (expected, dtype, device) != (got, y.dtype, y.device):
        raise ValueError(
            f"DLCL: the states of a pass must be alike: expected {expected} tokens of {dtype} on "
            f"{device}, got {got} of {y.dtype} on {y.device}"
        )


def _check_out_norm(dlcl: nn.Module, out_norm: OutNorm, y: Tensor) -> None:
    if not isinstance(out_norm, OutNorm):
        raise TypeError(
            f"DLCL: out_norm must be an OutNorm (LayerNorm.as_output() or RMSNorm.as_output()), "
            f"got {type(out_norm).__name__}"
        )
    for name, p in (("weight", out_norm.weight), ("bias", out_norm.bias)):
        checks.parameter("DLCL", f"out_norm.{name}", p, (dlcl.dim,), y.device)


def _check_index(dlcl, history: DepthHistory, index: int | None) -> int:
    """The index k of this push: the next one or, in backward, a recomputed one."""
    if history.owner is not None and history.owner is not dlcl:
        raise RuntimeError(
            "DLCL: this history belongs to another stack; make a DepthHistory for each stack "
            "and each forward pass"
        )
    if history.traced:
        raise RuntimeError(
            "DLCL: this pass began inside torch.compile and goes on outside; compile the whole "
            "stack with fullgraph=True, or the layers alone"
        )
    pushed, begun = len(history), history.state is not None
    k = pushed if index is None else index
    task = torch._C._current_graph_task_id()
    # A pass that began in this backward pass recomputes a whole stack, which is allowed.
    if k >= pushed and begun and task not in (-1, history.task):
        raise RuntimeError(
            "DLCL: a push during the backward pass of another forward pass; under checkpointing "
            "pass index= and use, in each recomputation, the history of its own forward pass"
        )
    if k > dlcl.num_layers:
        raise RuntimeError(
            f"DLCL: {dlcl.num_layers} layers push {dlcl.num_layers + 1} states, and this "
            f"history has them all; expected a new DepthHistory for a new forward pass"
        )
    if not 0 <= k <= pushed or (k < pushed and task == -1):
        already = ", which is pushed already" if 0 <= k < pushed else ""
        raise RuntimeError(
            f"DLCL: layer called out of order: expected index {pushed}, got {k}{already}"
        )
    if k < pushed:
        _check_recomputed(history, k, task)
        return k
    if history.closed:
        raise RuntimeError("DLCL: this history is closed; make a new one")
    if begun and history.state.released:
        raise RuntimeError("DLCL: this history's backward has ended; make a new one")
    if begun and history.grad_mode != torch.is_grad_enabled():
        raise RuntimeError(
            "DLCL: grad mode changed within a pass; push every state under the grad mode of the "
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
    state = history.state
    passes = nearest_passes(torch._C._current_autograd_node(), history.owner)
    if state not in passes and (passes or state.task != task):
        raise RuntimeError(
            f"DLCL: push {k} is recomputed for another forward pass than its history's; make a "
            "DepthHistory in each forward pass, and let the checkpointed function refer to it, "
            "not to an attribute that the next forward pass replaces"
        )
    state.check_readable(k)
