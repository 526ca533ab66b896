"""Compute again in backward what autograd would otherwise save.

Both ways use autograd's hooks on saved tensors. So they work for any module, hooks on modules,
compiled layers and torch's attention, and gradients reach parameters as usual, as DDP and FSDP
expect. `not_saved` recomputes one tensor, `rerun` all that a layer computes. torch's checkpointing
would leave reference cycles, which hold memory until the garbage collector runs. Backward uses the
values that forward used: a tensor that was modified in place since then, or a layer that has
changed (`LayerState`), is an error.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from deepfast.nn.layer_state import LayerState
from deepfast.nn.linear import plain
from deepfast.ops import common


class Kept:
    """A tensor that backward reads. It is an error to modify it in place before that."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # Detached: a saved output would otherwise refer to its own node in the graph.
        self.tensor, self.version = tensor.detach(), tensor._version

    def __call__(self) -> Tensor:
        _check_version(self.tensor, self.version)
        return self.tensor


def _check_version(tensor: Tensor, expected: int) -> None:
    if tensor._version != expected:
        raise RuntimeError(
            f"recompute policy: a tensor {tuple(tensor.shape)} that backward needs has been "
            f"modified by an inplace operation since forward: expected version {expected}, got "
            f"version {tensor._version}"
        )


def kept(*tensors: Tensor | None) -> Callable[[], list[Tensor | None]]:
    """Returns the function that gives the tensors in backward."""
    each = [None if tensor is None else Kept(tensor) for tensor in tensors]
    return lambda: [None if one is None else one() for one in each]


def _without_grad(function: Callable, device: torch.device) -> Any:
    """Calls ``function`` without grad and autocast, whatever surrounds backward."""
    with torch.no_grad(), torch.autocast(common.autocast_device(device), enabled=False):
        return function()


# ---- one tensor ----------------------------------------------------------------------------------


def recomputable(tensor: Tensor, function: Callable[[], Tensor]) -> None:
    """Lets `not_saved` compute ``tensor`` again in backward.

    function: () -> a tensor with the same elements and dtype.
    """
    tensor.deepfast_recompute = tensor._version, function  # type: ignore[attr-defined]


def not_saved(x: Tensor, linear: nn.Module) -> AbstractContextManager:
    """Inside the block, which computes ``linear(x)``, autograd does not save x.

    It saves x as usual unless x is `recomputable`, has not been modified since, and the layer is a
    plain one.
    """
    # A compiler chooses itself what to recompute.
    known = None if torch.compiler.is_compiling() else getattr(x, "deepfast_recompute", None)
    if known is None or known[0] != x._version or not plain(linear, nn.Linear):
        return contextlib.nullcontext()
    function, device, storage = known[1], x.device, x.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Kept | torch.Size:
        return tensor.shape if tensor.untyped_storage()._cdata == storage else Kept(tensor)

    def unpack(packed: Kept | torch.Size) -> Tensor:
        if isinstance(packed, Kept):
            return packed()
        return _without_grad(function, device).view(packed)

    return saved_tensors_hooks(pack, unpack)


# ---- a whole layer -------------------------------------------------------------------------------


class _AllSaved(BaseException):
    """The layer has computed again every tensor that backward needs."""


class _Slot:
    """A place in the graph for a tensor that was not saved. Backward fills it and empties it."""

    __slots__ = ("__weakref__", "kind", "value", "version")

    def __init__(self, tensor: Tensor):
        self.kind = tensor.dtype, tuple(tensor.shape)
        # Only weights and views of weights must keep their version: a layer may modify its own
        # intermediate results in place.
        source = tensor if tensor._base is None else tensor._base
        self.version = tensor._version if source.is_leaf and source.requires_grad else None
        self.value: Tensor | None = None


def rerun(
    layer: nn.Module,
    call: Callable,
    inputs: Sequence[Tensor | None],
    recompute_inputs: Callable | None,
    options: dict,
) -> Any:
    """Computes ``call(*inputs)``, which runs ``layer``, so that autograd saves nothing of it.

    Backward runs it again, with the same dropout and autocast, up to the last tensor that autograd
    would have saved. So the layer's last matrix product does not run again.

    Args:
        call: holds none of the inputs.
        inputs: the first one is a tensor.
        recompute_inputs: () -> the inputs; None to keep them.
        options: what ``call`` passes to the layer besides them, by name.
    """
    if torch.compiler.is_compiling():
        # A compiler understands torch's checkpointing.
        return checkpoint(call, *inputs, use_reentrant=False)
    if not torch.is_grad_enabled():
        return call(*inputs)
    device = inputs[0].device  # type: ignore[union-attr]
    needs = [t is not None and t.requires_grad for t in inputs]
    inputs_again = recompute_inputs or kept(*inputs)
    state, surroundings = LayerState(layer, options), _surroundings(device)
    # Weak references: the graph holds the slots, and hooks that it holds have this list.
    slots: list[weakref.ref[_Slot]] = []

    def pack(tensor: Tensor) -> _Slot:
        slot = _Slot(tensor)
        slots.append(weakref.ref(slot))
        return slot

    def unpack(slot: _Slot) -> Tensor:
        if slot.value is None:
            run_again()
        value, slot.value = slot.value, None
        return value  # type: ignore[return-value]

    def run_again() -> None:
        count = 0

        def fill(tensor: Tensor) -> None:
            nonlocal count
            slot, count = slots[count](), count + 1
            if slot is not None:
                kind = tensor.dtype, tuple(tensor.shape)
                if slot.kind != kind:
                    raise RuntimeError(
                        "recompute policy: a layer must do the same when it runs again, expected "
                        f"it to save {slot.kind}, got {kind}"
                    )
                if slot.version is not None:
                    _check_version(tensor, slot.version)
                slot.value = tensor.detach()
            if count == len(slots):
                raise _AllSaved

        again = _without_grad(inputs_again, device)
        for tensor, need in zip(again, needs, strict=True):
            if tensor is not None:
                tensor.requires_grad_(need)
        hooks = saved_tensors_hooks(_untraced(fill), lambda _: None)
        with state.as_in_forward(), surroundings(), hooks, contextlib.suppress(_AllSaved):
            call(*again)
        if count < len(slots):
            raise RuntimeError(
                "recompute policy: a layer must do the same when it runs again, expected it to "
                f"save {len(slots)} tensors, got {count}"
            )

    with saved_tensors_hooks(_untraced(pack), _untraced(unpack)):
        result = call(*inputs)
    state.end_forward()
    return result


def _surroundings(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Returns what gives a block the random numbers and the autocast of this moment."""
    devices = [device] if device.type == "cuda" else []
    random = torch.get_rng_state()
    device_random = [torch.cuda.get_rng_state(device) for device in devices]
    kind = common.autocast_device(device)
    autocast: dict[str, Any] = {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        # The cache would keep the copies of all weights until backward ends.
        "cache_enabled": False,
    }

    @contextlib.contextmanager
    def as_in_forward():
        with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(**autocast):
            torch.set_rng_state(random)
            for device, state in zip(devices, device_random, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    return as_in_forward


def _untraced(hook: Callable) -> Callable:
    """The hook, hidden from torch.compile: where the graph of a layer breaks, its ops run in frames
    that are traced, and autograd calls the hook in them."""
    # Whoever compiles has imported it. It is slow to import.
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
