"""Run a whole layer again in backward, in place of saving what its forward computes.

It uses autograd's hooks on saved tensors, so it works for any module, hooks on modules, compiled
layers and torch's attention. Gradients reach parameters as usual, as DDP and FSDP expect. Backward
uses the values that forward used: `LayerState` restores a layer's attributes, and a tensor that was
modified in place since forward is an error.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from deepfast.nn.packing import Packing
from deepfast.nn.recompute import Kept, check_version
from deepfast.ops import common

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Attributes of a module that decide which hooks its forward runs."""

ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors that have their own data. FSDP's shards have another type: while a layer runs,
FSDP replaces them by whole parameters."""

SIMPLE = (bool, int, float, str, NoneType)
"""Types of the attributes that `LayerState` restores, such as ``training`` or ``dropout``."""


class LayerState:
    """What a layer reads besidess its inputs, with the values at the time of construction.

    These are parameters and whether they learn, buffers, hooks, submodules, attributes that are
    tensors or of a `SIMPLE` type, the tensors among the layer's other arguments, and what a dict or
    an object among them has of these types: a loop may change it before the next layer.
    """

    def __init__(self, layer: nn.Module, options: dict):
        self.tensors = [(name, t, Kept(t)) for name, t in _tensors(options)]
        self.entries: list[tuple[dict, str, object]] = []
        self.learns = [(p, p.requires_grad) for p in layer.parameters() if p.is_leaf]
        self.types = [(part, type(part)) for part in layer.modules()]
        for part in layer.modules():
            attributes = vars(part)
            for table in (part._parameters, part._buffers, attributes):
                for name, value in table.items():
                    if not isinstance(value, Tensor):
                        self._restore(table, name, value)
                    # One with a graph is a result that forward has stored, not a value that it
                    # reads.
                    elif table is not attributes or value.is_leaf:
                        self._keep(name, value)
                        if type(value) in ORDINARY:
                            self.entries.append((table, name, value))
            self.entries += [(part._modules, name, child) for name, child in part._modules.items()]
            self.entries += [(attributes, name, attributes[name].copy()) for name in HOOKS]
        for table in _tables(options):
            for name, value in table.items():
                if not isinstance(value, Tensor):
                    self._restore(table, name, value)
                elif value.is_leaf and not value.is_inference():
                    self._keep(name, value)
                    self.entries.append((table, name, value))

    def _keep(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_inference():
            self.tensors.append((name, tensor, Kept(tensor)))

    def _restore(self, table: dict, name: str, value: object) -> None:
        if type(value) in SIMPLE:
            self.entries.append((table, name, value))

    def check(self) -> None:
        """Raises where a value that forward read cannot be restored."""
        changed = []
        for name, tensor, kept in self.tensors:
            kept(f"{name} of a layer or its arguments")
            if type(tensor) in ORDINARY and tensor.data_ptr() != kept.tensor.data_ptr():
                changed.append(f"the data of {name} {tuple(tensor.shape)} has been replaced")
        changed += [
            f"a {kind.__name__} has become a {type(part).__name__}"
            for part, kind in self.types
            if type(part) is not kind
        ]
        changed += [
            f"{name!r} has been deleted" for table, name, _ in self.entries if name not in table
        ]
        if changed:
            raise RuntimeError(
                f"recompute policy: backward needs a layer as it was in forward, but {changed[0]} "
                "since then"
            )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside the block the layer has the values that it had in forward."""
        self.check()
        changed = [
            (table, name, table[name], value)
            for table, name, value in self.entries
            if table[name] is not value
            # Tables of hooks are copies, so they are compared by value.
            and not (isinstance(value, dict) and table[name] == value)
        ]
        frozen = [(p, learns) for p, learns in self.learns if p.requires_grad != learns]
        for table, name, _, value in changed:
            table[name] = value
        for parameter, learns in frozen:
            parameter.requires_grad_(learns)
        try:
            yield
        finally:
            for parameter, learns in frozen:
                parameter.requires_grad_(not learns)
            for table, name, now, _ in reversed(changed):
                table[name] = now


def _tensors(options: dict) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a layer's other arguments, by name."""
    for name, value in options.items():
        if isinstance(value, Packing):
            value = value.indices, value.padding
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and not tensor.is_inference():
                yield name, tensor


def _tables(options: dict) -> list[dict]:
    """The dicts among a layer's other arguments, in dicts and sequences too, and the attributes of
    objects that are neither tensors nor modules."""
    found: dict[int, dict] = {}
    left = [*options.values()]
    while left:
        value = left.pop()
        if isinstance(value, list | tuple):
            left += value
        elif isinstance(value, dict):
            if id(value) not in found:
                left += value.values()
            found[id(value)] = value
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type):
            found[id(vars(value))] = vars(value)
    return [*found.values()]


