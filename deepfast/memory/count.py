"""Counts the bytes of the tensors that are alive inside a block of code, and their peak."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def dense(tree: object) -> list[Tensor]:
    """The tensors with a storage. A sparse one consists of tensors that other ops have made."""
    tensors = (t for t in tree_leaves(tree) if isinstance(t, Tensor))
    return [t for t in tensors if t.layout is torch.strided]


class _Watch(TorchDispatchMode):
    """Sees every op, in forward, in backward and inside autograd functions."""

    # Asks deepfast.ops to show the ops inside each op, so that their temporary tensors count too.
    sees_through = True

    def __init__(self, count: "LiveBytes"):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A storage that first appears as an input existed before the block, so it is not counted.
        before = self.count._storages((args, kwargs))
        out = func(*args, **kwargs)
        self.count._see(out, before, self.count._category(func, args))
        return out


class LiveBytes:
    """Counts the bytes of tensor storages that are created inside a block and still alive.

    Use ``with LiveBytes() as live: step()``, then read ``live.peak``. Storages from before the
    block do not count, also when they are freed inside it. Views and in-place results share a
    storage, which counts once.

    On the CPU every op is intercepted. A storage counts from the op that returns it until its last
    tensor is freed. It does not count temporary buffers inside a single op of torch or inside a
    compiled graph; it counts those inside deepfast's ops. On a GPU the numbers are the caching
    allocator's and include everything.

    On the CPU this costs some microseconds per op, so measure time in a separate run.

    Args:
        device: "cpu" or "cuda"; tensors on other devices do not count.
    """

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"LiveBytes: device must be cpu or cuda, got {self.device}")
        # Whether the numbers are those of CUDA's allocator.
        self._allocator = self.device.type == "cuda"
        self._current = self._peak = 0
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}
        self._watch: _Watch | None = None
        self._open = False

    @property
    def current(self) -> int:
        """Bytes alive now; after the block, the bytes that were alive at its end."""
        if self._open and self._allocator:
            return torch.cuda.memory_allocated(self.device) - self._start
        return self._current

    @property
    def peak(self) -> int:
        """The highest value of `current` so far."""
        if self._open and self._allocator:
            return torch.cuda.max_memory_allocated(self.device) - self._start
        return self._peak

    def __enter__(self) -> "LiveBytes":
        if self._open:
            raise RuntimeError("LiveBytes: this counter is already running; use another LiveBytes")
        self._current = self._peak = 0
        self._alive.clear()
        if self._allocator:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._watch = _Watch(self)
            self._watch.__enter__()
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._allocator:
            torch.cuda.synchronize(self.device)
            self._current, self._peak = self.current, self.peak
        else:
            self._watch.__exit__(*error)
            self._watch = None
        self._open = False

    def _storages(self, tree: object) -> set[int]:
        """Keys of the storages of all tensors in ``tree`` that are not counted."""
        keys = (tensor.untyped_storage()._cdata for tensor in dense(tree))
        return {key for key in keys if key not in self._alive}

    def _category(self, func: Any, args: tuple) -> int:
        """The category of the storages that an op makes; a subclass has several."""
        return 0

    def _see(self, tree: object, before: set[int], made: int) -> None:
        for tensor in dense(tree):
            if tensor.device.type != self.device.type:
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._alive:
                # resize_ changes the size of a storage that is already counted.
                reference, known, category = self._alive[key]
                self._alive[key] = (reference, nbytes, category)
                self._add(nbytes - known, category)
            elif key not in before:
                # The storage's Python object lives as long as the storage itself.
                reference = weakref.ref(
                    storage,
                    lambda _, key=key: self._gone(key),  # type: ignore[misc]
                )
                self._alive[key] = (reference, nbytes, made)
                self._add(nbytes, made)

    def _add(self, nbytes: int, category: int) -> None:
        self._current += nbytes
        self._peak = max(self._peak, self._current)

    def _gone(self, key: int) -> None:
        if key in self._alive:
            _, nbytes, category = self._alive.pop(key)
            if self._open:
                self._add(-nbytes, category)

    def __repr__(self) -> str:
        return f"LiveBytes(current={self.current:,}, peak={self.peak:,}, device={self.device})"
