"""This package's ops in the place of a model's own."""

import warnings
from collections import Counter

from torch import nn

from deepfast.integrations.norms import is_norm, known
from deepfast.integrations.swap import Handle, Swapped

OP = "deepfast.patch"


class Patch(Handle):
    """What `deepfast.patch` did. ``remove()`` undoes it."""

    replaced: Counter[str]
    """How many of each class were replaced: ``{"LlamaRMSNorm": 5}``"""
    left: dict[str, str]
    """What was left, and why: ``{"GemmaRMSNorm": "its formula is not known"}``"""

    def __init__(self):
        super().__init__()
        self.replaced, self.left = Counter(), {}

    def __repr__(self) -> str:
        return f"Patch(replaced={dict(self.replaced)}, left={self.left})"


def patch(model: nn.Module) -> Patch:
    """Replaces the norms of a model, LayerNorm and RMSNorm of torch and of Hugging Face
    transformers, by fused ops with the same result.

    ::

        handle = deepfast.patch(model)
        print(handle.replaced, handle.left)
        ...
        handle.remove()

    Only the classes of modules change. Parameters, their names, hooks and wrappers stay as they
    are. Formulas are read from the code of each class. Where one is not known, the module is left,
    and one warning names what was left, and why.

    Args:
        model: any module.

    Returns:
        A handle whose ``remove()`` undoes it. ``replaced`` counts what was replaced, and ``left``
        has the reason for each class that was left.

    Raises:
        TypeError: for what is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be a module, got {type(model).__name__}")
    handle = Patch()
    for module in model.modules():
        if isinstance(module, Swapped) or not is_norm(module):
            continue
        name, own = type(module).__name__, known(module)
        if isinstance(own, str):
            handle.left[name] = own
        else:
            handle.swap(module, own)
            handle.replaced[name] += 1
    if not handle.replaced and not handle.left:
        handle.left[type(model).__name__] = "it has nothing to replace, or is patched already"
    if handle.left:
        left = "; ".join(f"{what}: {why}" for what, why in handle.left.items())
        warnings.warn(f"{OP} left {left}", stacklevel=2)
    return handle
