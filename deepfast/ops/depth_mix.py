"""Depth mixing in functional form: a list of layer outputs in, their weighted sum out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast.reference.layer_norm import compute_dtype

from . import _common as common


class _DepthMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, norm_weight, norm_bias, eps, launch, *sources):
        dtype, shape = sources[0].dtype, sources[0].shape
        rows = [common.rows(s) for s in sources]
        norm = norm_weight is not None or norm_bias is not None
        w, gain, shift = (common.parameter(p, dtype) for p in (weight, norm_weight, norm_bias))
        out = sources[0].new_empty(shape)
        mean = rstd = None
        if norm:
            mean = rows[0].new_empty(len(rows), len(rows[0]), dtype=compute_dtype(dtype))
            rstd = torch.empty_like(mean)
        launch.depth_mix_forward(
            rows, w, gain, shift, norm, eps, out.view(rows[0].shape), mean, rstd
        )
        ctx.save_for_backward(w, gain, shift, mean, rstd, *rows)
        ctx.norm, ctx.launch, ctx.shape = norm, launch, shape
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, norm_weight, norm_bias)]
        return out

    @staticmethod
    @common.first_order("depth_mix")
    def backward(ctx, dout):
        w, gain, shift, mean, rstd, *rows = ctx.saved_tensors
        need_weight, need_gain, need_shift = ctx.needs_input_grad[:3]
        wanted = ctx.needs_input_grad[5:]

        def empty(like):
            return torch.empty_like(like, memory_format=torch.contiguous_format)

        dsources = [empty(r) for r in rows] if any(wanted) else []
        dweight = empty(w) if need_weight else None
        dgain = empty(gain) if need_gain else None
        dshift = empty(shift) if need_shift else None
        ctx.launch.depth_mix_backward(
            rows, w, gain, shift, ctx.norm, mean, rstd, common.rows(dout), dsources, dweight,
            dgain, dshift,
        )  # fmt: skip
        grads = [None if g is None else g.to(d) for g, d in
                 zip((dweight, dgain, dshift), ctx.dtypes, strict=True)]  # fmt: skip
        back = [None] * len(rows)
        for i, dsource in enumerate(dsources):
            back[i] = dsource.view(ctx.shape) if wanted[i] else None
        return (*grads, None, None, *back)


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
        norm_weight, norm_bias: (K, D), gain and shift of LN_k.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        (..., D) in the dtype of the sources; sums are in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.

    Source: Wang et al., Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("depth_mix: sources must hold at least 1 tensor, got 0")
    for k, source in enumerate(sources):
        common.check_tensor("depth_mix", f"sources[{k}]", source)
    sources = list(common.autocast(*sources))
    first = sources[0]
    for k, source in enumerate(sources[1:], 1):
        common.check_like("depth_mix", f"sources[{k}]", source, "sources[0]", first)
    count, dim = len(sources), first.shape[-1]
    common.check_tensor("depth_mix", "weight", weight)
    if tuple(weight.shape) not in ((count,), (count, dim)):
        raise ValueError(
            f"depth_mix: weight must be ({count},) or ({count}, {dim}), got {tuple(weight.shape)}"
        )
    common.check_parameter("depth_mix", "weight", weight, tuple(weight.shape), first.device)
    common.check_parameter("depth_mix", "norm_weight", norm_weight, (count, dim), first.device)
    common.check_parameter("depth_mix", "norm_bias", norm_bias, (count, dim), first.device)
    _, launch = backends.choose("depth_mix", backend, first.device.type, first.dtype)
    return _DepthMix.apply(weight, norm_weight, norm_bias, eps, launch, *sources)
