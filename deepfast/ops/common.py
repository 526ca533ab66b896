"""Casts, layouts, seeds, launches, and checks of several operands at once, for every op."""

import functools
import operator
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.launches import LAUNCHES

_HALVES = (torch.bfloat16, torch.float16)


def _autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


# What torch.compiler.assume_constant_result does, without importing all of torch's compiler. That
# of torch 2.10 cannot trace the question.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_device(device: torch.device) -> str:
    """The type of device whose autocast applies on ``device``: "cpu" where it has none, as meta."""
    return device.type if _has_autocast(device.type) else "cpu"


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under autocast casts fp32 tensors to its dtype. Kernels still compute sums in fp32."""
    if not _autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t is not None and t.dtype == torch.float32 else t for t in tensors)


def widened(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under autocast casts 16-bit tensors to fp32."""
    if not _autocasts(tensors[0]):
        return tensors
    return tuple(t.float() if t is not None and t.dtype in _HALVES else t for t in tensors)


def promoted(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under autocast casts tensors of different dtypes to fp32, as torch does where it adds them.

    Ops without a matrix product otherwise return the dtype that they get, also under autocast: a
    residual stream in fp32 stays in fp32.
    """
    dtype = tensors[0].dtype
    for t in tensors:
        if t is not None and t.dtype != dtype:
            return widened(*tensors)
    return tensors


_NO_LAUNCHES = SimpleNamespace(**dict.fromkeys(LAUNCHES, lambda **operands: None))


def has_data(x: Tensor) -> bool:
    """Whether x has elements in memory: a meta tensor and a fake one have none."""
    return not (x.is_meta or type(x) is FakeTensor)


def launches(op: str, backend: str | None, x: Tensor, width: int | None) -> Any:
    """The launches of ``op`` by the backend that serves tensors like ``x``, see
    `deepfast.backend.choose`. Fake tensors have no data, and launches on them do nothing."""
    if not has_data(x):
        return _NO_LAUNCHES
    return backends.choose(op, backend, x.device, x.dtype, width)[1]


def cast_states(
    state_dtype: torch.dtype | None, *tensors: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Under autocast casts what is pushed to a depth connection: None to autocast's dtype."""
    return autocast(*tensors) if state_dtype is None else widened(*tensors)


def bare_apply(node: type[torch.autograd.Function]):
    """``node.apply`` without the Python layer of autograd.Function. That layer is for torch.func
    and setup_context, which these nodes do not use, and takes a third of the call's time."""
    return super(torch.autograd.Function, node).apply  # type: ignore[misc]


def traced_as(name: str):
    """Decorates an autograd node: traces of `torch.profiler` show ``deepfast::name``, and its
    backward as torch names backward nodes."""

    def rename(node: type[torch.autograd.Function]):
        node.__name__ = node.__qualname__ = f"deepfast::{name}"
        node._backward_cls.__name__ = f"deepfast::{name}Backward"
        return node

    return rename


def reverse_mode_only(name: str, *, vmap: bool = True) -> None:
    """Raises inside forward-mode differentiation and the derivatives of torch.func, which no op of
    ours has. vmap: whether the other transforms of torch.func may work."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(f"{name}: forward-mode differentiation is not supported")
    if torch._C._are_functorch_transforms_active():
        transforms = torch._C._functorch.get_interpreter_stack()
        if not vmap or any(t.key() == torch._C._functorch.TransformType.Grad for t in transforms):
            expected = "derivatives by torch.autograd" if vmap else "no transforms"
            raise NotImplementedError(f"{name}: expected {expected}, got one by torch.func")


def first_order(name: str):
    """Decorates the backward of an op that has no second derivative: asking for one raises.

    The error is raised in the first backward pass, the one with ``create_graph=True``. In the
    second it would come too late: the node would lie on no path to the inputs below the op, so
    `torch.autograd.grad` would skip it and return a wrong gradient from the other paths.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def run(ctx, *grads):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: double backward (create_graph=True) is not supported: the op has "
                    "no second derivative"
                )
            return backward(ctx, *grads)

        return run

    return decorate


def rows(x: Tensor | None) -> Any:
    """(..., D) as (T, D) with contiguous channels; a view where the strides allow it."""
    if x is None:
        return None
    x = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def empty_contiguous(like: Tensor) -> Tensor:
    """Uninitialised, shaped like ``like``."""
    # `torch.empty_like` takes half the time of `new_empty`.
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)


