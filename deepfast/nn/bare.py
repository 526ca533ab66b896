"""Whether a module may be replaced by its arithmetic."""

from torch import nn
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
