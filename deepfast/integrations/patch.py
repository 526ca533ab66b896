"""This package's ops in the place of a model's own norms. Only the classes of modules change."""

import copy
import functools
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.ops import common


class Swapped:
    """The first base of a swapped class; the class of the norm is the second."""

    formula: Callable[..., Tensor]

    def forward(self, *args, **kwargs) -> Tensor:
        return self.formula(*args, **kwargs)

    def __reduce_ex__(self: Any, protocol) -> Any:
        # Pickle finds the class by its formula and its base.
        cls: Any = type(self)
        return _empty, (cls.formula, cls.__bases__[1]), *super().__reduce_ex__(protocol)[2:]


@functools.cache
def _swapped(formula: Callable, plain: type) -> Any:
    body = {"__module__": plain.__module__, "formula": formula}
    return type(plain.__name__, (Swapped, plain), body)


def _empty(formula: Callable, plain: type) -> Any:
    return object.__new__(_swapped(formula, plain))


def torch_norm(norm: Any, input: Tensor) -> Tensor:
    """torch's LayerNorm and RMSNorm. Under autocast on a GPU they return fp32."""
    x: Any = common.widened(input)[0] if isinstance(input, Tensor) and input.is_cuda else input
    if isinstance(norm, nn.LayerNorm):
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)
    checks.tensor("rms_norm", "x", x)
    return ops.rms_norm(x, norm.weight, torch.finfo(x.dtype).eps if norm.eps is None else norm.eps)


def olmo2_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """``(weight * n).to(x.dtype)``"""
    return ops.rms_norm(hidden_states, norm.weight, _eps(norm))


def llama_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """``weight * n.to(x.dtype)``: the result has the wider dtype of the two."""
    dtype = torch.promote_types(hidden_states.dtype, norm.weight.dtype)
    return olmo2_norm(norm, hidden_states.to(dtype))


def t5_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """``weight * n``, n in the weight's dtype where that has 16 bits."""
    n, dtype = llama_norm(norm, hidden_states), norm.weight.dtype
    return n.to(dtype) if dtype.itemsize == 2 else n


def _eps(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def _formula(norm: Any) -> Callable | str:
    """The function that computes what a norm does, or why there is none."""
    weight = getattr(norm, "weight", None)
    if weight is not None and (weight.is_meta or type(weight) not in (nn.Parameter, Tensor)):
        state = f"a {type(weight).__name__} on {weight.device} in {type(norm).__name__}"
        raise ValueError(f"deepfast.patch: call it after loading, before sharding; got {state}")
    if "forward" in vars(norm):
        return "its forward is not that of its class"
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        one = len(norm.normalized_shape) == 1
        return torch_norm if one else "it normalizes over more than one dimension"
    arguments, tensors = inspect.signature(norm.forward).parameters, [*norm._parameters]
    tensors += norm._buffers
    one = len(arguments) == 1 and tensors == ["weight"] and weight is not None
    if not one or weight.dim() != 1 or len(weight) == 1 or not isinstance(_eps(norm), float):
        return "it has not one argument, one weight (D,) and one eps"
    known = (one for one in (llama_norm, olmo2_norm, t5_norm) if _equal(norm, one))
    return next(known, "its formula is not known")


@torch.no_grad()
def _equal(norm: Any, formula: Callable) -> bool:
    """Whether ``formula`` computes the same on random states with random weights, on the CPU."""
    dim, random, plain = len(norm.weight), torch.Generator().manual_seed(0), copy.copy(norm)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    # Not D in the middle: a norm over channels there is another one.
    states, weights = draw(4, 7 if dim == 5 else 5, dim), draw(dim)
    # eps counts in these, and a large channel shows a limit.
    states[1] *= _eps(norm) ** 0.5
    states[2, :, 0] *= 1000
    for x, w in product((states, states.bfloat16()), (weights, weights.bfloat16())):
        plain._parameters = {"weight": nn.Parameter(w)}
        try:
            want, got = plain.forward(x), formula(plain, x)
        except Exception:  # A forward of others, which cannot take these states.
            return False
        close = 1e-5 if x.dtype == w.dtype == torch.float32 else 0.02
        if got.dtype != want.dtype or not torch.allclose(got, want, rtol=close, atol=close):
            return False
    return True


@dataclass
class Patch:
    """How many norms of each class were replaced, and why the others were left, by class."""

    replaced: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    _plain: list[tuple[nn.Module, type]] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Makes every norm what it was. A second call does nothing."""
        while self._plain:
            norm, plain = self._plain.pop()
            norm.__class__ = plain


def patch(model: nn.Module) -> Patch:
    """Replaces the norms of a model by fused ops with the same result.

    These are torch's LayerNorm and RMSNorm over one dimension, and norms of other packages that
    equal Llama's, OLMo 2's or T5's on random states with random weights. A class whose name has
    neither LayerNorm nor RMSNorm in it is no norm here. Parameters, their names, hooks and wrappers
    stay as they are. One warning names the norms that are left, and why.

    Args:
        model: any module whose weights are loaded and not sharded.

    Returns:
        What was replaced, with ``remove()``, which undoes it.

    Raises:
        TypeError, ValueError: for other models.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"deepfast.patch: model must be a module, got {type(model).__name__}")
    handle, modules = Patch(), [m for m in model.modules() if not isinstance(m, Swapped)]
    named = re.compile("LayerNorm|RMSNorm")
    norms = [m for m in modules if named.search(type(m).__name__) and not m._modules]
    # All are known before the first one changes.
    for norm, formula in [(norm, _formula(norm)) for norm in norms]:
        plain: Any = type(norm)
        if isinstance(formula, str):
            handle.left[plain.__name__] = formula
            continue
        norm.__class__ = _swapped(formula, plain)
        handle._plain.append((norm, plain))
        handle.replaced[plain.__name__] += 1
    if not norms:
        handle.left[type(model).__name__] = "it has nothing to replace, or is patched already"
    if handle.left:
        left = "; ".join(f"{what}: {why}" for what, why in handle.left.items())
        warnings.warn(f"deepfast.patch left {left}", stacklevel=2)
    return handle
