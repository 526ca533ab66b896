"""The loss of a causal language model of Hugging Face transformers without its logits."""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks, ops

OP = "causal_lm_loss"
OTHER = {"adapter_names", "alora_offsets", "ignore_index", "logits_to_keep", "num_logits_to_keep"}
OTHER |= {"shift_labels", "task_ids", "vocab_size"}
"""Arguments of models and of PEFT that change the loss."""
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
TOKENS, LARGEST = 8, 64.0
"""The tokens of a sentence that is compared, and the largest of its logits: a cap changes it."""

_compared: weakref.WeakKeyDictionary[nn.Module, set] = weakref.WeakKeyDictionary()
"""Output layer, loss function, config and options with which a model was compared."""


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: int | Tensor | None = None,
    **inputs,
) -> Tensor:
    """The loss of ``model(input_ids, labels=labels, **inputs)`` by `ops.linear_cross_entropy`.

    The base model runs, and then the op with the weight and bias of the output layer, so the logits
    of all tokens never exist. The first call compares the model with that on a few tokens, in
    evaluation and without gradients: a model with other hidden states, logits or another loss is
    refused. So does the first call with another config or other options. Inside `torch.compile`
    nothing is compared: call it once before.

    DDP, FSDP and `torch.compile` are expected around a module whose forward returns this loss, not
    around ``model``, whose own forward does not run here.

    Args:
        model: a causal language model of transformers, or a model of PEFT around one.
        input_ids: (B, S).
        labels: (B, S), as of transformers: token s predicts label s + 1, and -100 is ignored.
        num_items_in_batch: what the sum of the losses is divided by, as Hugging Face's Trainer
            gives it; None for the mean.
        inputs: other arguments of the base model, such as ``attention_mask``.

    Returns:
        The loss, 0-dim, see `ops.linear_cross_entropy`.

    Raises:
        TypeError, ValueError: for a model that has another loss, that is wrapped, or whose output
            layer is not a plain `torch.nn.Linear` without hooks.
    """
    checks.tensor(OP, "labels", labels)
    inner: Any = model
    if hasattr(type(model), "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]
        adapter: Any = model.active_peft_config
        # Their parts are in the forward of PEFT's model.
        if adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(
                f"{OP}: PEFT's prompts and aLoRA are not supported, got {adapter!r:.80}"
            )
    # A wrapper may have the method of the model in it, but not its class.
    if not hasattr(type(inner), "get_output_embeddings"):
        raise TypeError(
            f"{OP}: model must be a causal language model of transformers or of PEFT, got "
            f"{type(inner).__name__}; wrap a module whose forward returns this loss"
        )
    if unknown := [name for name, value in inputs.items() if name in OTHER and value is not None]:
        raise TypeError(f"{OP}: {unknown[0]} is not supported")
    inputs.pop("return_dict", None)
    head = inner.get_output_embeddings()
    changes = [n for n in ("forward", *HOOKS) if getattr(head, "__dict__", {}).get(n)]
    if changes or type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        raise ValueError(
            f"{OP}: the output layer of {type(inner).__name__} must be a torch.nn.Linear without "
            f"hooks, whose weight is not sharded, got {type(head)} with {changes}"
        )
    if not torch.compiler.is_compiling():
        kinds = bool, int, str
        options = {name: value for name, value in inputs.items() if isinstance(value, kinds)}
        masked = getattr(inputs.get("attention_mask"), "shape", None) == input_ids.shape
        settings = getattr(inner, "loss_function", None), repr(inner.config.to_dict())
        key = head, *settings, masked, *sorted(options.items())
        compared = _compared.setdefault(model, set())
        if key not in compared:
            # Before, so that a forward which calls this function ends.
            compared.add(key)
            try:
                if why := _difference(model, inner, head, options, masked):
                    kind = type(inner).__name__
                    raise ValueError(f"{OP}: {kind} {why}; let it compute its own loss")
            except BaseException:
                compared.discard(key)
                raise
    hidden = inner.base_model(input_ids=input_ids, **inputs)[0]
    following, items = F.pad(labels[..., 1:], (0, 1), value=-100), num_items_in_batch
    how: dict = {"linear_bias": head.bias, "reduction": "mean" if items is None else "sum"}
    loss = ops.linear_cross_entropy(hidden, head.weight, following.to(hidden.device), **how)
    if isinstance(items, Tensor):
        items = items.to(loss.device)
    return loss if items is None else loss / items


def _difference(model: Any, inner: Any, head: nn.Linear, options: dict, masked: bool) -> str | None:
    """Why the loss of ``model`` is not that of `causal_lm_loss`, if it is not."""
    if inner.base_model is inner:
        return "has no base model"
    # Label 0 occurs. The sentences have different numbers of labels, and the last labels of the
    # second one are behind a mask.
    ids = torch.arange(2 * TOKENS, device=head.weight.device).flip(0) % head.out_features
    ids = ids.view(2, TOKENS)
    labels = ids.clone()
    labels[0, -3:] = -100
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    given = options | ({"attention_mask": mask} if masked else {})
    calls: list[tuple[Tensor, Tensor]] = []

    def instead(_, args, out):
        """Other logits, which show what follows: large where the loss does not read them. They
        take no random numbers."""
        wave = torch.arange(out.numel(), device=out.device).view_as(out).sin()
        large = (following == -100).to(out.device)[..., None]
        calls.append((args[0], torch.where(large, LARGEST * wave, wave).to(out.dtype)))
        return calls[-1][1]

    training = [module for module in model.modules() if module.training]
    hook = head.register_forward_hook(instead)
    try:
        # Not by eval(): what a module does in a method of its own would not be undone.
        for module in training:
            module.training = False
        with torch.no_grad():
            out = model(input_ids=ids, labels=labels, return_dict=True, **given)
            hidden = inner.base_model(input_ids=ids, **given)[0]
    finally:
        hook.remove()
        for module in training:
            module.training = True
        # Autocast keeps weights that it cast here without their gradients.
        torch.clear_autocast_cache()
    if len(calls) != 1:
        return "does not call its output layer once"
    (read, logits), eps = calls[0], torch.finfo(hidden.dtype).eps
    if not _close(hidden, read, max(1e-4, 8 * eps)):
        return (
            "gives its output layer other states than its base model returns here, for example by "
            "a layer in between, or under autocast: call this function `with "
            "accelerator.autocast()`"
        )
    if not _close(out.logits.to(logits.dtype), logits):
        return "scales, caps or otherwise changes the logits of its output layer"
    wanted = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten().to(logits.device))
    if not _close(out.loss, wanted, 2e-6):
        return "has another loss than the mean cross entropy of the next tokens"
    return None


def _close(got: Tensor, want: Tensor, tolerance: float = 0.0) -> bool:
    """Up to ``tolerance`` of the largest number."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    return bool((got - want).abs().max() <= tolerance * want.abs().max())
