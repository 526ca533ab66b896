"""This package's ops in the place of a model's own."""

from collections import Counter
from typing import Any

from torch import nn

from deepfast import checks
from deepfast.integrations import hf_attention
from deepfast.integrations.losses import patch_loss
from deepfast.integrations.norms import is_norm, known
from deepfast.integrations.swap import Handle, Swapped

OP = "deepfast.patch"


def patch(
    model: nn.Module, *, norms: bool = True, loss: bool = True, attention: bool = False
) -> Handle:
    """Replaces what a model computes by fused ops with the same result, and prints what it did.

    ::

        handle = deepfast.patch(model)
        ...
        handle.remove()

    Only the classes of modules change. Parameters, their names, hooks and wrappers stay as they
    are. Where the formula of a module is not known, the module is left, and named in the printout.

    Args:
        model: any module.
        norms: LayerNorm and RMSNorm, of torch and of Hugging Face transformers.
        loss: the loss of Hugging Face's causal and masked language models, in training, by
            `ops.linear_cross_entropy`. The logits are not computed: ``output.logits`` is None.
            Without labels, and in evaluation, the model computes what it did.
        attention: Hugging Face's attention by `ops.attention`, without the padding, with its groups
            of heads and its sliding windows. At padding the outputs of a model then differ from
            before, and nothing reads them.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        TypeError, ValueError: for a model without the attention interface of transformers. A
            forward pass raises ValueError for an attention that is neither causal nor full and has
            no sliding window.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be a module, got {type(model).__name__}")
    checks.flag(OP, norms=norms, loss=loss, attention=attention)
    handle, lines = Handle(), []
    if attention:
        lines.append(f"attention: {_patch_attention(model, handle)}")
    if norms:
        lines += _patch_norms(model, handle)
    if loss:
        done, left = patch_loss(model, handle)
        lines += [f"loss: {name}, in training" for name in done]
        lines += [f"left: the loss of {reason}" for reason in left]
        if not done and not left:
            lines.append("left: the loss; the model is none of those whose loss deepfast replaces")
    print("\n  ".join((f"{OP}({type(model).__name__})", *lines)))
    return handle


def _patch_norms(model: nn.Module, handle: Handle) -> list[str]:
    done: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for module in model.modules():
        own = known(module)
        if own is not None and not isinstance(module, Swapped):
            done[type(module).__name__] += 1
            handle.swap(module, own)
        elif own is None and is_norm(module):
            left[type(module).__name__] += 1
    return [
        *(f"norms: {count} {name}" for name, count in done.items()),
        *(f"left: {count} {name}, whose formula is not known" for name, count in left.items()),
    ]


def _patch_attention(model: nn.Module, handle: Handle) -> str:
    """Sets the attention of the model of transformers in ``model``; returns its class."""
    named = (m for m in model.modules() if hasattr(m, "set_attn_implementation"))
    found: Any = next(named, None)
    if found is None:
        raise ValueError(
            f"{OP}: attention=True needs a model of transformers with set_attn_implementation, got "
            f"{type(model).__name__}"
        )
    before = found.config._attn_implementation
    hf_attention.register()
    found.set_attn_implementation(hf_attention.NAME)
    if found.config._attn_implementation != hf_attention.NAME:
        raise ValueError(
            f"{OP}: {type(found).__name__} does not take its attention from transformers' "
            "AttentionInterface; leave attention=False"
        )
    handle.on_remove(lambda: found.set_attn_implementation(before))
    return type(found).__name__
