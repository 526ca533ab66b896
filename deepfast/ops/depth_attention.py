"""Attention over depth: a softmax over layers for each token, and their weighted sum."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.ops import common
from deepfast.ops.register import register
from deepfast.reference.layer_norm import compute_dtype

NORMS = ("rms", None)


def _launch(first, backend):
    return backends.choose(
        "depth_attention", backend, first.device.type, first.dtype, first.shape[-1]
    )[1]


def _operands(sources, query, scores):
    """As the kernels read them: rows (T, D), query (H, D), scores (T, K, H)."""
    rows = [common.rows(s) for s in sources]
    q, s = (common.parameter(p, sources[0].dtype) for p in (query, scores))
    return rows, q, None if s is None else s.view(rows[0].shape[0], *s.shape[-2:])


def _hops(query, scores) -> int:
    return scores.shape[-1] if query is None else query.shape[0]


def _forward(sources, query, scores, norm, eps, backend):
    out, *statistics = results = _fake(sources, query, scores, norm, eps, backend)
    rows, q, s = _operands(sources, query, scores)
    tokens, dim = rows[0].shape
    hops = out.shape[-2]
    _launch(sources[0], backend).depth_attention_forward(
        rows, q, s, norm, eps, out.view(tokens * hops, dim),
        *(x.view(tokens, hops) for x in statistics),
    )  # fmt: skip
    return results


def _fake(sources, query, scores, norm, eps, backend):
    first, hops = sources[0], _hops(query, scores)
    out = first.new_empty((*first.shape[:-1], hops, first.shape[-1]))
    shape, dtype = (*first.shape[:-1], hops), compute_dtype(first.dtype)
    return out, *(first.new_empty(shape, dtype=dtype) for _ in range(3))


def _grad_forward(sources, query, scores, norm, eps, out, most, total, dout, dlse, wants, backend):
    results = _grad_fake(
        sources, query, scores, norm, eps, out, most, total, dout, dlse, wants, backend
    )
    dsources, dquery, dscores = results
    rows, q, s = _operands(sources, query, scores)
    hops, shape = most.shape[-1], rows[0].shape
    _launch(sources[0], backend).depth_attention_backward(
        rows, q, s, norm, eps, out.view(-1, shape[1]), most.view(-1, hops),
        total.view(-1, hops), common.rows(dout),
        None if dlse is None else dlse.reshape(-1, hops).contiguous(),
        [d.view(shape) for d in dsources] if wants[0] else [], dquery if wants[1] else None,
        dscores.view(s.shape) if wants[2] else None,
    )  # fmt: skip
    return results


def _grad_fake(sources, query, scores, norm, eps, out, most, total, dout, dlse, wants, backend):
    first = sources[0]
    dsources = [first.new_empty(first.shape if wants[0] else 0) for _ in sources]
    given = (
        first.new_empty(p.shape if want else 0, dtype=most.dtype)
        for p, want in zip((query, scores), wants[1:], strict=True)
    )
    return dsources, *given


def _flops(sources, query, scores, *_, **__) -> int:
    # The weighted sum and, with a query, the scores.
    hops = scores[-1] if query is None else query[0]
    return 2 * (1 if query is None else 2) * hops * len(sources) * math.prod(sources[0])


_depth_attention_grad = register(
    "depth_attention_grad(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "Tensor out, Tensor most, Tensor total, Tensor dout, Tensor? dlse, bool[] wants, "
    "str? backend) "
    "-> (Tensor[] dsources, Tensor dquery, Tensor dscores)",
    _grad_forward,
    fake=_grad_fake,
    flops=lambda *shapes, **__: 2 * _flops(*shapes),
)


def _setup(ctx, inputs, output):
    sources, query, scores, ctx.norm, ctx.eps, ctx.backend = inputs
    out, _, most, total = output
    ctx.save_for_backward(query, scores, out, most, total, *sources)


def _backward(ctx, dout, dlse, *_):
    query, scores, out, most, total, *sources = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if dout is None and dlse is None:
        return [None] * len(sources), *(None,) * 5
    wants = [any(needs[0]), needs[1], needs[2]]
    dsources, *given = _depth_attention_grad(
        sources, query, scores, ctx.norm, ctx.eps, out, most, total,
        torch.zeros_like(out) if dout is None else dout, dlse, wants, ctx.backend,
    )  # fmt: skip
    return (
        [d if need else None for d, need in zip(dsources, needs[0], strict=True)],
        *(
            d.to(p.dtype) if need else None
            for d, p, need in zip(given, (query, scores), needs[1:3], strict=True)
        ),
        *(None,) * 3,
    )


def _cast(sources, *rest):
    return list(common.autocast(*sources)), *rest


_depth_attention = register(
    "depth_attention(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, float eps, "
    "str? backend) -> (Tensor out, Tensor lse, Tensor most, Tensor total)",
    _forward,
    fake=_fake,
    flops=_flops,
    cast=_cast,
    setup=_setup,
    backward=_backward,
    public=2,
)


def _check_query(first, query, scores, norm, norm_weight) -> None:
    if (query is None) == (scores is None):
        got = "neither" if query is None else "both"
        raise ValueError(f"depth_attention: expected either query or scores, got {got}")
    if norm not in NORMS:
        raise ValueError(f"depth_attention: norm must be one of {NORMS}, got {norm!r}")
    if norm_weight is not None and (query is None or norm is None):
        raise ValueError("depth_attention: norm_weight needs a query and norm='rms'")
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


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    norm: str | None = "rms",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over layers, ``out_h = sum_k softmax_k(s_kh) v_k`` for each token on its own.

    ``s_kh = query_h . RMSNorm(v_k)``, or ``scores`` themselves. One pass over the sources: nothing
    is stacked, the softmax is made online, and backward keeps two numbers of each hop beside the
    result, no weights. ``lse_h = log sum_k exp(s_kh)``. Results over two groups of sources are
    merged by the op itself::

        depth_attention([out_a, out_b], scores=torch.stack((lse_a, lse_b), -1))

    Args:
        sources: K tensors v_k (..., D) of one shape and dtype (fp32, bf16, fp16, fp64), any K >= 1.
        query: (D,), or (H, D) for H hops, any of these dtypes.
        scores: instead of a query, (..., K) or (..., K, H), any of these dtypes; -inf leaves a
            source out.
        norm: "rms", or None for ``s_kh = query_h . v_k``.
        norm_weight: the norm's gain, (D,), (H, D) for a gain of each hop, or None.
        eps: added to the mean square.
        return_lse: whether lse is wanted too; it has a gradient.
        backend: see `deepfast.backend`.

    Returns:
        (..., D), or (..., H, D) with H hops, in the dtype of the sources; with ``return_lse`` also
        lse, (...) or (..., H), fp32 (fp64 for fp64). Sums are in that dtype.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, 2018;
    Kimi Team, Attention Residuals, 2026; the online softmax of Milakov, Gimelshein 2018.
    """
    sources = common.checked_sources("depth_attention", "sources", sources)
    first = sources[0]
    checks.eps("depth_attention", eps)
    _check_query(first, query, scores, norm, norm_weight)
    if query is None:
        _check_scores(sources, scores)
        one_hop = scores.dim() == first.dim()
        s = scores.unsqueeze(-1) if one_hop else scores
        out, lse = _depth_attention(sources, None, s, False, eps, backend)
    else:
        one_hop = query.dim() == 1
        # The norm's gain goes to the query: q . (g * n) = (q * g) . n.
        if norm_weight is not None:
            dtype = compute_dtype(first.dtype)
            query = query.to(dtype) * norm_weight.to(dtype)
        q = query.unsqueeze(0) if one_hop else query
        out, lse = _depth_attention(sources, q, None, norm is not None, eps, backend)
    if one_hop:
        out, lse = out.squeeze(-2), lse.squeeze(-1)
    return (out, lse) if return_lse else out
