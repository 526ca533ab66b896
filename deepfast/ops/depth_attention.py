"""Attention over depth: a softmax over layers for each token, and their weighted sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op, gradients
from deepfast.reference.depth_attention import depth_attention as reference

NORMS = ("rms", None)


def launch_operands(sources, query, scores, backend: str | None) -> tuple[Any, dict]:
    """The launches of the backend, and their shared operands, as kernels read them: the sources as
    rows (T, D), the query (H, D), the scores (T, K, H)."""
    first = sources[0]
    launch = common.launches("depth_attention", backend, first, first.shape[-1])
    rows = [common.rows(s) for s in sources]
    query, scores = (common.parameter(p, first.dtype) for p in (query, scores))
    if scores is not None:
        scores = scores.view(rows[0].shape[0], *scores.shape[-2:])
    return launch, {"sources": rows, "query": query, "scores": scores}


def source_grads(sources: list[Tensor], wanted: bool) -> tuple[list[Tensor], list[Tensor]]:
    """New gradients of the sources, and the same as rows (T, D), which kernels write."""
    dsources = [common.empty_contiguous(s) for s in sources if wanted]
    return dsources, [common.rows(d) for d in dsources]


def _forward(a):
    launch, shared = launch_operands(a.sources, a.query, a.scores, a.backend)
    first, hops = a.sources[0], a.scores.shape[-1] if a.query is None else a.query.shape[0]
    lead, dim, dtype = first.shape[:-1], first.shape[-1], compute_dtype(first.dtype)
    out = first.new_empty(*lead, hops, dim)
    lse, most, total = (first.new_empty(*lead, hops, dtype=dtype) for _ in range(3))
    sums = {"most": most.view(-1, hops), "total": total.view(-1, hops)}
    launch.depth_attention_forward(
        **shared, norm=a.norm, eps=a.eps, out=out.view(-1, dim), lse=lse.view(-1, hops), **sums
    )
    return out, lse, most, total


def _grad_forward(a):
    launch, shared = launch_operands(a.sources, a.query, a.scores, a.backend)
    (want_sources, want_query, want_scores), scores = a.wants, shared["scores"]
    dsources, rows = source_grads(a.sources, want_sources)
    dquery = torch.empty_like(shared["query"]) if want_query else None
    dscores = a.most.new_empty(a.scores.shape) if want_scores else None
    hops, dim = a.most.shape[-1], a.sources[0].shape[-1]
    results = {"out": a.out.view(-1, dim), "most": a.most.view(-1, hops)}
    results["total"] = a.total.view(-1, hops)
    dlse = None if a.dlse is None else a.dlse.reshape(-1, hops).contiguous()
    grads = {"dsources": rows, "dquery": dquery}
    grads["dscores"] = None if dscores is None else dscores.view(scores.shape)
    launch.depth_attention_backward(
        **shared, norm=a.norm, eps=a.eps, **results, dout=common.rows(a.dout), dlse=dlse, **grads
    )
    return dsources, dquery, dscores


def _flops(a) -> int:
    # The weighted sum and, with a query, the scores.
    products, hops = (1, a.scores.shape[-1]) if a.query is None else (2, a.query.shape[0])
    return 2 * products * hops * len(a.sources) * a.sources[0].numel()


_depth_attention_grad = Op(
    "depth_attention_grad(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "Tensor out, Tensor most, Tensor total, Tensor dout, Tensor? dlse, bool[] wants, "
    "str? backend) "
    "-> (Tensor[] dsources, Tensor dquery, Tensor dscores)",
    _grad_forward,
    flops=lambda a: 2 * _flops(a),
)


def _backward(op, ctx, kept, grads):
    if grads.out is None:
        grads = grads._replace(out=torch.zeros_like(kept["out"]))
    return gradients(op, ctx, kept, grads)


_depth_attention = Op(
    "depth_attention(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "str? backend) -> (Tensor out, Tensor lse, Tensor most, Tensor total)",
    _forward,
    flops=_flops,
    grad=_depth_attention_grad,
    backward=_backward,
    plain=lambda a: reference(
        a.sources, a.query, scores=a.scores, norm="rms" if a.norm else None, eps=a.eps
    ),
    public=2,
)


def _check_query(first: Tensor, query: Tensor, norm_weight: Tensor | None) -> None:
    op, dim = "depth_attention", first.shape[-1]
    checks.tensor(op, "query", query)
    shape = (dim,) if query.dim() == 1 else (query.shape[0], dim)
    checks.parameter(op, "query", query, shape, first.device)
    if norm_weight is not None:
        checks.tensor(op, "norm_weight", norm_weight)
        shape = shape if norm_weight.dim() == query.dim() else (dim,)
        checks.parameter(op, "norm_weight", norm_weight, shape, first.device)


def _check_scores(sources: list[Tensor], scores: Tensor) -> None:
    first = sources[0]
    checks.tensor("depth_attention", "scores", scores)
    shape = (*first.shape[:-1], len(sources))
    if scores.dim() == first.dim() + 1:
        shape = (*shape, scores.shape[-1])
    checks.parameter("depth_attention", "scores", scores, shape, first.device)


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    norm_type: str | None = "rms",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention over layers, ``out_h = sum_k softmax_k(s_kh) v_k`` for each token separately.

    ``s_kh = query_h . RMSNorm(v_k)``, or s is ``scores``. The op reads the sources once, without a
    stack of them, and computes the softmax online. For backward it saves its operands, its result
    and two numbers per token and hop, not the softmax weights. ``lse_h = log sum_k exp(s_kh)``. To
    merge the results over two groups of sources, call the op again::

        depth_attention([out_a, out_b], scores=torch.stack((lse_a, lse_b), -1))

    Args:
        sources: K tensors v_k (..., D) of one shape and dtype (fp32, bf16, fp16, fp64), any K >= 1.
            Under autocast their dtypes may differ; out is then fp32.
        query: (D,), or (H, D) for H hops, any of these dtypes.
        scores: instead of a query, (..., K) or (..., K, H), any of these dtypes; -inf leaves a
            source out.
        norm_type: "rms", or None for ``s_kh = query_h . v_k``.
        norm_weight: weight of the norm, (D,), or (H, D) with one per hop, or None.
        eps: added to the mean square.
        return_lse: whether to return lse too, which is differentiable.
        backend: see `deepfast.backend`.

    Returns:
        (..., D), or (..., H, D) with H hops, in the dtype of the sources; with ``return_lse`` also
        lse, (...) or (..., H), fp32 (fp64 for fp64). Sums are computed in that dtype.

    Raises: as every op, see `deepfast.ops`.

    Source: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, 2018;
    Kimi Team, Attention Residuals, 2026; the online softmax of Milakov, Gimelshein 2018.
    """
    op = "depth_attention"
    sources = common.checked_sources(op, "sources", sources)
    first = sources[0]
    checks.eps(op, eps)
    checks.flag(op, return_lse=return_lse)
    if (query is None) == (scores is None):
        got = "neither" if query is None else "both"
        raise ValueError(f"{op}: expected either query or scores, got {got}")
    checks.choice(op, NORMS, norm_type=norm_type)
    if norm_weight is not None and (query is None or norm_type is None):
        raise ValueError(f"{op}: norm_weight needs a query and norm_type='rms'")
    if query is None:
        _check_scores(sources, scores)
        one_hop = scores.dim() == first.dim()
        s = scores.unsqueeze(-1) if one_hop else scores
        out, lse = _depth_attention(sources, None, s, False, eps, backend)
    else:
        _check_query(first, query, norm_weight)
        one_hop = query.dim() == 1
        # The norm's weight is multiplied into the query: q . (w * n) = (q * w) . n.
        if norm_weight is not None:
            dtype = compute_dtype(first.dtype)
            query = query.to(dtype) * norm_weight.to(dtype)
        q = query.unsqueeze(0) if one_hop else query
        out, lse = _depth_attention(sources, q, None, norm_type is not None, eps, backend)
    if one_hop:
        out, lse = out.squeeze(-2), lse.squeeze(-1)
    return (out, lse) if return_lse else out
