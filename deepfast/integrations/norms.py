"""The norms of other packages whose formula is known, by `ops.layer_norm` and `ops.rms_norm`."""

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.integrations.swap import Swapped
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


_LLAMA = (
    "Arcee", "Cwm", "DeepseekV2", "DeepseekV3", "Ernie4_5", "EuroBert", "Exaone4", "Glm", "Glm4",
    "Granite", "Llama", "Ministral", "Mistral", "Mixtral", "Olmoe", "Phi3", "Qwen2", "Qwen2Moe",
    "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3",
)  # fmt: skip

KNOWN: dict[tuple[str, str], type[Swapped]] = {
    ("torch", "LayerNorm"): _LayerNorm,
    ("torch", "RMSNorm"): _RMSNorm,
    **{("transformers", f"{name}RMSNorm"): _Promoted for name in _LLAMA},
    **{("transformers", f"{name}RMSNorm"): _Narrow for name in ("GptOss", "Olmo2", "Olmo3")},
    **{("transformers", f"{name}LayerNorm"): _T5
       for name in ("LongT5", "MT5", "SwitchTransformers", "T5", "UMT5")},
}  # fmt: skip
"""Package and class of a norm -> the class with the same formula."""


def known(module: nn.Module) -> type[Swapped] | None:
    """The class with the formula of ``module``, or None."""
    kind = type(module)
    if len(getattr(module, "normalized_shape", (0,))) != 1:
        return None
    return KNOWN.get((kind.__module__.partition(".")[0], kind.__name__))


def is_norm(module: nn.Module) -> bool:
    """Whether a module without a known formula is a layer-norm by its name."""
    name = type(module).__name__
    return ("LayerNorm" in name or "RMSNorm" in name) and next(module.children(), None) is None
