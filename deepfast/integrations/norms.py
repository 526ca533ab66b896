"""The norms of other packages whose formula is known, by `ops.layer_norm` and `ops.rms_norm`."""

from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.integrations.swap import Swapped, definition, text
from deepfast.ops import common

# mypy does not see the attributes of the class that these are mixed with, and the ops return a
# tuple with a residual.
# mypy: disable-error-code="attr-defined,return-value"


def _widened(x: Tensor) -> Tensor:
    """Under autocast torch's norms return fp32 on a GPU."""
    return common.widened(x)[0] if isinstance(x, Tensor) and x.is_cuda else x


class _LayerNorm(Swapped):
    """torch.nn.LayerNorm over one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(_widened(x), self.weight, self.bias, self.eps)


class _RMSNorm(Swapped):
    """torch.nn.RMSNorm over one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        x = _widened(x)
        eps = self.eps
        if eps is None:
            checks.tensor("rms_norm", "x", x)
            eps = torch.finfo(x.dtype).eps
        return ops.rms_norm(x, self.weight, eps)


class _Narrow(Swapped):
    """``(weight * n).to(x.dtype)``"""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _Promoted(Swapped):
    """``weight * n.to(x.dtype)``: the result has the wider dtype of the two."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return ops.rms_norm(hidden_states.to(dtype), self.weight, self.variance_epsilon)


class _T5(_Promoted):
    """``weight * n``, n in the weight's dtype where that has 16 bits."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        n = super().forward(hidden_states)
        return n.to(self.weight.dtype) if self.weight.dtype.itemsize == 2 else n


_RMS = """\
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
"""
_RMS_T5 = """\
variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
if self.weight.dtype in [torch.float16, torch.bfloat16]:
    hidden_states = hidden_states.to(self.weight.dtype)
return self.weight * hidden_states"""
FORMULAS: dict[str, type[Swapped]] = {
    _RMS + "return self.weight * hidden_states.to(input_dtype)": _Promoted,
    _RMS + "return (self.weight * hidden_states).to(input_dtype)": _Narrow,
    _RMS_T5: _T5,
}
"""The code of a forward -> the class with the same formula: Llama's, OLMo 2's and T5's."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer-norm or an RMS norm by its name."""
    name = type(module).__name__
    return ("LayerNorm" in name or "RMSNorm" in name) and next(module.children(), None) is None


def known(module: nn.Module) -> type[Swapped] | str:
    """The class with the formula of the norm ``module``, or why it is not known."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward is not that of its class"
    if kind in (nn.LayerNorm, nn.RMSNorm):
        shape: Any = module.normalized_shape
        if len(shape) != 1:
            return "it normalizes over more than one dimension"
        return _LayerNorm if kind is nn.LayerNorm else _RMSNorm
    code = definition(kind.forward)
    return FORMULAS.get("" if code is None else text(code), "its formula is not known")
