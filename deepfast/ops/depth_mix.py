"""Depth mixing in functional form: the weighted sum of a list of layer outputs.

Weights for all tokens have launches of their own. Weights of each token use those of attention over
depth, whose scores are then the weights, without a softmax.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.depth_attention import launch_operands
from deepfast.ops.register import gradients, register
from deepfast.reference.depth_mix import depth_mix as reference


def _launch_operands(a, mean, rstd):
    """The launches of the backend, and the operands that forward and backward share: the sources
    as rows (T, D), the parameters as kernels read them, the statistics (K, T) of a norm."""
    first = a.sources[0]
    _, launch = backends.choose("depth_mix", a.backend, first.device, first.dtype, first.shape[-1])
    rows = [common.rows(s) for s in a.sources]
    names, norm = ("weight", "norm_weight", "norm_bias"), _has_norm(a)
    shared = {name: common.parameter(getattr(a, name), first.dtype) for name in names}
    if norm:
        shape = len(rows), rows[0].shape[0]
        shared |= {"mean": mean.view(shape), "rstd": rstd.view(shape)}
    return launch, {"sources": rows, "norm": norm} | shared


def _has_norm(a) -> bool:
    return a.norm_weight is not None or a.norm_bias is not None


def _forward(a):
    out, mean, rstd = _fake(a)
    launch, shared = _launch_operands(a, mean, rstd)
    launch.depth_mix_forward(**shared, eps=a.eps, out=common.rows(out))
    return out, mean, rstd


def _fake(a):
    first = a.sources[0]
    # mean and rstd have one number for each source and token.
    shape = (len(a.sources), *first.shape[:-1]) if _has_norm(a) else (0,)
    mean = first.new_empty(shape, dtype=compute_dtype(first.dtype))
    return first.new_empty(first.shape), mean, torch.empty_like(mean)


def _grad_forward(a):
    launch, shared = _launch_operands(a, a.mean, a.rstd)
    results = dsources, dweight, dnorm_weight, dnorm_bias = _grad_fake(a)
    launch.depth_mix_backward(
        **shared, dout=common.rows(a.dout), dsources=list(map(common.rows, dsources)),
        dweight=dweight, dnorm_weight=dnorm_weight, dnorm_bias=dnorm_bias,
    )  # fmt: skip
    return results


def _grad_fake(a):
    first, (want_sources, *wants) = a.sources[0], a.wants
    dtype = compute_dtype(first.dtype)
    dsources = [common.empty_contiguous(s) for s in a.sources if want_sources]
    params = (
        first.new_empty(p.shape, dtype=dtype) if want else None
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


_depth_mix = register(
    "depth_mix(Tensor[] sources, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, "
    "float eps, str? backend) -> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=_flops,
    setup=_setup,
    backward=lambda ctx, kept, grads: gradients(_depth_mix_grad, ctx, kept, dout=grads.out),
    plain=lambda a: (
        reference(a.sources, a.weight, norm_weight=a.norm_weight, norm_bias=a.norm_bias, eps=a.eps),
    ),
    public=1,
)


# ---- weights of each token -----------------------------------------------------------------------


def mix_tokens(sources: list[Tensor], weight: Tensor, backend: str | None) -> Tensor:
    """``out[t, s] = sum_k weight[t, k, s] sources[k][t]``, (..., S, D), without autograd.

    Args:
        sources: K tensors (..., D).
        weight: (..., K, S).
    """
    first = sources[0]
    *lead, dim = first.shape
    launch, sources, _, scores = launch_operands(sources, None, weight, backend)
    out = first.new_empty(*lead, scores.shape[-1], dim)
    out_rows = out.view(-1, dim)
    launch.depth_attention_forward(
        sources=sources, scores=scores, norm=False, eps=0.0, out=out_rows
    )
    return out


def mix_tokens_backward(
    sources: list[Tensor],
    weight: Tensor,
    dout: Tensor,
    dsources: list[Tensor],
    accumulate: bool,
    dweight: Tensor | None,
    backend: str | None,
) -> None:
    """Gradients of `mix_tokens`.

    Args:
        dout: (..., S, D).
        dsources: K tensors to write to, contiguous, or none.
        accumulate: whether to add to what is in ``dsources``.
        dweight: (..., K, S) in the compute dtype, contiguous, to write to, or None.
    """
    launch, sources, _, scores = launch_operands(sources, None, weight, backend)
    dsources = [d.view(sources[0].shape) for d in dsources]
    dscores = None if dweight is None else dweight.view(scores.shape)
    launch.depth_attention_backward(
        sources=sources, scores=scores, norm=False, eps=0.0, dout=common.rows(dout),
        dsources=dsources, accumulate=accumulate, dscores=dscores,
    )  # fmt: skip


def _token_grad_fake(a):
    first, (want_sources, want_weight) = a.sources[0], a.wants
    dsources = [common.empty_contiguous(s) for s in a.sources if want_sources]
    dtype = compute_dtype(first.dtype)
    return dsources, first.new_empty(a.weight.shape, dtype=dtype) if want_weight else None


def _token_grad_forward(a):
    results = _token_grad_fake(a)
    dsources, dweight = results
    mix_tokens_backward(a.sources, a.weight, a.dout, dsources, False, dweight, a.backend)
    return results


def _token_fake(a):
    first = a.sources[0]
    return first.new_empty((*first.shape[:-1], a.weight.shape[-1], first.shape[-1]))


_depth_mix_tokens_grad = register(
    "depth_mix_tokens_grad(Tensor[] sources, Tensor weight, Tensor dout, bool[] wants, "
    "str? backend) -> (Tensor[] dsources, Tensor dweight)",
    _token_grad_forward,
    fake=_token_grad_fake,
    flops=lambda a: 2 * a.weight[-1] * _flops(a),
)


_depth_mix_tokens = register(
    "depth_mix_tokens(Tensor[] sources, Tensor weight, str? backend) -> Tensor",
    lambda a: mix_tokens(a.sources, a.weight, a.backend),
    fake=_token_fake,
    flops=lambda a: a.weight[-1] * _flops(a),
    setup=lambda ctx, a, results: a._asdict(),
    backward=lambda ctx, kept, grads: gradients(_depth_mix_tokens_grad, ctx, kept, dout=grads.out),
    plain=lambda a: reference(a.sources, a.weight),
)


def _is_of_tokens(first: Tensor, count: int, weight: Tensor) -> bool:
    """Whether ``weight`` has weights of each token; raises where it does not fit one form."""
    *lead, dim = first.shape
    shape, axes = tuple(weight.shape), len(lead)
    # One by one, because a compiler cannot search a tuple for sizes that it does not know. The one
    # of torch 2.10 cannot tell whether a tuple is empty, except by its length.
    of_all = (
        len(shape) > 0
        and shape[0] == count
        and (len(shape) == 1 or (len(shape) == 2 and shape[1] == dim))
    )
    of_tokens = axes > 0 and len(shape) in (axes + 1, axes + 2) and shape[axes] == count
    of_tokens = of_tokens and all(shape[i] == lead[i] for i in range(axes))
    if of_all and of_tokens:
        raise ValueError(
            f"depth_mix: weight {shape} may be one for each channel or one for each token; "
            f"give those of each token as {(*lead, count, 1)}"
        )
    if not of_all and not of_tokens:
        tokens = ", ".join(map(str, (*lead, count)))
        each = f", or for each token ({tokens}) or ({tokens}, S)" if lead else ""
        raise ValueError(
            f"depth_mix: weight must be ({count},) or ({count}, {dim}){each}, got {shape}"
        )
    return of_tokens


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

    The weights may also be of each token, of any sign: ``sum_k weight[..., k, s] * sources[k]``.
    All S sums come from one read of the sources. The shape of ``weight`` decides; a shape that fits
    two of the forms, where T = K = D for sources (T, D), is an error.

    Args:
        sources: K tensors (..., D) of one shape and dtype (fp32, bf16, fp16, fp64), any K >= 1.
            Under autocast their dtypes may differ; the result is then fp32.
        weight: (K,); (K, D) for one weight per channel; or, for sources of two or more dimensions,
            (..., K) or (..., K, S) for weights of each token, without norms.
        norm_weight, norm_bias: (K, D), row k for LN_k, or None.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        (..., D), or (..., S, D) with a weight (..., K, S), in the dtype of the sources; sums are in
        fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Sources: Wang et al., Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8; for
    weights of each token Xiao et al., MUDDFormer, 2025.
    """
    sources = common.checked_sources("depth_mix", "sources", sources)
    first = sources[0]
    count, dim = len(sources), first.shape[-1]
    checks.tensor("depth_mix", "weight", weight)
    of_tokens = _is_of_tokens(first, count, weight)
    checks.parameter("depth_mix", "weight", weight, tuple(weight.shape), first.device)
    checks.parameter("depth_mix", "norm_weight", norm_weight, (count, dim), first.device)
    checks.parameter("depth_mix", "norm_bias", norm_bias, (count, dim), first.device)
    checks.eps("depth_mix", eps)
    if of_tokens:
        if norm_weight is not None or norm_bias is not None:
            raise ValueError(
                "depth_mix: norm_weight and norm_bias must be None with weights of each token"
            )
        one = weight.dim() == first.dim()
        (out,) = _depth_mix_tokens(sources, weight.unsqueeze(-1) if one else weight, backend)
        return out.squeeze(-2) if one else out
    (out,) = _depth_mix(sources, weight, norm_weight, norm_bias, eps, backend)
    return out
