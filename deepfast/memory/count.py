"""How many bytes of tensors are alive inside a block of code, now and at the highest."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Sees every op, in forward, in backward and inside autograd functions."""

    # deepfast.ops: show what an op is made of, for its scratch memory counts.
    sees_through = True

    def __init__(self, count: "LiveBytes"):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A storage first met as an input was there before the block; its views are not new.
        before = self.count._storages((args, kwargs))
        out = func(*args, **kwargs)
        self.count._see(out, before)
        return out


class LiveBytes:
    """Counts the bytes of tensor storages that are made inside a block and still alive.

    ``with LiveBytes() as live: step()`` and then ``live.peak``. What was alive before the block
    counts as zero, and counts nothing when it goes. Views and in-place results share a storage
    and count once. On the CPU every op is watched: a storage counts from the op that returns it
    until the last tensor on it is gone, which is what the allocator sees too, but for scratch
    memory inside a single op of torch and for the inside of a compiled graph; deepfast's own ops
    are looked into. On a GPU the numbers are the caching allocator's and include all of these.

    The CPU's watch costs some microseconds per op: take times in another run.

    Args:
        device: "cpu" or "cuda"; tensors elsewhere are not counted.
    """

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"LiveBytes: device must be cpu or cuda, got {self.device}")
        self._current = self._peak = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._watch: _Watch | None = None
        self._open = False

    @property
    def current(self) -> int:
        """Bytes alive now; after the block, bytes that were alive at its end."""
        if self._open and self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._start
        return self._current

    @property
    def peak(self) -> int:
        """The highest value of `current` so far."""
        if self._open and self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._start
        return self._peak

    def __enter__(self) -> "LiveBytes":
        if self._open:
            raise RuntimeError("LiveBytes: this count is already running; make another one")
        self._current = self._peak = 0
        self._alive.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._watch = _Watch(self)
            self._watch.__enter__()
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._current, self._peak = self.current, self.peak
        else:
            self._watch.__exit__(*error)
            self._watch = None
        self._open = False

    def _storages(self, tree: object) -> set[int]:
        """Keys of the storages of all tensors in ``tree`` that are not counted."""
        return {
            key
            for tensor in tree_leaves(tree)
            if isinstance(tensor, Tensor)
            and (key := tensor.untyped_storage()._cdata) not in self._alive
        }

    def _see(self, tree: object, before: set[int]) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._alive:
                # resize_ changes a storage that is known.
                reference, known = self._alive[key]
                self._alive[key] = (reference, nbytes)
                self._add(nbytes - known)
            elif key not in before:
                # The storage's Python object lives as long as the storage itself.
                reference = weakref.ref(storage, lambda _, key=key: self._gone(key))
                self._alive[key] = (reference, nbytes)
                self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        self._current += nbytes
        self._peak = max(self._peak, self._current)

    def _gone(self, key: int) -> None:
        _, nbytes = self._alive.pop(key, (None, 0))
        if self._open:
            self._current -= nbytes

    def __repr__(self) -> str:
        return f"LiveBytes(current={self.current:,}, peak={self.peak:,}, device={self.device})"
