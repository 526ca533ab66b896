"""The vocabulary loss of Hugging Face's language models by `ops.linear_cross_entropy`.

In training a model with labels runs without them. Its output layer knows the targets, and returns
the loss in place of the logits. So the parameters of that layer are read inside its own call, as
sharding needs, and the logits never exist.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.depth.boundary import PerThread
from deepfast.integrations import loss_code
from deepfast.integrations.swap import Handle, Swapped

OTHER_LOGITS = ("logits_to_keep", "num_logits_to_keep", "shift_labels")
"""Arguments with which the model computes its loss itself."""
LOSSES = ("CrossEntropyLoss", "cross_entropy", "loss_function")


class Wanted(NamedTuple):
    """The loss that an output layer computes."""

    target: Tensor
    ignore_index: int
    items: Tensor | int | None
    """What the sum is divided by; None for the mean."""


class Open(PerThread):
    """What a model and its output layer tell each other."""

    wanted: Wanted | None = None
    loss: Tensor | None = None
    """What the output layer returned."""


class _Head(Swapped):
    """The output layer, an nn.Linear."""

    deepfast_open: Open
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        opened = self.deepfast_open
        wanted, opened.wanted = opened.wanted, None
        if wanted is None:
            return super().forward(input)  # type: ignore[misc]
        loss: Any = ops.linear_cross_entropy(
            input, self.weight, wanted.target.to(input.device), linear_bias=self.bias,
            ignore_index=wanted.ignore_index, reduction="mean" if wanted.items is None else "sum",
        )  # fmt: skip
        items = wanted.items
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        opened.loss = loss
        return loss


class _Model(Swapped):
    """The model around it."""

    deepfast_loss: loss_code.Form
    training: bool

    def forward(self, *args, labels: Tensor | None = None, **kwargs):
        plain: Any = super()
        if labels is None:
            # They may be among args.
            return plain.forward(*args, **kwargs)
        head = loss_code.lookup(self, self.deepfast_loss.head)
        if not self.training or not self._known(head, kwargs):
            return plain.forward(*args, labels=labels, **kwargs)
        opened = head.deepfast_open
        opened.wanted = self._wanted(labels, kwargs)
        try:
            out = plain.forward(*args, **kwargs)
            loss = opened.loss
        finally:
            opened.wanted = opened.loss = None
        if loss is None or loss is not (out[0] if isinstance(out, tuple) else out.logits):
            raise RuntimeError(
                f"deepfast.patch: {type(self).__name__} did not return the result of its output "
                f"layer {self.deepfast_loss.head}, so its loss is not known; patch it with "
                "loss=False"
            )
        if isinstance(out, tuple):
            # Without return_dict; what follows keeps its place.
            return loss, None, *out[1:]
        rest = {name: value for name, value in out.items() if name not in ("loss", "logits")}
        return type(out)(loss=loss, **rest)

    def _known(self, head: nn.Module, kwargs: dict) -> bool:
        """Whether this call computes the loss that was read."""
        form = self.deepfast_loss
        if not hasattr(head, "deepfast_open"):
            warnings.warn(
                f"deepfast.patch: the output layer {form.head} was replaced after patch, so the "
                "model computes its loss itself; call patch after that",
                stacklevel=3,
            )
            return False
        return (
            all(kwargs.get(name) is None for name in OTHER_LOGITS)
            and not any(kwargs.get(name) for name in form.off)
            and all(loss_code.lookup(self, path) == value for path, value in form.settings.items())
            and (form.function is None or loss_code.loss_function(self) == form.function)
        )

    def _wanted(self, labels: Tensor, kwargs: dict) -> Wanted:
        form = self.deepfast_loss
        given = kwargs if form.options else {}
        ignored = given.get("ignore_index", -100)
        if form.function is not None and loss_code.SHIFTED[form.function]:
            # Each position predicts the next token.
            labels = F.pad(labels[..., 1:], (0, 1), value=ignored)
        return Wanted(labels, ignored, given.get("num_items_in_batch"))


def has_loss(module: nn.Module) -> bool:
    """Whether ``module`` seems to compute a cross entropy over a vocabulary."""
    model: Any = module
    # A wrapper has the method of the model in it, but not its class.
    if hasattr(type(module), "get_output_embeddings"):
        # A model of transformers for another task than language has no output layer.
        return model.get_output_embeddings() is not None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return (
        code is not None
        and type(module).__module__.partition(".")[0] != "torch"
        and (
            not {*code.co_names}.isdisjoint(LOSSES)
            or any(type(child) is nn.CrossEntropyLoss for child in module.children())
        )
    )


def patch_loss(module: nn.Module, handle: Handle) -> str | None:
    """Replaces the loss of a language model. Returns why it is left, if it is."""
    try:
        form = loss_code.read(module)
    except loss_code.Unknown as why:
        return str(why)
    opened, head = Open(), loss_code.lookup(module, form.head)
    for part, name, value in ((head, "deepfast_open", opened), (module, "deepfast_loss", form)):
        setattr(part, name, value)
        handle.on_remove(lambda part=part, name=name: delattr(part, name))
    handle.swap(head, _Head)
    handle.swap(module, _Model)
    return None
