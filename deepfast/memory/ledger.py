"""Live bytes by category, and the highest point of every section of a training step."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepfast.memory.count import LiveBytes

GRADIENTS, COPIES = "gradients", "copies"

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matrix products, and which argument is the left operand."""

_COPIED_BY = (torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor)
"""What copies a weight in another dtype, or scaled by a gate."""


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Ledger(LiveBytes):
    """Counts the storages on a device as `LiveBytes` does on a CPU, each in a category.

    The gradients of ``parameters`` are `GRADIENTS`, and copies of ``weights`` are `COPIES`. All
    else has the category that was set when it was made.

    Attributes:
        category: of what is made from now on.
        alive: category -> bytes alive now.
        starts: section -> what was alive at its start.
        highest: section -> what was alive at its highest point. With ``old_gradients`` the gradients
            do not count there, because those of an earlier pass have all been alive before.
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
        self.parameters = list(parameters)
        self.copied = {storage_key(weight) for weight in weights}
        self.category = self.section = ""
        self.old_gradients = old_gradients
        self.alive: dict[str, int] = {}
        self.starts: dict[str, dict[str, int]] = {}
        self.highest: dict[str, dict[str, int]] = {"": {}}
        self.flops: Counter[str] = Counter()
        self._hooks: list[Any] = []

    def __enter__(self) -> "Ledger":
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._learned)
            for p in self.parameters
            if p.requires_grad
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def enter(self, section: str, category: str) -> None:
        """Begins a section, unless it runs already."""
        if section == self.section:
            return
        self.section, self.category = section, category
        self.starts[section] = self.highest[section] = dict(self.alive)

    def _category(self, func: Any, args: tuple) -> str:
        if func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] :][:2]
            self.flops[self.section] += 2 * left.numel() * right.shape[1]
        elif func in _COPIED_BY:
            key = storage_key(args[0])
            if key in self.copied or self._alive.get(key, ("",))[-1] == COPIES:
                return COPIES
        return self.category

    def _add(self, nbytes: int, category: str) -> None:
        super()._add(nbytes, category)
        self.alive[category] = self.alive.get(category, 0) + nbytes
        if nbytes > 0 and self._height(self.alive) > self._height(self.highest[self.section]):
            self.highest[self.section] = dict(self.alive)

    def _height(self, alive: dict[str, int]) -> int:
        return sum(alive.values()) - self.old_gradients * alive.get(GRADIENTS, 0)

    def _learned(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        key = storage_key(parameter.grad)
        if key in self._alive:
            reference, nbytes, category = self._alive[key]
            self._alive[key] = (reference, nbytes, GRADIENTS)
            self.alive[category] -= nbytes
            self.alive[GRADIENTS] = self.alive.get(GRADIENTS, 0) + nbytes