def empty_slots(count: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised buffer (count, T, D) with slots for tensors like ``like`` (T, D), in
    ``dtype`` or else in its dtype.

    The distance from slot to slot is an integer of pages plus one cache line. Without that line
    the same element of every slot would map to the same few cache sets.
    """
    dtype = dtype or like.dtype
    line = 64 // dtype.itemsize
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride, dtype=dtype)[:, : like.numel()].unflatten(1, like.shape)


def parameter(p: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter as kernels read it: contiguous, in the compute dtype that goes with ``dtype``."""
    if p is None:
        return None
    wanted = compute_dtype(dtype)
    if p.dtype == wanted and p.is_contiguous():
        return p
    return p.detach().to(wanted).contiguous()


def detached(p: Tensor | None) -> Tensor | None:
    """``p`` for a backward that recomputes with it. A saved parameter follows ``p.data = new``;
    a detached one keeps the values of forward, and an in-place change is still an error."""
    return None if p is None else p.detach()


def probability(op: str, dropout_p: float, training: bool, argument: str = "dropout_p") -> float:
    """The probability of dropout, checked: 0 outside of training."""
    checks.probability(op, dropout_p, argument=argument)
    checks.flag(op, training=training)
    return dropout_p if training else 0.0


def draw_seed(
    op: str, seed: int | Tensor | None, device: torch.device, argument: str = "seed"
) -> Tensor:
    """The seed as a 0-dim int64 tensor on ``device``; for None a seed from torch's generator of
    that device, so that `torch.manual_seed`, checkpointing and CUDA graphs reproduce it. A tensor
    is copied: backward needs the mask of forward, also where the caller then changes the seed."""
    if seed is None:
        return torch.randint(2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dim() == 0 and seed.dtype == torch.int64 and seed.device == device:
            return seed.clone()
        got = f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
    elif isinstance(seed, bool) or checks.is_whole(seed):
        # Any int is allowed: it is taken modulo 2^64.
        number = (operator.index(seed) + 2**63) % 2**64 - 2**63
        return torch.tensor(number, dtype=torch.int64, device=device)
    else:
        got = repr(seed)
    raise TypeError(
        f"{op}: {argument} must be an int or a 0-dim int64 tensor on {device}, got {got}"
    )


def checked_sources(op: str, name: str, sources: Sequence[Tensor]) -> list[Tensor]:
    """Checks 1 or more tensors (..., D) of one shape, dtype and device, and makes them so by
    `promoted`."""
    if not isinstance(sources, Iterable):
        raise TypeError(f"{op}: {name} must be a list of tensors, got {type(sources).__name__}")
    sources = list(sources)
    if not sources:
        raise ValueError(f"{op}: {name} must hold at least 1 tensor, got 0")
    for k, source in enumerate(sources):
        checks.tensor(op, f"{name}[{k}]", source)
    sources = list(promoted(*sources))
    for k, source in enumerate(sources[1:], 1):
        checks.like(op, f"{name}[{k}]", source, f"{name}[0]", sources[0])
    return sources


def fits(
    op: str, name: str, p: Tensor, shape: tuple, like: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Checks that ``p`` is a dense tensor of this shape on the device of ``like``, in ``dtype`` or
    else in the dtype of ``like``. In the shape a letter is any size."""
    if not isinstance(p, Tensor) or p.layout != torch.strided:
        got = p.layout if isinstance(p, Tensor) else type(p).__name__
        raise TypeError(f"{op}: {name} must be a dense tensor, got {got}")
    dtype, equal = dtype or like.dtype, p.dim() == len(shape)
    for size, expected in zip(p.shape, shape, strict=False):
        equal = equal and (isinstance(expected, str) or size == expected)
    if not equal or p.dtype != dtype or p.device != like.device:
        sizes = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
        raise ValueError(
            f"{op}: {name} must be {dtype} {sizes} on {like.device}, got {p.dtype} "
            f"{tuple(p.shape)} on {p.device}"
        )


def linear_operands(
    op: str, x: Tensor, shape: tuple, weight: Tensor, bias: Tensor | None, *, prefix: str = ""
) -> tuple[Tensor, Tensor | None]:
    """Checks weight and bias of a linear map in x's dtype, and casts them for autocast.

    shape: of the weight, with a letter for the number of rows.
    prefix: what stands before "weight" and "bias" in the op's names for them.
    """
    checks.tensor(op, f"{prefix}weight", weight)
    weight, bias = autocast(weight, bias)
    fits(op, f"{prefix}weight", weight, shape, x)
    if bias is not None:
        fits(op, f"{prefix}bias", bias, (weight.shape[0],), x)
    return weight, bias


def linear_grads(dy, x, want_weight, want_bias):
    """dW = dy^T x and db of ``y = x W^T + b``, computed as torch does; x is read only for dW."""
    dy = dy.reshape(-1, dy.shape[-1])
    dweight = dy.mT.mm(x.view(-1, x.shape[-1])) if want_weight else None
    return dweight, dy.sum(0) if want_bias else None


def zeros_if_missing(dout: Tensor | None, x: Tensor, width: int) -> Tensor:
    """The gradient of a linear map's result (..., width), zeros for None. x: (..., D)."""
    return x.new_zeros(*x.shape[:-1], width) if dout is None else dout
