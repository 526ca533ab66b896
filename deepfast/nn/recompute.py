"""Recomputation: forward run again in backward, or single tensors made again where they are read.

Both stand on autograd's hooks on saved tensors, so whatever the code between consists of (modules,
hooks on them, compiled layers, torch's attention) is served alike, and parameters' gradients reach
them as ever, as DDP and FSDP expect.
"""

import contextlib
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """A tensor kept for backward, where autograd does not: as it was, or an error."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # Not the tensor itself: an output that is saved would refer to its own node.
        self.tensor, self.version = tensor.detach(), tensor._version

    def __call__(self) -> Tensor:
        _check_version(self.tensor, self.version)
        return self.tensor


class Again:
    """Makes a certain tensor again: valid for that one alone, as it was when this was made."""

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]):
        # Not the tensor, which is not to be kept.
        self.tensor, self.version, self.make = weakref.ref(tensor), tensor._version, make

    def makes(self, x: Tensor) -> bool:
        """A hook or a module of another make may have put something else in its place."""
        return self.tensor() is x and x._version == self.version

    def __call__(self) -> Tensor:
        return self.make()


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "memory policy: a tensor that backward needs has been modified by an inplace operation "
            f"since forward: {tuple(tensor.shape)} is at version {tensor._version}, expected "
            f"version {version}"
        )


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype} {tuple(shape)}"


class _Enough(BaseException):
    """Everything that backward needs has been made again."""


class _Slot:
    """Stands in the graph for a tensor that was not kept."""

    __slots__ = ("__weakref__", "kind", "rerun", "value", "version")

    def __init__(self, rerun: "_Rerun", tensor: Tensor):
        self.rerun, self.value = rerun, None
        self.kind = tensor.shape, tensor.dtype
        # A weight, or a view of one. What is made on the way may be changed on the way.
        source = tensor if tensor._base is None else tensor._base
        self.version = tensor._version if source.is_leaf and source.requires_grad else None


def _generators(device: torch.device) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """The states of the generators that code on ``device`` may draw from."""
    states = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        put = torch.cuda.set_rng_state
        states.append((lambda state: put(state, device), torch.cuda.get_rng_state(device)))
    return states


class _Rerun:
    """One run of ``body`` whose saved tensors are made again when backward first asks for one."""

    def __init__(self, body: Callable, remake: Callable, device: torch.device):
        self.body, self.remake, self.device = body, remake, device
        # The graph holds the slots, and they hold this: the other way round would be a circle.
        self.slots: list[weakref.ref[_Slot]] = []
        self.generators = _generators(device)
        kind = device.type
        self.autocast = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            # A cache would keep every weight's copy until backward ends.
            "cache_enabled": False,
        }
        self.task = None

    def pack(self, tensor: Tensor) -> "_Slot":
        slot = _Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    @staticmethod
    def unpack(slot: _Slot) -> Tensor:
        return slot.rerun.take(slot)

    def take(self, slot: _Slot) -> Tensor:
        """The tensor of ``slot``, each once in a backward pass."""
        task = torch._C._current_graph_task_id()
        if slot.value is None:
            if self.task == task and task != -1:
                raise RuntimeError(
                    "memory policy: a saved tensor was asked for twice in one backward pass"
                )
            self.run()
            self.task = task
        value, slot.value = slot.value, None
        return value

    def run(self) -> None:
        """Forward again, as far as the last tensor that was saved."""
        found = 0

        def pack(tensor: Tensor) -> None:
            nonlocal found
            slot = self.slots[found]()
            if slot is not None:
                if slot.kind != (tensor.shape, tensor.dtype):
                    raise RuntimeError(
                        f"memory policy: a layer saved {_words(*slot.kind)} in forward and "
                        f"{_words(tensor.shape, tensor.dtype)} when it ran again; it must do the "
                        "same both times"
                    )
                if slot.version is not None:
                    _check_version(tensor, slot.version)
                slot.value = tensor.detach()
            found += 1
            if found == len(self.slots):
                raise _Enough

        before = _generators(self.device)
        for (put, state), _ in zip(self.generators, before, strict=True):
            put(state)
        try:
            with torch.no_grad():
                inputs = [
                    None if x is None else x.requires_grad_(need) for x, need in self.remake()
                ]
            with (
                torch.enable_grad(),
                torch.autocast(**self.autocast),
                saved_tensors_hooks(pack, lambda _: None),
                contextlib.suppress(_Enough),
            ):
                self.body(*inputs)
        finally:
            for put, state in before:
                put(state)
        if found < len(self.slots):
            raise RuntimeError(
                f"memory policy: a layer saved {len(self.slots)} tensors in forward and {found} "
                "when it ran again; it must do the same both times"
            )


def rerun(body: Callable, inputs: tuple[Tensor | None, ...], remake: Callable):
    """``body(*inputs)``, of which nothing is kept: backward runs it again, with dropout and
    autocast as they were, up to the last tensor that autograd saves (a last product is spared).

    Args:
        body: of tensors; what it draws must come from torch's generators.
        inputs: tensors or None.
        remake: () to the same tensors, detached.

    Returns:
        What ``body`` returns.
    """
    if not torch.is_grad_enabled():
        return body(*inputs)
    needs = [x is not None and x.requires_grad for x in inputs]
    device = next(x.device for x in inputs if x is not None)
    run = _Rerun(body, lambda: zip(remake(), needs, strict=True), device)
    with saved_tensors_hooks(run.pack, run.unpack):
        return body(*inputs)


class remade(saved_tensors_hooks):
    """Inside the block, autograd keeps no view of certain tensors: they are made again.

    Args:
        makers: (tensor, () to a tensor with the same elements) each. A maker runs without grad
            and autocast when backward first reads the tensor; its result lives until the last read.
    """

    def __init__(self, makers: list[tuple[Tensor, Callable[[], Tensor]]]):
        made = {_storage(tensor): _Made(tensor, make) for tensor, make in makers}

        def pack(tensor: Tensor):
            source = made.get(_storage(tensor))
            if source is None:
                return Kept(tensor)
            source.readers += 1
            return source, tensor.size(), tensor.stride(), tensor.storage_offset()

        super().__init__(pack, _unpack)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unpack(packed) -> Tensor:
    if isinstance(packed, Kept):
        return packed()
    source, size, stride, offset = packed
    value = source.read()
    return value.as_strided(size, stride, offset - source.offset + value.storage_offset())


class _Made:
    """A tensor that is made again, once for all of its readers."""

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]):
        self.make, self.readers, self.left = make, 0, 0
        self.device, self.dtype = tensor.device.type, tensor.dtype
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        self.value: Tensor | None = None

    def read(self) -> Tensor:
        if self.value is None:
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                self.value = self.make()
            if self.value.stride() != self.stride or self.value.dtype != self.dtype:
                raise RuntimeError("memory policy: a tensor was made again with another layout")
            self.left = self.readers
        value = self.value
        self.left -= 1
        if self.left == 0:
            self.value = None
        return value
