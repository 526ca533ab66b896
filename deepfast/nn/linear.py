"""Linear layers: whether a fused op may stand in for one, its input, and a gate on its result."""

from typing import TypeGuard, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from deepfast.ops import common

Gate = Tensor | float
"""z of one layer of latent depth. In training it is drawn: a scalar tensor with a gradient. In
evaluation it is chosen: a float, and 0.0 skips the layer."""

Kind = TypeVar("Kind", bound=nn.Module)


def plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a fused op may replace ``module``: its exact type is ``kind`` and it has no hooks."""
    changed = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._compiled_call_impl,
        "forward" in vars(module),
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
    return type(module) is kind and not any(changed)


def check_input(op: str, name: str, x: Tensor, linear: nn.Module) -> None:
    """Refuses an input on another device than a linear layer is on, or of another dtype, which
    autocast does not cast."""
    # A hook may move or cast the input.
    if not plain(linear, nn.Linear):
        return
    weight = linear.weight
    if x.dtype != weight.dtype:
        x, weight = common.autocast(x, weight)
    if x.device != weight.device:
        raise ValueError(
            f"{op}: {name} must be on {weight.device} like the weights, got {x.device}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"{op}: {name} must be {weight.dtype} like the weights, got {x.dtype}")


def gated(linear: nn.Module, x: Tensor, gate: Gate | None) -> Tensor:
    """``gate * linear(x)``; a gate of None counts as 1."""
    if gate is None:
        return linear(x)
    if not plain(linear, nn.Linear):
        return linear(x) * gate
    return F.linear(x, *gated_parameters(linear, gate))


def gated_parameters(linear: nn.Linear, gate: Gate | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of ``gate * linear(x)``.

    The gate scales the parameters, not the product: autograd would save the product for the gate's
    gradient, one more (T, D) tensor for each branch.
    """
    weight, bias = linear.weight, linear.bias
    if gate is None:
        return weight, bias
    return weight * gate, None if bias is None else bias * gate