class _AllSaved(BaseException):
    """The rerun has computed every tensor that backward needs."""


class _Slot:
    """What the graph holds in place of a tensor that was not saved."""

    __slots__ = ("__weakref__", "kind", "run", "value", "version")
    value: Tensor | None

    def __init__(self, run: "_Run", tensor: Tensor):
        self.run, self.value = run, None
        self.kind = tensor.dtype, tuple(tensor.shape)
        # Only weights and views of weights have a version to check: a layer may modify its own
        # intermediate results in place.
        source = tensor if tensor._base is None else tensor._base
        self.version = tensor._version if source.is_leaf and source.requires_grad else None


class _Run:
    """One forward pass of a layer, which runs again when backward first reads a saved tensor."""

    def __init__(
        self,
        layer: nn.Module,
        call: Callable,
        inputs: Callable,
        options: dict,
        device: torch.device,
    ):
        self.call, self.inputs = call, inputs
        self.state = LayerState(layer, options)
        # Weak references: the graph holds the slots, and the slots hold this object.
        self.slots: list[weakref.ref[_Slot]] = []
        self.devices = [device] if device.type == "cuda" else []
        self.random = torch.get_rng_state()
        self.device_random = [torch.cuda.get_rng_state(device) for device in self.devices]
        kind = common.autocast_device(device)
        self.autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            # The cache would keep the copies of all weights until backward ends.
            "cache_enabled": False,
        }
        self.task: int | None = None

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    @staticmethod
    def unpack(slot: _Slot) -> Tensor:
        return slot.run.take(slot)

    def take(self, slot: _Slot) -> Tensor:
        """The tensor of ``slot``; one backward pass may read it only once."""
        task = torch._C._current_graph_task_id()
        if slot.value is None:
            if self.task == task and task != -1:
                raise RuntimeError(
                    "recompute policy: a saved tensor was read twice in one backward pass"
                )
            self.again()
            self.task = task
        value, slot.value = slot.value, None
        return value

    def again(self) -> None:
        """Runs the forward pass again, up to the last tensor that autograd saved."""
        found = 0

        def pack(tensor: Tensor) -> None:
            nonlocal found
            slot = self.slots[found]()
            if slot is not None:
                kind = tensor.dtype, tuple(tensor.shape)
                if slot.kind != kind:
                    raise RuntimeError(
                        f"recompute policy: a layer saved {slot.kind} in forward and {kind} when "
                        "it "
                        "ran again; it must do the same both times"
                    )
                if slot.version is not None:
                    check_version(tensor, slot.version)
                slot.value = tensor.detach()
            found += 1
            if found == len(self.slots):
                raise _AllSaved

        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.random)
            for device, state in zip(self.devices, self.device_random, strict=True):
                torch.cuda.set_rng_state(state, device)
            with torch.no_grad():
                inputs = self.inputs()
            with (
                torch.enable_grad(),
                torch.autocast(**self.autocast),
                self.state.restored(),
                saved_tensors_hooks(_untraced(pack), lambda _: None),
                contextlib.suppress(_AllSaved),
            ):
                self.call(*inputs)
        if found < len(self.slots):
            raise RuntimeError(
                f"recompute policy: a layer saved {len(self.slots)} tensors in forward and {found} "
                "when it ran again; it must do the same both times"
            )


def _untraced(hook: Callable) -> Callable:
    """The hook, hidden from torch.compile: where the graph of a layer breaks, its ops run in frames
    that are traced, and autograd calls the hook in them."""
    # Whoever compiles has imported it. It is slow to import.
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def rerun(
    layer: nn.Module,
    call: Callable,
    inputs: Sequence[Tensor | None],
    recompute_inputs: Callable,
    options: dict,
) -> Any:
    """Computes ``call(*inputs)``, which runs ``layer``, so that autograd saves nothing of it.

    Backward runs it again, with the same dropout and autocast, up to the last tensor that autograd
    would have saved. So the layer's last matrix product does not run again.

    Args:
        call: holds none of the inputs.
        inputs: the first one is a tensor.
        recompute_inputs: () -> the inputs, without gradient.
        options: what ``call`` passes to the layer besides them, by name. The layer may not change
            what is in them.
    """
    needs = [t is not None and t.requires_grad for t in inputs]

    def again() -> list[Tensor | None]:
        found = zip(recompute_inputs(), needs, strict=True)
        return [None if t is None else t.requires_grad_(need) for t, need in found]

    run = _Run(layer, call, again, options, inputs[0].device)  # type: ignore[union-attr]
    with saved_tensors_hooks(_untraced(run.pack), _untraced(run.unpack)):
        return call(*inputs)
