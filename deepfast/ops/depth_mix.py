"""Depth mixing in functional form: the weighted sum of a list of layer outputs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.ops import common
from deepfast.ops.register import gradients, register
from deepfast.reference.layer_norm import compute_dtype


def _launch_operands(a):
    """The launches of the backend, the sources as rows (T, D), the parameters as kernels read them,
    whether there is a norm, and a view of the statistics (K, T) as kernels take them."""
    first = a.sources[0]
    _, launch = backends.choose("depth_mix", a.backend, first.device, first.dtype, first.shape[-1])
    rows = [common.rows(s) for s in a.sources]
    params = (common.parameter(p, first.dtype) for p in (a.weight, a.norm_weight, a.norm_bias))
    norm, shape = _has_norm(a), (len(rows), rows[0].shape[0])
    return launch, rows, *params, norm, lambda x: x.view(shape) if norm else None


def _has_norm(a) -> bool:
    return a.norm_weight is not None or a.norm_bias is not None


def _forward(a):
    out, mean, rstd = _fake(a)
    launch, sources, weight, norm_weight, norm_bias, norm, view = _launch_operands(a)
    launch.depth_mix_forward(
        sources, weight, norm_weight, norm_bias, norm, a.eps, out.view(sources[0].shape),
        view(mean), view(rstd),
    )  # fmt: skip
    return out, mean, rstd


def _fake(a):
    first = a.sources[0]
    # mean and rstd have one number for each source and token.
    shape = (len(a.sources), *first.shape[:-1]) if _has_norm(a) else (0,)
    mean = first.new_empty(shape, dtype=compute_dtype(first.dtype))
    return first.new_empty(first.shape), mean, torch.empty_like(mean)


def _grad_forward(a):
    launch, sources, weight, norm_weight, norm_bias, norm, view = _launch_operands(a)
    results = _grad_fake(a)
    dsources, dweight, dnorm_weight, dnorm_bias = (
        x if want else None for x, want in zip(results, a.wants, strict=True)
    )
    dsources = [d.view(sources[0].shape) for d in dsources or ()]
    launch.depth_mix_backward(
        sources, weight, norm_weight, norm_bias, norm, view(a.mean), view(a.rstd),
        common.rows(a.dout), dsources, dweight, dnorm_weight, dnorm_bias,
    )  # fmt: skip
    return results


def _grad_fake(a):
    first, (want_sources, *wants) = a.sources[0], a.wants
    dtype = compute_dtype(first.dtype)
    dsources = [first.new_empty(first.shape if want_sources else 0) for _ in a.sources]
    params = (
        first.new_empty(p.shape if want else 0, dtype=dtype)
        for p, want in zip((a.weight, a.norm_weight, a.norm_bias), wants, strict=True)
    )
    return dsources, *params


def _flops(a) -> int:
    # Each element of each source is multiplied by its weight and added.
    return 2 * len(a.sources) * math.prod(a.sources[0])


_depth_mix_grad = register(
    "depth_mix_grad(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor mean, Tensor rstd, Tensor dout, bool[] wants, str? backend) "
    "-> (Tensor[] dsources, Tensor dweight, Tensor dnorm_weight, Tensor dnorm_bias)",
    _grad_forward,
    fake=_grad_fake,
    # The products with the output's gradient, for the sources and for the weight.
    flops=lambda a: 2 * _flops(a),
)


def _setup(ctx, a, results):
    return {
        "sources": a.sources, "weight": a.weight, "norm_weight": a.norm_weight,
        "norm_bias": a.norm_bias, "mean": results.mean, "rstd": results.rstd, "backend": a.backend,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    if grads.out is None:
        return {}
    return gradients(_depth_mix_grad, ctx, kept, dout=grads.out)


_depth_mix = register(
    "depth_mix(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "float eps, str? backend) -> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=_flops,
    cast=("sources",),
    setup=_setup,
    backward=_backward,
    public=1,
)


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
        weight: (K,), or (K, D) for one weight per channel.
        norm_weight, norm_bias: (K, D), row k for LN_k, or None.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        (..., D) in the dtype of the sources; sums are in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Wang et al., Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8.
    """
    sources = common.checked_sources("depth_mix", "sources", sources)
    first = sources[0]
    count, dim = len(sources), first.shape[-1]
    checks.tensor("depth_mix", "weight", weight)
    if tuple(weight.shape) != (count,) and tuple(weight.shape) != (count, dim):
        raise ValueError(
            f"depth_mix: weight must be ({count},) or ({count}, {dim}), got {tuple(weight.shape)}"
        )
    checks.parameter("depth_mix", "weight", weight, tuple(weight.shape), first.device)
    checks.parameter("depth_mix", "norm_weight", norm_weight, (count, dim), first.device)
    checks.parameter("depth_mix", "norm_bias", norm_bias, (count, dim), first.device)
    checks.eps("depth_mix", eps)
    (out,) = _depth_mix(sources, weight, norm_weight, norm_bias, eps, backend)
    return out
