"""Depth mixing in functional form: a list of layer outputs in, their weighted sum out."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.ops import common
from deepfast.ops.register import register
from deepfast.reference.layer_norm import compute_dtype


def _forward(sources, weight, norm_weight, norm_bias, eps, backend):
    first = sources[0]
    _, launch = backends.choose(
        "depth_mix", backend, first.device.type, first.dtype, first.shape[-1]
    )
    rows = [common.rows(s) for s in sources]
    norm = norm_weight is not None or norm_bias is not None
    w, norm_weight, norm_bias = (
        common.parameter(p, first.dtype) for p in (weight, norm_weight, norm_bias)
    )
    out, mean, rstd = _fake(sources, weight, norm_weight, norm_bias, eps, backend)
    launch.depth_mix_forward(
        rows,
        w,
        norm_weight,
        norm_bias,
        norm,
        eps,
        out.view(rows[0].shape),
        *_statistics(norm, rows, mean, rstd),
    )
    return out, mean, rstd


def _fake(sources, weight, norm_weight, norm_bias, eps, backend):
    first = sources[0]
    norm = norm_weight is not None or norm_bias is not None
    # The second dimension of mean and rstd, and those after it, are the sources' tokens.
    shape = (len(sources), *first.shape[:-1]) if norm else (0,)
    mean = first.new_empty(shape, dtype=compute_dtype(first.dtype))
    return first.new_empty(first.shape), mean, torch.empty_like(mean)


def _statistics(
    norm: bool, rows: list[Tensor], mean: Tensor, rstd: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(K, T) views for the kernels."""
    shape = len(rows), rows[0].shape[0]
    return (mean.view(shape), rstd.view(shape)) if norm else (None, None)


def _grad_forward(sources, weight, norm_weight, norm_bias, mean, rstd, dout, wants, backend):
    first = sources[0]
    _, launch = backends.choose(
        "depth_mix", backend, first.device.type, first.dtype, first.shape[-1]
    )
    rows = [common.rows(s) for s in sources]
    norm = norm_weight is not None or norm_bias is not None
    w, norm_weight, norm_bias = (
        common.parameter(p, first.dtype) for p in (weight, norm_weight, norm_bias)
    )
    results = _grad_fake(sources, weight, norm_weight, norm_bias, mean, rstd, dout, wants, backend)
    dsources, *params = results
    launch.depth_mix_backward(
        rows, w, norm_weight, norm_bias, norm, *_statistics(norm, rows, mean, rstd),
        common.rows(dout), [d.view(rows[0].shape) for d in dsources] if wants[0] else [],
        *(p if want else None for p, want in zip(params, wants[1:], strict=True)),
    )  # fmt: skip
    return results


def _grad_fake(sources, weight, norm_weight, norm_bias, mean, rstd, dout, wants, backend):
    first = sources[0]
    dtype = compute_dtype(first.dtype)
    dsources = [first.new_empty(first.shape if wants[0] else 0) for _ in sources]
    params = (
        first.new_empty(p.shape if want else 0, dtype=dtype)
        for p, want in zip((weight, norm_weight, norm_bias), wants[1:], strict=True)
    )
    return dsources, *params


def _flops(sources, *_, **__) -> int:
    # Each element of each source is multiplied by its weight and added.
    return 2 * len(sources) * math.prod(sources[0])


_depth_mix_grad = register(
    "depth_mix_grad(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor mean, Tensor rstd, Tensor dout, bool[] wants, str? backend) "
    "-> (Tensor[] dsources, Tensor dweight, Tensor dnorm_weight, Tensor dnorm_bias)",
    _grad_forward,
    fake=_grad_fake,
    # The products with the output's gradient, for the sources and for the weight.
    flops=lambda sources, *_, **__: 2 * _flops(sources),
)


def _setup(ctx, inputs, output):
    sources, weight, norm_weight, norm_bias, _, backend = inputs
    _, mean, rstd = output
    ctx.save_for_backward(weight, norm_weight, norm_bias, mean, rstd, *sources)
    ctx.backend = backend


def _backward(ctx, dout, *_):
    weight, norm_weight, norm_bias, mean, rstd, *sources = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if dout is None:
        return [None] * len(sources), *(None,) * 5
    wants = [any(needs[0]), *needs[1:4]]
    dsources, *params = _depth_mix_grad(
        sources, weight, norm_weight, norm_bias, mean, rstd, dout, wants, ctx.backend
    )
    return (
        [d if need else None for d, need in zip(dsources, needs[0], strict=True)],
        *(
            d.to(p.dtype) if need else None
            for d, p, need in zip(params, (weight, norm_weight, norm_bias), needs[1:4], strict=True)
        ),
        None,
        None,
    )


def _cast(sources, *rest):
    return list(common.autocast(*sources)), *rest


_depth_mix = register(
    "depth_mix(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "float eps, str? backend) -> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=_flops,
    cast=_cast,
    setup=_setup,
    backward=_backward,
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

    One pass: every source is read once, nothing is stacked, and backward stores no normalised
    copy. With neither norm_weight nor norm_bias there is no layer-norm. For a whole stack of
    layers `deepfast.nn.DLCL` moves far fewer bytes, because it shares reads between rows.

    Args:
        sources: K tensors (..., D) of one shape and dtype (fp32, bf16, fp16, fp64), any K >= 1.
        weight: (K,), or (K, D) for one weight per channel.
        norm_weight, norm_bias: (K, D), weight and bias of LN_k.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        (..., D) in the dtype of the sources; sums are in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.
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
