"""What GPU benchmarks compare with: torch's own forms, compiled, and other installed packages."""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor


def compiled(function, toy: bool):
    """torch.compile; at toy size it traces without generating code."""
    # Imported here: torch itself imports it only with its compiler.
    from torch._functorch import config

    # The benchmarks run one backward many times over the same saved tensors.
    config.donated_buffer = False
    return torch.compile(function, dynamic=False, backend="aot_eager" if toy else "inductor")


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def plain_fused_layer_norm(x, residual, weight, bias, p: float) -> tuple[Tensor, Tensor]:
    """LN(s) and s = residual + dropout(x)."""
    s = residual + F.dropout(x, p)
    return F.layer_norm(s, s.shape[-1:], weight, bias), s


def _liger():
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def _fla():
    from fla.modules.layernorm import layer_norm

    return lambda x, weight, bias: layer_norm(x, weight, bias, eps=1e-5)


def other_layer_norms() -> dict:
    """Package name -> a function that imports the package's LN(x, weight, bias)."""
    packages = {"liger_kernel": ("Liger", _liger), "fla": ("fla", _fla)}
    return {
        name: load
        for package, (name, load) in packages.items()
        if importlib.util.find_spec(package) is not None
    }


def plain_boundary(branch, residual, partial, states, weight, norm, out_norm, p: float):
    """A boundary between two layers in torch's ops: push y, mix, LN of the next layer.

    states: the block's earlier ones, normalised; weight: theirs and the new one's.
    """
    y = residual + F.dropout(branch, p)
    z = F.layer_norm(y, y.shape[-1:], *norm)
    x = partial + weight[-1] * z
    for w, state in zip(weight[:-1].unbind(), states, strict=True):
        x = x + w * state
    return z, x, F.layer_norm(x, x.shape[-1:], *out_norm)


def padded_attention(q, k, v, mask):
    """torch's SDPA over sentences (B, H, S, d) padded to the longest; mask: True at real tokens."""
    return F.scaled_dot_product_attention(q, k, v, mask)


def varlen_attention(q, k, v, cu_seqlens, longest: int):
    """torch's flash attention over packed sentences (T, H, d)."""
    from torch.nn.attention.varlen import varlen_attn

    # The further arguments are left out: their names differ between versions of torch.
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
