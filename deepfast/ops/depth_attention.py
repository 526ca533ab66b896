"""Attention over depth: a softmax over layers for each token, and their weighted sum."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, register
from deepfast.reference.depth_attention import depth_attention as reference

NORMS = ("rms", None)


def launch_operands(sources, query, scores, backend: str | None):
    """The launches of the backend, and the operands as kernels read them: the sources as rows
    (T, D), the query (H, D), the scores (T, K, H)."""
    first = sources[0]
    _, launch = backends.choose(
        "depth_attention", backend, first.device, first.dtype, first.shape[-1]
    )
    rows = [common.rows(s) for s in sources]
    query, scores = (common.parameter(p, first.dtype) for p in (query, scores))
    if scores is not None:
        scores = scores.view(rows[0].shape[0], *scores.shape[-2:])
    return launch, rows, query, scores


def _forward(a):
    results = _fake(a)
    launch, sources, query, scores = launch_operands(a.sources, a.query, a.scores, a.backend)
    (tokens, dim), hops = sources[0].shape, results[0].shape[-2]
    out = results[0].view(tokens * hops, dim)
    lse, most, total = (x.view(tokens, hops) for x in results[1:])
    launch.depth_attention_forward(
        sources=sources, query=query, scores=scores, norm=a.norm, eps=a.eps, out=out, lse=lse,
        most=most, total=total,
    )  # fmt: skip
    return results


def _fake(a):
    first = a.sources[0]
    hops = a.scores.shape[-1] if a.query is None else a.query.shape[0]
    out = first.new_empty((*first.shape[:-1], hops, first.shape[-1]))
    shape, dtype = (*first.shape[:-1], hops), compute_dtype(first.dtype)
    return out, *(first.new_empty(shape, dtype=dtype) for _ in range(3))


def _grad_forward(a):
    results = dsources, dquery, dscores = _grad_fake(a)
    launch, sources, query, scores = launch_operands(a.sources, a.query, a.scores, a.backend)
    hops, dim = a.most.shape[-1], sources[0].shape[1]
    dlse = None if a.dlse is None else a.dlse.reshape(-1, hops).contiguous()
    dscores = None if dscores is None else dscores.view(scores.shape)
    launch.depth_attention_backward(
        sources=sources, query=query, scores=scores, norm=a.norm, eps=a.eps,
        out=a.out.view(-1, dim), most=a.most.view(-1, hops), total=a.total.view(-1, hops),
        dout=common.rows(a.dout), dlse=dlse, dsources=list(map(common.rows, dsources)),
        dquery=dquery, dscores=dscores,
    )  # fmt: skip
    return results


def _grad_fake(a):
    first, (want_sources, *wants) = a.sources[0], a.wants
    dsources = [common.empty_contiguous(s) for s in a.sources if want_sources]
    given = (
        first.new_empty(p.shape, dtype=a.most.dtype) if want else None
        for p, want in zip((a.query, a.scores), wants, strict=True)
    )
    return dsources, *given


def _flops(a) -> int:
    # The weighted sum and, with a query, the scores.
    hops = a.scores[-1] if a.query is None else a.query[0]
    return 2 * (1 if a.query is None else 2) * hops * len(a.sources) * math.prod(a.sources[0])


_depth_attention_grad = register(
    "depth_attention_grad(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "Tensor out, Tensor most, Tensor total, Tensor dout, Tensor? dlse, bool[] wants, "
    "str? backend) "
    "-> (Tensor[] dsources, Tensor dquery, Tensor dscores)",
    _grad_forward,
    fake=_grad_fake,
    flops=lambda a: 2 * _flops(a),
)


def _setup(ctx, a, results):
    return a._asdict() | {"out": results.out, "most": results.most, "total": results.total}


def _backward(ctx, kept, grads):
    dout = torch.zeros_like(kept["out"]) if grads.out is None else grads.out
    return gradients(_depth_attention_grad, ctx, kept, dout=dout, dlse=grads.lse)


_depth_attention = register(
    "depth_attention(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "str? backend) -> (Tensor out, Tensor lse, Tensor most, Tensor total)",
    _forward,
    fake=_fake,
    flops=_flops,
    setup=_setup,
    backward=_backward,
    plain=lambda a: reference(
        a.sources, a.query, scores=a.scores, norm="rms" if a.norm else None, eps=a.eps
    ),
    public=2,
)


def _check_query(first, query, scores, norm_type, norm_weight) -> None:
    if (query is None) == (scores is None):
        got = "neither" if query is None else "both"
        raise ValueError(f"depth_attention: expected either query or scores, got {got}")
    checks.choice("depth_attention", NORMS, norm_type=norm_type)
    if norm_weight is not None and (query is None or norm_type is None):
        raise ValueError("depth_attention: norm_weight needs a query and norm_type='rms'")
    if query is None:
        return
    dim = first.shape[-1]
    checks.tensor("depth_attention", "query", query)
    if query.dim() > 2 or query.shape[-1] != dim or query.numel() == 0:
        raise ValueError(
            f"depth_attention: query must be ({dim},) or (H, {dim}) with H >= 1, "
            f"got {tuple(query.shape)}"
        )
    checks.parameter("depth_attention", "query", query, tuple(query.shape), first.device)
    if norm_weight is not None:
        checks.tensor("depth_attention", "norm_weight", norm_weight)
        shape = tuple(query.shape) if norm_weight.dim() == query.dim() else (dim,)
        checks.parameter("depth_attention", "norm_weight", norm_weight, shape, first.device)


def _check_scores(sources: list[Tensor], scores: Tensor) -> None:
    first = sources[0]
    checks.tensor("depth_attention", "scores", scores)
    shape = (*first.shape[:-1], len(sources))
    if scores.dim() == first.dim() + 1:
        shape = (*shape, scores.shape[-1])
    checks.parameter("depth_attention", "scores", scores, shape, first.device)


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor | None = ...,
    *,
    scores: Tensor | None = ...,
    norm_type: str | None = ...,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    return_lse: Literal[False] = False,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor | None = ...,
    *,
    scores: Tensor | None = ...,
    norm_type: str | None = ...,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, 2018;
    Kimi Team, Attention Residuals, 2026; the online softmax of Milakov, Gimelshein 2018.
    """
    sources = common.checked_sources("depth_attention", "sources", sources)
    first = sources[0]
    checks.eps("depth_attention", eps)
    checks.flag("depth_attention", return_lse=return_lse)
    _check_query(first, query, scores, norm_type, norm_weight)
    if query is None:
        _check_scores(sources, scores)
        one_hop = scores.dim() == first.dim()
        s = scores.unsqueeze(-1) if one_hop else scores
        out, lse = _depth_attention(sources, None, s, False, eps, backend)
    else:
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
