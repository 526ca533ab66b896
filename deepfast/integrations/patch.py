"""This package's ops in the place of a model's own norms. Only the classes of modules change."""

import copy
import functools
import inspect
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.ops import common


class Swapped:
    """What comes first among the bases of a swapped class; the class of the norm follows."""

    def __reduce_ex__(self: Any, protocol) -> Any:
        # Pickle finds the class by its bases.
        return _empty, type(self).__bases__, *super().__reduce_ex__(protocol)[2:]


class _Torch(Swapped):
    """torch's LayerNorm and RMSNorm. Under autocast on a GPU they return fp32."""

    def forward(self: Any, input: Tensor) -> Any:
        x = common.widened(input)[0] if isinstance(input, Tensor) and input.is_cuda else input
        if isinstance(self, nn.LayerNorm):
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        checks.tensor("rms_norm", "x", x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return ops.rms_norm(x, self.weight, eps)


class _Llama(Swapped):
    """``weight * n.to(x.dtype)``: the result has the wider dtype of the two."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return ops.rms_norm(hidden_states.to(dtype), self.weight, _eps(self))


class _Olmo2(Swapped):
    """``(weight * n).to(x.dtype)``"""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        return ops.rms_norm(hidden_states, self.weight, _eps(self))


class _T5(_Llama):
    """``weight * n``, n in the weight's dtype where that has 16 bits."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        n, dtype = super().forward(hidden_states), self.weight.dtype
        return n.to(dtype) if dtype.itemsize == 2 else n


def _eps(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


@functools.cache
def _swapped(own: type, plain: type) -> Any:
    return type(plain.__name__, (own, plain), {"__module__": plain.__module__})


def _empty(own: type, plain: type) -> Any:
    return object.__new__(_swapped(own, plain))


def _known(norm: Any) -> type | str:
    """The class with the formula of a norm, or why it is not known."""
    weight = getattr(norm, "weight", None)
    if weight is not None and (type(weight) is not nn.Parameter or weight.is_meta):
        found = f"a {type(weight).__name__} on {weight.device} in {type(norm).__name__}"
        raise ValueError(f"deepfast.patch: call it after loading, before sharding; got {found}")
    if "forward" in vars(norm):
        return "its forward is not that of its class"
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        one = len(norm.normalized_shape) == 1
        return _Torch if one else "it normalizes over more than one dimension"
    arguments, parameters = inspect.signature(norm.forward).parameters, list(norm._parameters)
    if len(arguments) != 1 or parameters != ["weight"] or not isinstance(_eps(norm), float):
        return "it has not one argument, one weight and one eps"
    known = (own for own in (_Llama, _Olmo2, _T5) if _equal(norm, own))
    return next(known, "its formula is not known")


@torch.no_grad()
def _equal(norm: Any, own: type) -> bool:
    """Whether ``own`` computes the same on random states with random weights, on the CPU."""
    random, plain = torch.Generator().manual_seed(0), copy.copy(norm)
    weight, *rows = torch.randn(3, *norm.weight.shape, generator=random)
    # eps counts in the second row.
    states = torch.stack((rows[0], rows[1] * _eps(norm) ** 0.5))
    for x, w in product((states, states.bfloat16()), (weight, weight.bfloat16())):
        plain._parameters = {"weight": nn.Parameter(w)}
        fused = copy.copy(plain)
        fused.__class__ = _swapped(own, norm.__class__)
        try:
            want, got = plain.forward(x), fused.forward(x)
        except (RuntimeError, TypeError, ValueError):
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
    equal Llama's, OLMo 2's or T5's on random states with random weights. Parameters, their names,
    hooks and wrappers stay as they are. One warning names the norms that are left, and why.

    Args:
        model: any module whose weights are loaded and not sharded.

    Returns:
        What was replaced, with ``remove()``, which undoes it.

    Raises:
        TypeError, ValueError: for other models.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"deepfast.patch: model must be a module, got {type(model).__name__}")
    handle, norms = Patch(), [module for module in model.modules() if _is_norm(module)]
    # All are known before the first one changes.
    for norm, own in [(norm, _known(norm)) for norm in norms]:
        plain: Any = type(norm)
        if isinstance(own, str):
            handle.left[plain.__name__] = own
            continue
        norm.__class__ = _swapped(own, plain)
        handle._plain.append((norm, plain))
        handle.replaced[plain.__name__] += 1
    if not norms:
        handle.left[type(model).__name__] = "it has nothing to replace, or is patched already"
    if handle.left:
        left = "; ".join(f"{what}: {why}" for what, why in handle.left.items())
        warnings.warn(f"deepfast.patch left {left}", stacklevel=2)
    return handle


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer-norm or an RMS norm by its name, and not patched."""
    name, patched = type(module).__name__, isinstance(module, Swapped)
    return ("LayerNorm" in name or "RMSNorm" in name) and not patched and not module._modules
