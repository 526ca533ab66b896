"""Live bytes by category, and the highest point of every section of a training step."""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepfast.memory.count import LiveBytes

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matrix products, and which argument is the left operand."""

_COPIED_BY = (torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor)
"""What copies a weight in another dtype, or scaled by a gate."""


class Moment(NamedTuple):
    """Bytes alive at one point of a step by category, without parameters and optimizer state; or
    the difference of two such points."""

    gradients: int = 0
    """Of parameters."""
    copies: int = 0
    """Of weights, in autocast's dtype or scaled by a gate."""
    history: int = 0
    """Of connections between layers."""
    activations: int = 0
    """What layers keep for backward."""
    transient: int = 0
    """Everything else."""
    head: int = 0
    """Made by the embedding, the projection to the vocabulary and the loss."""

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, *others: "Moment") -> "Moment":
        return Moment(*map(sum, zip(self, *others, strict=True)))

    def minus(self, other: "Moment") -> "Moment":
        return Moment(*map(operator.sub, self, other))

    def times(self, count: int) -> "Moment":
        return Moment(*(count * size for size in self))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Ledger(LiveBytes):
    """Counts the storages on a device as `LiveBytes` does on a CPU, each in a category of `Moment`.

    The gradients of ``parameters`` are "gradients", and copies of ``weights`` are "copies". All
    else has the category that was set when it was made.

    Attributes:
        category: of what is made from now on.
        starts: section -> what was alive at its start.
        highest: section -> what was alive at its highest point. With ``old_gradients`` gradients do
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
        self.section, self.category = "", "transient"
        self.old_gradients = old_gradients
        self._by_category: Counter[str] = Counter()
        self.starts: dict[str, Moment] = {}
        self.highest = {"": Moment()}
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

    def enter(self, section: str, category: str) -> None:
        """Begins a section, unless it runs already."""
        if section != self.section:
            self.section, self.category = section, category
            self.starts[section] = self.highest[section] = Moment(**self._by_category)

    def _category(self, func: Any, args: tuple) -> str:
        if func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] :][:2]
            self.flops[self.section] += 2 * left.numel() * right.shape[1]
        elif func in _COPIED_BY:
            key = _key(args[0])
            if key in self.copied or self._alive.get(key, ("",))[-1] == "copies":
                return "copies"
        return self.category

    def _add(self, nbytes: int, category: str) -> None:
        super()._add(nbytes, category)
        self._by_category[category] += nbytes
        if nbytes > 0:
            highest = self.highest[self.section]
            old = self.old_gradients * (highest.gradients - self._by_category["gradients"])
            if self._current > highest.total - old:
                self.highest[self.section] = Moment(**self._by_category)

    def _learned(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        key = _key(parameter.grad)  # type: ignore[arg-type]
        if key in self._alive:
            reference, nbytes, category = self._alive[key]
            self._alive[key] = (reference, nbytes, "gradients")
            self._by_category.update({category: -nbytes, "gradients": nbytes})
