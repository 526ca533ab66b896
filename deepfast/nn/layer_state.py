"""Check that a layer which backward runs again is as it was in forward."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

ORDINARY = Tensor, nn.Parameter
"""Types of tensors that have their own data. FSDP's shards have another type: while a layer runs,
FSDP replaces them by whole parameters."""

SIMPLE = bool, int, float, str, type(None)
"""Types of the attributes that are compared, such as ``training`` or ``dropout``; also tuples of
these."""

MISSING = object()


class TensorState(NamedTuple):
    """The properties of a tensor that must not change."""

    shape: tuple[int, ...]
    version: int
    address: int
    requires_grad: bool

    def change(self, now: object) -> str:
        """How the tensor has changed, in words."""
        if not isinstance(now, TensorState):
            return f"expected a tensor {self.shape}, got {now}"
        for name in ("shape", "requires_grad"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                return f"expected {name} {before}, got {after}"
        how = "another tensor" if now.version == self.version else "one that was changed in place"
        return f"expected the same tensor {self.shape}, got {how}"


class Entry(NamedTuple):
    """A value that a layer reads."""

    table: Any
    """The dict or the sequence that has it."""
    name: Any
    """Its name or index there."""
    value: object
    state: object
    """Its `_state` when the layer began."""

    @property
    def now(self) -> object:
        try:
            return self.table[self.name]
        except (LookupError, TypeError):
            return MISSING

    @property
    def replaced(self) -> bool:
        shard = isinstance(self.value, Tensor) and type(self.value) not in ORDINARY
        return not shard and self.now is not self.value


class LayerState:
    """The values that a layer reads besides its inputs, at the time of construction.

    These are parameters and whether they learn, buffers, submodules and their classes, hooks,
    attributes that are tensors, functions or of a `SIMPLE` type, what a dict or a sequence among
    the attributes holds of these, the tensors among the layer's other arguments, and what a dict, a
    sequence or an object among these arguments holds.
    """

    def __init__(self, layer: nn.Module, options: dict):
        parts = list(layer.modules())
        self.layer = layer
        self.parts = [(part, type(part), _hooks(part)) for part in parts]
        # A tensor with a graph among attributes is a result, not a value that the layer reads.
        attributes = (e for part in parts for e in _entries(vars(part), results=False))
        # This one decides nothing in forward.
        self.entries = [e for e in attributes if e.name != "_is_full_backward_hook"]
        for part in parts:
            for table in (part._parameters, part._buffers, part._modules):
                self.entries += _entries(table)
        held = [
            value
            for part in parts
            for name, value in vars(part).items()
            if isinstance(value, list | tuple | dict) and not name.startswith("_")
        ]
        for table, results in _tables([options, *held]):
            self.entries += _entries(table, results)
        self.replaced: list[Entry] = []

    def end_forward(self) -> None:
        """Called when the layer has run. What it has replaced itself, such as a counter, is not
        compared: it gets its old value while the layer runs again."""
        self.replaced = [entry for entry in self.entries if entry.replaced]
        self.entries = [entry for entry in self.entries if not entry.replaced]

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Inside the block the layer is as it was when it began. Raises where it is not."""
        for part, kind, hooks in self.parts:
            self._compare("the class of a module", kind, type(part))
            self._compare("a hook", hooks, _hooks(part))
        for entry in self.entries:
            value = entry.now if entry.replaced else entry.value
            self._compare(entry.name, entry.state, _state(value), entry.table)
        for entry in self.replaced:
            self._compare(entry.name, entry.state, _state(entry.value), entry.table)
        now = [(entry, entry.now) for entry in self.replaced]
        for entry in self.replaced:
            entry.table[entry.name] = entry.value
        try:
            yield
        finally:
            for entry, value in now:
                if value is MISSING:
                    del entry.table[entry.name]
                else:
                    entry.table[entry.name] = value

    def _compare(self, name: object, expected: object, got: object, table: object = None) -> None:
        if got is expected or got == expected:
            return
        for path, module in self.layer.named_modules():
            own = vars(module), module._parameters, module._buffers, module._modules
            if any(table is each for each in own):
                name = f"{path}.{name}" if path else name
                break
        if isinstance(expected, TensorState):
            change = expected.change(got)
        else:
            before, after = (x[-1] if type(x) is tuple and x else x for x in (expected, got))
            other = "another one, " if repr(after) == repr(before) else ""
            change = f"expected {before}, got {other}{after}"
        raise RuntimeError(
            f"recompute policy: {name} of a {type(self.layer).__name__} or its arguments, which "
            f"backward runs again, has been modified since forward: {change}"
        )


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of its hooks. A hook with a name, as `deepfast.attach.loop.Watch`, is
    deepfast's own, and idle in backward."""
    keys = *module._forward_hooks, *module._forward_pre_hooks
    return tuple(key for key in keys if isinstance(key, int))


def _state(value: object) -> object:
    """The properties of a value that must not change; None where nothing is compared."""
    if isinstance(value, Tensor):
        if is_lazy(value) or value.is_inference():
            return None
        address = value.data_ptr() if type(value) in ORDINARY else 0
        return TensorState(tuple(value.shape), value._version, address, value.requires_grad)
    if callable(value):
        return value
    each = value if type(value) is tuple else (value,)
    return (type(value).__name__, value) if all(type(x) in SIMPLE for x in each) else None


def _entries(table: Any, results: bool = True) -> Iterator[Entry]:
    """The values in a table that are compared. results: whether also tensors with a graph."""
    for name, value in [*table.items()] if isinstance(table, Mapping) else enumerate(table):
        state = _state(value)
        if state is not None and (results or not isinstance(value, Tensor) or value.is_leaf):
            yield Entry(table, name, value, state)


def _tables(roots: list) -> Iterator[tuple[Any, bool]]:
    """Every dict and sequence that is reached from the roots, themselves included, and the
    attributes of the objects in them; with whether tensors with a graph in it are values that the
    layer reads."""
    seen, left = set[int](), roots
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | Mapping):
            left += value.values() if isinstance(value, Mapping) else value
            yield value, True
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type):
            yield vars(value), False
