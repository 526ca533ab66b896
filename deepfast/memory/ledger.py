"""Live bytes by category, and the highest point of every section of a training step."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepfast.memory.count import LiveBytes

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matrix products, and which argument is the left operand."""

_COPIED_BY = (torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor)
"""What copies a weight in another dtype, or scaled by a gate."""


GRADIENTS, COPIES, HISTORY, ACTIVATIONS, TRANSIENT, HEAD = CATEGORIES = range(6)
"""Categories of what is alive at one point of a step, without parameters and optimizer state:

    gradients    of parameters
    copies       of weights, in autocast's dtype or scaled by a gate
    history      of connections between layers
    activations  what layers keep for backward
    transient    everything else
    head         made by the embedding, the projection to the vocabulary and the loss
"""


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Ledger(LiveBytes):
    """Counts the storages on a device as `LiveBytes` does on a CPU, each in one of `CATEGORIES`.

    The gradients of ``parameters`` are `GRADIENTS`, and copies of ``weights`` are `COPIES`. All
    else has the category that was set when it was made.

    Attributes:
        category: of what is made from now on.
        starts: section -> bytes of each category at its start.
        highest: section -> the same at its highest point. With ``old_gradients`` gradients do
            not count there, because those of an earlier pass have all been alive before.
        flops: section -> multiplications and additions of its matrix products.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        weights: Iterable[Tensor] = (),
        device: str | torch.device = "cpu",
        *,
        old_gradients: bool = False,
    ):
        super().__init__(device)
        self._allocator = False
        self.parameters = [p for p in parameters if p.requires_grad]
        self.copied = {_key(weight) for weight in weights}
        self.section, self.category = "", TRANSIENT
        self.old_gradients = old_gradients
        self._bytes = [0 for _ in CATEGORIES]
        self.starts: dict[str, tuple[int, ...]] = {}
        self.highest = {"": tuple(self._bytes)}
        self.flops: Counter[str] = Counter()
        self._hooks: list[Any] = []

    def __enter__(self) -> "Ledger":
        self._hooks = [p.register_post_accumulate_grad_hook(self._learned) for p in self.parameters]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def enter(self, section: str, category: int) -> None:
        """Begins a section, unless it runs already."""
        if section != self.section:
            self.section, self.category = section, category
            self.starts[section] = self.highest[section] = tuple(self._bytes)

    def _category(self, func: Any, args: tuple) -> int:
        if func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] :][:2]
            self.flops[self.section] += 2 * left.numel() * right.shape[1]
        elif func in _COPIED_BY:
            key = _key(args[0])
            if key in self.copied or self._alive.get(key, (None,))[-1] == COPIES:
                return COPIES
        return self.category

    def _add(self, nbytes: int, category: int) -> None:
        super()._add(nbytes, category)
        self._bytes[category] += nbytes
        highest = self.highest[self.section]
        old = self.old_gradients * (highest[GRADIENTS] - self._bytes[GRADIENTS])
        if self._current > sum(highest) - old:
            self.highest[self.section] = tuple(self._bytes)

    def _learned(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        grad: Any = parameter.grad
        for part in (grad,) if grad.layout is torch.strided else (grad._indices(), grad._values()):
            if _key(part) in self._alive:
                reference, nbytes, category = self._alive[_key(part)]
                self._alive[_key(part)] = (reference, nbytes, GRADIENTS)
                self._bytes[category] -= nbytes
                self._bytes[GRADIENTS] += nbytes
