"""Whether a module may be replaced by its arithmetic, and a linear map whose result is scaled."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


def bare(module: nn.Module, kind: type) -> bool:
    """Whether calling ``module`` is its arithmetic and no more: not replaced, nothing hung on."""
    hung = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._compiled_call_impl,
        "forward" in vars(module),
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
    return type(module) is kind and not any(hung)


def gated(linear: nn.Module, x: Tensor, gate: Tensor | float | None) -> Tensor:
    """``gate * linear(x)``; None is 1."""
    if gate is None:
        return linear(x)
    if not bare(linear, nn.Linear):
        return linear(x) * gate
    return F.linear(x, *gated_parameters(linear, gate))


def gated_parameters(
    linear: nn.Linear, gate: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of ``gate * linear(x)``.

    The gate goes to them and not to the product, which would be kept for the gate's gradient: one
    more state for each branch.
    """
    weight, bias = linear.weight, linear.bias
    if gate is None:
        return weight, bias
    return weight * gate, None if bias is None else bias * gate
