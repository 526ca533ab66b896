"""Recompute in backward single tensors that forward does not save.

`not_saved` keeps autograd from saving them: a `Recompute` recomputes each of them when backward
reads it. It uses autograd's hooks on saved tensors, so it works for modules, hooks on modules,
compiled layers and torch's attention. A tensor that was modified in place since forward is an
error. `deepfast.nn.rerun` runs a whole layer again.
"""

import weakref
from collections.abc import Callable
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from deepfast.ops import common

Kind = TypeVar("Kind", bound=nn.Module)


def plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a fused op may replace ``module``: its exact type is ``kind`` and it has no hooks."""
    changed = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._compiled_call_impl,
        "forward" in vars(module),
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
    return type(module) is kind and not any(changed)


def check_input(op: str, name: str, x: Tensor, linear: nn.Module) -> None:
    """Refuses an input on another device than a linear layer is on, or of another dtype, which
    autocast does not cast."""
    if type(linear) is not nn.Linear:
        return
    weight = linear.weight
    if x.dtype == weight.dtype and x.device == weight.device:
        return
    # A hook may move or cast the input.
    if plain(linear, nn.Linear):
        if x.device != weight.device:
            raise ValueError(
                f"{op}: {name} must be on {weight.device} like the weights, got {x.device}"
            )
        given, weight = common.autocast(x, linear.weight)
        if given.dtype != weight.dtype:
            raise ValueError(
                f"{op}: {name} must be {weight.dtype} like the weights, got {given.dtype}"
            )


class Kept:
    """A tensor that backward reads. It is an error to modify it in place before that."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # Detached: a saved output would otherwise refer to its own node in the graph.
        self.tensor, self.version = tensor.detach(), tensor._version

    def __call__(self, what: str = "a tensor") -> Tensor:
        check_version(self.tensor, self.version, what)
        return self.tensor


def check_version(tensor: Tensor, version: int, what: str = "a tensor") -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"recompute policy: {what} that backward needs has been modified by an inplace "
            "operation "
            f"since forward: {tuple(tensor.shape)} is at version {tensor._version}, expected "
            f"version {version}"
        )


class Recompute:
    """Recomputes one tensor in backward, once for all its readers.

    Args:
        tensor: the tensor that autograd will not save. This object does not keep it either.
        function: () -> a tensor with the same elements, dtype and strides. It runs without grad
            and without autocast. Its result is freed when the last reader has read it.
    """

    def __init__(self, tensor: Tensor, function: Callable[[], Tensor]):
        self.tensor, self.version = weakref.ref(tensor), tensor._version
        self.function = function
        self.device, self.dtype = common.autocast_device(tensor.device), tensor.dtype
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        self.readers = self.left = 0
        self.value: Tensor | None = None

    def gives(self, x: Tensor) -> bool:
        """Whether x is still the tensor and unchanged; a hook may have replaced it."""
        return self.tensor() is x and x._version == self.version

    def read(self) -> Tensor:
        if self.value is None:
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                self.value = self.function()
            if self.value.stride() != self.stride or self.value.dtype != self.dtype:
                raise RuntimeError("recompute policy: a tensor was recomputed with another layout")
            self.left = self.readers
        value = self.value
        self.left -= 1
        if self.left == 0:
            self.value = None
        return value


class not_saved(saved_tensors_hooks):
    """Inside the block autograd saves neither these tensors nor views of them."""

    def __init__(self, tensors: list[tuple[Tensor, Recompute]]):
        storages = {_storage(tensor): recompute for tensor, recompute in tensors}

        def pack(tensor: Tensor):
            recompute = storages.get(_storage(tensor))
            if recompute is None:
                return Kept(tensor)
            recompute.readers += 1
            return recompute, tensor.size(), tensor.stride(), tensor.storage_offset()

        super().__init__(pack, _unpack)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unpack(packed) -> Tensor:
    if isinstance(packed, Kept):
        return packed()
    recompute, size, stride, offset = packed
    value = recompute.read()
    return value.as_strided(size, stride, offset - recompute.offset + value.storage_offset())
