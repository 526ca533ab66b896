"""One read of attention residuals, for code that holds its sources itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.depth_attention import depth_attention
from deepfast.ops.layer_norm import rms_norm


def residual_score(v: Tensor, query: Tensor, eps: float) -> Tensor:
    """``<RMSNorm(v), query>`` (...) of a source v (..., D), both in the compute dtype."""
    # Not a matrix product, which autocast would compute in half precision.
    r = (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (v * r * query).sum(-1)


@torch.no_grad()
def _weights(sources: Sequence[Tensor], query: Tensor, lse: Tensor, eps: float) -> Tensor:
    """p (..., K) from the scores, one source at a time."""
    scores = [residual_score(v.to(lse.dtype), query.to(lse.dtype), eps) for v in sources]
    return (torch.stack(scores, -1) - lse.unsqueeze(-1)).exp()


def attention_residual(
    query: Tensor,
    residuals: Tensor | Sequence[Tensor],
    rms_weight: Tensor | None = None,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float | None = None,
    return_weights: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Attention of each token over K sources: ``o = sum_k p_k v_k``.

    ``p = softmax_k(scale * <RMSNorm(v_k; rms_weight), query>)``, and with ``output_rms_weight`` the
    result is ``RMSNorm(o; output_rms_weight)``. Forward and backward each read the sources once
    (`depth_attention`). The norm of o is a second kernel (`rms_norm`), which reads o in the dtype
    of the sources; backward saves o once for both. A stack whose every layer reads all sources so
    reads them L^2 / 2 times; `deepfast.nn.AttentionResiduals` reads them about L * sqrt(L) times,
    and applies the norm behind a row in the row's kernel (``out_norm``).

    Args:
        query: (D,).
        residuals: v, a list of K tensors (..., D), or a stack (K, ..., D), in fp32, bf16, fp16 or
            fp64. The gradient of a stack is a stack, so a list moves fewer bytes.
        rms_weight, output_rms_weight: (D,) or None.
        rms_eps: added to the mean square in both norms.
        scale: multiplies the scores; None is 1.
        return_weights: whether to return p too.
        backend: see `deepfast.backend`.

    Returns:
        (..., D) in the dtype of the sources; with ``return_weights`` also p (..., K), fp32 (fp64
        for fp64), without gradient.

    Raises: as every op, see `deepfast.ops`.

    Source: Kimi Team, Attention Residuals, arXiv 2603.15031, 2026.
    """
    op = "attention_residual"
    common.reverse_mode_only(op)
    if isinstance(residuals, Tensor):
        if residuals.dim() < 2:
            raise ValueError(f"{op}: residuals must be (K, ..., D), got {tuple(residuals.shape)}")
        residuals = residuals.unbind(0)
    sources = common.checked_sources(op, "residuals", residuals)
    first = sources[0]
    checks.tensor(op, "query", query)
    dim = first.shape[-1:]
    checks.parameter(op, "query", query, tuple(dim), first.device)
    for name, weight in (("rms_weight", rms_weight), ("output_rms_weight", output_rms_weight)):
        if weight is not None:
            checks.tensor(op, name, weight)
            checks.parameter(op, name, weight, tuple(dim), first.device)
    checks.number(op, rms_eps=rms_eps)
    checks.flag(op, return_weights=return_weights)
    query = query.to(compute_dtype(first.dtype))
    if scale is not None:
        checks.finite(op, "scale", scale)
        query = query * scale
    if rms_weight is not None:
        query = query * rms_weight.to(query.dtype)
    out, lse = depth_attention(sources, query, eps=rms_eps, return_lse=True, backend=backend)
    if output_rms_weight is not None:
        out = rms_norm(out, output_rms_weight, rms_eps, backend=backend)
    return (out, _weights(sources, query, lse, rms_eps)) if return_weights else out
