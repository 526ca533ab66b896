"""Depth mixing in functional form: the weighted sum of a list of layer outputs.

One sum has launches of its own. Several sums of the same sources use those of attention over depth,
whose scores are then the weights, without a softmax.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.depth_attention import launch_operands, source_grads
from deepfast.ops.register import Op
from deepfast.reference.depth_mix import depth_mix as reference


def _launch_operands(a, mean: Tensor, rstd: Tensor) -> tuple[Any, dict]:
    """The launches of the backend, and the operands that forward and backward share: the sources
    as rows (T, D), the parameters as kernels read them, the statistics (K, T) of a norm."""
    first, names = a.sources[0], ("weight", "norm_weight", "norm_bias")
    launch = common.launches("depth_mix", a.backend, first, first.shape[-1])
    shared: dict[str, Any] = {"sources": [common.rows(s) for s in a.sources], "norm": _has_norm(a)}
    shared |= {name: common.parameter(getattr(a, name), first.dtype) for name in names}
    if _has_norm(a):
        shared |= {"mean": mean.view(len(a.sources), -1), "rstd": rstd.view(len(a.sources), -1)}
    return launch, shared


def _has_norm(a) -> bool:
    return a.norm_weight is not None or a.norm_bias is not None


def _forward(a):
    first, dtype = a.sources[0], compute_dtype(a.sources[0].dtype)
    out = first.new_empty(first.shape)
    # mean and rstd have one number for each source and token.
    mean = first.new_empty((len(a.sources), *first.shape[:-1]) if _has_norm(a) else 0, dtype=dtype)
    rstd = torch.empty_like(mean)
    launch, shared = _launch_operands(a, mean, rstd)
    launch.depth_mix_forward(**shared, eps=a.eps, out=common.rows(out))
    return out, mean, rstd


def _grad_forward(a):
    launch, shared = _launch_operands(a, a.mean, a.rstd)
    names, (want_sources, *wants) = ("weight", "norm_weight", "norm_bias"), a.wants
    dsources, rows = source_grads(a.sources, want_sources)
    grads = {
        f"d{name}": torch.empty_like(shared[name]) if want else None
        for name, want in zip(names, wants, strict=True)
    }
    launch.depth_mix_backward(**shared, dout=common.rows(a.dout), dsources=rows, **grads)
    return dsources, *grads.values()


def _flops(a) -> int:
    # Each element of each source is multiplied by its weight and added.
    return 2 * len(a.sources) * a.sources[0].numel()


_depth_mix_grad = Op(
    "depth_mix_grad(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor mean, Tensor rstd, Tensor dout, bool[] wants, str? backend) "
    "-> (Tensor[] dsources, Tensor dweight, Tensor dnorm_weight, Tensor dnorm_bias)",
    _grad_forward,
    # The products with the output's gradient, for the sources and for the weight.
    flops=lambda a: 2 * _flops(a),
)


_depth_mix = Op(
    "depth_mix(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "float eps, str? backend) -> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    flops=_flops,
    grad=_depth_mix_grad,
    plain=lambda a: (
        reference(a.sources, a.weight, norm_weight=a.norm_weight, norm_bias=a.norm_bias, eps=a.eps),
    ),
    public=1,
)


# ---- several sums of the same sources ------------------------------------------------------------


def _sums_forward(a):
    launch, shared = launch_operands(a.sources, None, a.weight, a.backend)
    *lead, dim = a.sources[0].shape
    out = a.sources[0].new_empty(*lead, a.weight.shape[-1], dim)
    launch.depth_attention_forward(**shared, norm=False, eps=0.0, out=out.view(-1, dim))
    return out


def _sums_grad_forward(a):
    launch, shared = launch_operands(a.sources, None, a.weight, a.backend)
    want_sources, want_weight = a.wants
    dsources, rows = source_grads(a.sources, want_sources)
    dtype = compute_dtype(a.dout.dtype)
    dweight = a.dout.new_empty(a.weight.shape, dtype=dtype) if want_weight else None
    dscores = None if dweight is None else dweight.view(shared["scores"].shape)
    launch.depth_attention_backward(
        **shared, norm=False, eps=0.0, dout=common.rows(a.dout), dsources=rows, dscores=dscores
    )
    return dsources, dweight


_depth_mix_sums_grad = Op(
    "depth_mix_sums_grad(Tensor[] sources, Tensor weight, Tensor dout, bool[] wants, "
    "str? backend) -> (Tensor[] dsources, Tensor dweight)",
    _sums_grad_forward,
    flops=lambda a: 2 * a.weight.shape[-1] * _flops(a),
)


_depth_mix_sums = Op(
    "depth_mix_sums(Tensor[] sources, Tensor weight, str? backend) -> Tensor",
    _sums_forward,
    flops=lambda a: a.weight.shape[-1] * _flops(a),
    grad=_depth_mix_sums_grad,
    plain=lambda a: reference(a.sources, a.weight),
)


def depth_mix_sums(sources: list[Tensor], weight: Tensor, backend: str | None = None) -> Tensor:
    """S weighted sums of the same sources, ``sum_k weight[k, s] * sources[k]``, in one pass over
    them: the partial sums of all rows of a block in a traced program.

    Args:
        sources: K tensors (..., D) of one shape and dtype.
        weight: (K, S).

    Returns:
        (..., S, D).
    """
    each = weight.expand(*sources[0].shape[:-1], -1, -1)
    (out,) = _depth_mix_sums(sources, each, backend)
    return out


def depth_mix(
    sources: Sequence[Tensor],
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Weighted sum over layers, ``sum_k weight[k] * LN_k(sources[k])``.

    The op reads every source once, without a stack of them, and saves no normalised copy for
    backward. With neither norm_weight nor norm_bias there is no layer-norm. For a whole stack of
    layers `deepfast.nn.DLCL` moves far fewer bytes, because it shares reads between rows.

    Args:
        sources: K tensors (..., D) of one shape and dtype (fp32, bf16, fp16, fp64), any K >= 1.
            Under autocast their dtypes may differ; the result is then fp32.
        weight: (K,), or (K, D) for one weight per channel.
        norm_weight, norm_bias: (K, D), row k for LN_k, or None.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        (..., D) in the dtype of the sources; sums are in fp32 (fp64 for fp64).

    Raises: as every op, see `deepfast.ops`.

    Source: Wang et al., Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8.
    """
    sources = common.checked_sources("depth_mix", "sources", sources)
    first = sources[0]
    count, dim = len(sources), first.shape[-1]
    checks.tensor("depth_mix", "weight", weight)
    shape = (count,) if weight.dim() == 1 else (count, dim)
    checks.parameter("depth_mix", "weight", weight, shape, first.device)
    checks.parameter("depth_mix", "norm_weight", norm_weight, (count, dim), first.device)
    checks.parameter("depth_mix", "norm_bias", norm_bias, (count, dim), first.device)
    checks.eps("depth_mix", eps)
    (out,) = _depth_mix(sources, weight, norm_weight, norm_bias, eps, backend)
    return out
