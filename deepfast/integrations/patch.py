"""This package's ops in the place of a model's own."""

import warnings
from collections import Counter

from torch import nn

from deepfast import checks
from deepfast.integrations.losses import has_loss, patch_loss
from deepfast.integrations.norms import is_norm, known
from deepfast.integrations.swap import Handle, Swapped

OP = "deepfast.patch"


class Patch(Handle):
    """What `deepfast.patch` did. ``remove()`` undoes it."""

    replaced: Counter[str]
    """How many of each kind were replaced: ``{"LlamaRMSNorm": 5, "loss of LlamaForCausalLM": 1}``
    """
    left: dict[str, str]
    """What was left, and why: ``{"GemmaRMSNorm": "its formula is not known"}``"""

    def __init__(self):
        super().__init__()
        self.replaced, self.left = Counter(), {}

    def __repr__(self) -> str:
        return f"Patch(replaced={dict(self.replaced)}, left={self.left})"


def patch(model: nn.Module, *, norms: bool = True, loss: bool = True) -> Patch:
    """Replaces what a model computes by fused ops with the same result.

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
        norms: LayerNorm and RMSNorm, of torch and of Hugging Face transformers.
        loss: the loss of Hugging Face's causal and masked language models, in training, by
            `ops.linear_cross_entropy`, if it is the cross entropy of an output layer and nothing
            more. The logits are not computed: ``output.logits`` is None. Without labels, in
            evaluation, and with arguments or settings that change the loss, the model computes
            what it did.

    Returns:
        A handle whose ``remove()`` undoes it. ``replaced`` counts what was replaced, and ``left``
        has the reason for each class that was left.

    Raises:
        TypeError: for what is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be a module, got {type(model).__name__}")
    checks.flag(OP, norms=norms, loss=loss)
    handle = Patch()
    for module in model.modules():
        if isinstance(module, Swapped):
            continue
        if norms and is_norm(module):
            own = known(module)
            _note(handle, type(module).__name__, own if isinstance(own, str) else None)
            if not isinstance(own, str):
                handle.swap(module, own)
        if loss and has_loss(module):
            _note(handle, f"loss of {type(module).__name__}", patch_loss(module, handle))
    if not handle.replaced and not handle.left:
        handle.left[type(model).__name__] = "it has nothing to replace, or is patched already"
    if handle.left:
        left = "; ".join(f"{what}: {why}" for what, why in handle.left.items())
        warnings.warn(f"{OP} left {left}", stacklevel=2)
    return handle


def _note(handle: Patch, what: str, why: str | None) -> None:
    if why is None:
        handle.replaced[what] += 1
    else:
        handle.left[what] = why
