"""Check that a layer which backward runs again is as it was in forward."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

ORDINARY = Tensor, nn.Parameter
"""Types of tensors that have their own data. FSDP's shards have another type: while a layer runs,
FSDP replaces them by whole parameters."""

SIMPLE = bool, int, float, str
"""Types of the attributes that are compared, such as ``training`` or ``dropout``."""


class TensorState(NamedTuple):
    """The properties of a tensor that must not change."""

    shape: tuple[int, ...]
    version: int
    address: int
    requires_grad: bool


Entry = tuple[Mapping, str, object, object]
"""A dict, a name in it, the value that it had, and the state of that value."""


class LayerState:
    """The values that a layer reads besides its inputs, at the time of construction.

    These are parameters and whether they learn, buffers, submodules, hooks, attributes that are
    tensors or of a `SIMPLE` type, the tensors among the layer's other arguments, and what a dict or
    an object among these holds of such types.
    """

    def __init__(self, layer: nn.Module, options: dict):
        parts = list(layer.modules())
        self.layer, self.hooks = type(layer).__name__, [(part, _hooks(part)) for part in parts]
        # A tensor with a graph among attributes is a result, not a value that the layer reads.
        self.attributes = [e for part in parts for e in _entries(vars(part), results=False)]
        self.others = [e for table, results in _tables(options) for e in _entries(table, results)]
        for part in parts:
            for table in (part._parameters, part._buffers, part._modules):
                self.others += _entries(table)

    def forget_results(self) -> None:
        """Leaves out the attributes that the layer has replaced since, as what it has computed."""
        self.attributes = [e for e in self.attributes if e[0].get(e[1]) is e[2]]

    def check(self) -> None:
        """Raises where a value is not as it was."""
        for part, hooks in self.hooks:
            self._compare("a hook", hooks, _hooks(part))
        for table, name, value, state in (*self.attributes, *self.others):
            shard = isinstance(value, Tensor) and type(value) not in ORDINARY
            self._compare(name, state, _state(value if shard else table.get(name)))

    def _compare(self, name: str, expected: object, got: object) -> None:
        if got is not expected and got != expected:
            raise RuntimeError(
                f"recompute policy: {name} of a {self.layer} or its arguments, which backward runs "
                f"again, has been modified since forward: expected {expected}, got {got}"
            )


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of its hooks. A hook with a name is deepfast's own, and idle in backward."""
    keys = *module._forward_hooks, *module._forward_pre_hooks
    return tuple(key for key in keys if isinstance(key, int))


def _state(value: object) -> object:
    """The properties of a value that must not change; None where nothing is compared."""
    if isinstance(value, Tensor):
        if value.is_inference():
            return None
        address = value.data_ptr() if type(value) in ORDINARY else 0
        return TensorState(tuple(value.shape), value._version, address, value.requires_grad)
    if isinstance(value, nn.Module):
        return value
    return (type(value).__name__, value) if type(value) in SIMPLE else None


def _entries(table: Mapping, results: bool = True) -> Iterator[Entry]:
    """Of each value that is compared. results: whether also of tensors with a graph."""
    for name, value in table.items():
        state = _state(value)
        if state is not None and (results or not isinstance(value, Tensor) or value.is_leaf):
            yield table, name, value, state


def _tables(options: dict) -> Iterator[tuple[Mapping, bool]]:
    """The dicts that hold a layer's other arguments: the arguments themselves, those of them that
    are dicts or sequences, also inside each other, and the attributes of objects; with whether
    tensors with a graph in them are values that the layer reads."""
    seen, left = set[int](), [options]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            left += value.values()
            yield value, True
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type):
            yield vars(value), False
