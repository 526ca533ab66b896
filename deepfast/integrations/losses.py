"""The vocabulary loss of Hugging Face's language models by `ops.linear_cross_entropy`.

In training a model with labels runs without them. Its output layer knows the targets, and returns
the loss in place of the logits. So the parameters of that layer are read inside its own call, as
sharding needs, and the logits never exist.
"""

import threading
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.integrations.swap import Handle, Swapped

CAUSAL = {
    f"{name}ForCausalLM"
    for name in (
        "Gemma", "Glm", "Llama", "Ministral", "Mistral", "Olmo", "Olmo2", "Olmo3", "Phi", "Phi3",
        "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Starcoder2",
    )
}  # fmt: skip
"""They shift the labels, and call ``loss_function`` with the arguments of forward."""
MASKED = {"ModernBertForMaskedLM"}
"""They call ``loss_function`` with the arguments of forward."""
PLAIN = {f"{name}ForMaskedLM" for name in ("Bert", "Camembert", "Roberta", "XLMRoberta")}
"""They call torch's CrossEntropyLoss."""

OTHER_LOGITS = ("logits_to_keep", "shift_labels")
"""Arguments with which the model computes its loss itself."""


class Wanted(NamedTuple):
    """The loss that an output layer computes."""

    target: Tensor
    ignore_index: int
    items: Tensor | int | None
    """What the sum is divided by; None for the mean."""


class Open(threading.local):
    """What is wanted in each thread. It is neither copied nor pickled."""

    wanted: Wanted | None = None

    def __reduce__(self):
        return Open, ()


class _Head(Swapped):
    """The output layer, an nn.Linear."""

    deepfast_open: Open
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        wanted = self.deepfast_open.wanted
        if wanted is None:
            return super().forward(input)  # type: ignore[misc]
        loss: Any = ops.linear_cross_entropy(
            input, self.weight, wanted.target.to(input.device), bias=self.bias,
            ignore_index=wanted.ignore_index, reduction="mean" if wanted.items is None else "sum",
        )  # fmt: skip
        items = wanted.items
        if items is None:
            return loss
        return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


class _Model(Swapped):
    """The model around it."""

    def forward(self, *args, labels: Tensor | None = None, **kwargs):
        plain: Any = super()
        other = any(kwargs.get(name) is not None for name in OTHER_LOGITS)
        if labels is None:
            # They may be among args.
            return plain.forward(*args, **kwargs)
        if other or not self.training:  # type: ignore[attr-defined]
            return plain.forward(*args, labels=labels, **kwargs)
        opened = self.get_output_embeddings().deepfast_open  # type: ignore[attr-defined]
        opened.wanted = self.wanted(labels, kwargs)
        try:
            out = plain.forward(*args, **kwargs)
        finally:
            opened.wanted = None
        if isinstance(out, tuple):
            return out
        rest = {name: value for name, value in out.items() if name not in ("loss", "logits")}
        return type(out)(loss=out.logits, **rest)

    def wanted(self, labels: Tensor, kwargs: dict) -> Wanted:
        """The loss of torch's CrossEntropyLoss."""
        return Wanted(labels, -100, None)


class _MaskedModel(_Model):
    def wanted(self, labels: Tensor, kwargs: dict) -> Wanted:
        return Wanted(labels, kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch"))


class _CausalModel(_MaskedModel):
    def wanted(self, labels: Tensor, kwargs: dict) -> Wanted:
        found = super().wanted(labels, kwargs)
        # Each position predicts the next token.
        target = F.pad(labels[..., 1:], (0, 1), value=found.ignore_index)
        return found._replace(target=target)


KNOWN: dict[str, tuple[type[_Model], str | None]] = {
    **dict.fromkeys(CAUSAL, (_CausalModel, "ForCausalLMLoss")),
    **dict.fromkeys(MASKED, (_MaskedModel, "ForMaskedLMLoss")),
    **dict.fromkeys(PLAIN, (_Model, None)),
}
"""Class of a model -> the class with its loss, and the name of its ``loss_function``."""


def patch_loss(model: nn.Module, handle: Handle) -> tuple[list[str], list[str]]:
    """Replaces the loss of each known language model in ``model``.

    Returns:
        The classes whose loss was replaced, and why those of others were not.
    """
    done, left = [], []
    for module in list(model.modules()):
        kind = type(module)
        package = kind.__module__.partition(".")[0]
        if package != "transformers" or kind.__name__ not in KNOWN or isinstance(module, Swapped):
            continue
        found: Any = module
        own, function = KNOWN[kind.__name__]
        head = found.get_output_embeddings()
        if function is not None and getattr(found.loss_function, "__name__", None) != function:
            left.append(f"{kind.__name__}: its loss_function is its own")
        elif getattr(found.config, "sparse_prediction", False):
            left.append(f"{kind.__name__}: sparse_prediction computes few logits already")
        elif type(head) is not nn.Linear:
            left.append(f"{kind.__name__}: its output layer is a {type(head).__name__}")
        else:
            head.deepfast_open = Open()  # type: ignore[assignment]
            handle.on_remove(lambda head=head: delattr(head, "deepfast_open"))
            handle.swap(head, _Head)
            handle.swap(module, own)
            done.append(kind.__name__)
    return done, left
