"""What `DLCL` asks of a push: the state, its layer-norm, and its place in the pass."""

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import OutNorm
from deepfast.depth.history import DepthHistory
from deepfast.depth.state import DepthState


def check_input(dlcl: nn.Module, y: Tensor) -> None:
    if y.shape[-1] != dlcl.dim:
        raise ValueError(f"DLCL: expected (..., {dlcl.dim}), got {tuple(y.shape)}")
    if y.device != dlcl.weight.device:
        raise ValueError(f"DLCL: weights are on {dlcl.weight.device}, the input on {y.device}")


def check_out_norm(dlcl: nn.Module, out_norm: OutNorm, y: Tensor) -> None:
    if not isinstance(out_norm, OutNorm):
        raise TypeError(
            f"DLCL: out_norm must be an OutNorm (LayerNorm.as_output()), "
            f"got {type(out_norm).__name__}"
        )
    for name, p in (("weight", out_norm.weight), ("bias", out_norm.bias)):
        checks.parameter("DLCL", f"out_norm.{name}", p, (dlcl.dim,), y.device)


def check_alike(dlcl: nn.Module, y: Tensor, state: DepthState) -> None:
    """Every state of a pass has the tokens, dtype and device of the first."""
    if state.states is None:
        return
    shape, got = tuple(state.states.shape[1:]), (y.numel() // dlcl.dim, dlcl.dim)
    if shape != got or state.states.dtype != y.dtype or state.states.device != y.device:
        raise ValueError(
            f"DLCL: every state of a pass must be alike: expected {shape[0]} tokens of "
            f"{state.states.dtype} on {state.states.device}, got {got[0]} of {y.dtype} on "
            f"{y.device}"
        )


def check_order(dlcl: nn.Module, history: DepthHistory, index: int | None) -> int:
    """The index k of this push, which must be the next one, or a repeated one."""
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
    pushed = len(history)
    k = pushed if index is None else index
    # A pass that began in this very backward is the recomputation of a whole stack.
    began = torch._C._current_graph_task_id() if history.state is None else history.task
    if index is None and torch._C._current_graph_task_id() not in (-1, began):
        raise RuntimeError(
            "DLCL: called again during backward (recomputation); pass index= so that the "
            "state is found again"
        )
    if k > dlcl.num_layers:
        raise RuntimeError(
            f"DLCL: {dlcl.num_layers} layers push {dlcl.num_layers + 1} states, and this "
            f"history has them all; expected a new DepthHistory for a new forward pass"
        )
    if not 0 <= k <= pushed:
        raise RuntimeError(f"DLCL: layer called out of order: expected index {pushed}, got {k}")
    if k < pushed and torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            f"DLCL: layer called out of order: expected index {pushed}, got {k}, which is "
            "pushed already"
        )
    if history.closed and k == pushed:
        raise RuntimeError("DLCL: this history is closed; make a new one")
    if history.state is not None and pushed and history.state.states is None:
        raise RuntimeError("DLCL: this history's backward has ended; make a new one")
    return k
