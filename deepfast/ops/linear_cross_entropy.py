"""Projection to the vocabulary and cross entropy in chunks of tokens, without the logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op
from deepfast.reference.linear_cross_entropy import linear_cross_entropy as reference
from deepfast.reference.linear_cross_entropy import logits_dtype, project

REDUCTIONS = ("mean", "sum", "none")
LEAVES = ("hidden", "weight", "bias")
"""The operands with gradients."""

# A chunk has 1 / SHARE of the tokens, and at least so many rows that its matrix products are fast.
SHARE, LEAST_ROWS = 32, 256
# On a GPU a product of fewer rows is limited by reading and adding the weight's gradient. One of
# fewer logits has less than two tiles of 128 x 256 for each of 132 multiprocessors.
CUDA_ROWS, CUDA_LOGITS = 1024, 1 << 23
# Rows of logits are padded to a multiple of 16 elements, so that each starts at a multiple of 16
# bytes in every dtype.
ALIGNED = 16
# Classes that are converted from 16 bits to fp32 at a time on a CPU, by torch in its products and
# by this file.
WIDENED = 2048


def chunk_rows(tokens: int, vocabulary: int, device_type: str) -> int:
    """Tokens per chunk by default. At T = 8192 a chunk has 3% of all logits, on a GPU 1/8."""
    least = LEAST_ROWS
    if device_type == "cuda":
        least = max(CUDA_ROWS, CUDA_LOGITS // max(vocabulary, 1))
    return min(max(least, -(-tokens // SHARE)), tokens)


def _classes(x: Tensor) -> Iterator[slice]:
    """The classes, the columns of ``x``, that are processed at a time."""
    narrow = x.device.type == "cpu" and x.dtype.itemsize == 2
    V = x.shape[1]
    at_once = WIDENED if narrow else V
    return (slice(start, start + at_once) for start in range(0, V, at_once))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """``logits = hidden weight^T + bias`` in the dtype of the logits."""
    dtype = logits.dtype
    if hidden.dtype != dtype and hidden.device.type == "cuda":
        torch.mm(hidden, weight.mT, out_dtype=dtype, out=logits)
        if bias is not None:
            logits += bias
        return
    h = hidden.to(dtype)
    for part in _classes(weight.mT):
        w = weight[part].to(dtype).mT
        if bias is None:
            torch.mm(h, w, out=logits[:, part])
        else:
            torch.addmm(bias[part].to(dtype), h, w, out=logits[:, part])


def _add_outer(
    total: Tensor, dlogits: Tensor, hidden: Tensor, first: bool, result: torch.dtype
) -> None:
    """``total += dlogits^T hidden`` in the dtype of ``total``; the ``first`` call overwrites it.

    The total is rounded to ``result`` in the end. Where that is bf16, a CPU rounds the product of
    each chunk too, because its products of bf16 take half the time and have a bf16 result. That
    error is no larger than the one of rounding the total or dlogits. fp16 could overflow.
    """
    beta = 0 if first else 1
    if total.dtype == dlogits.dtype:
        total.addmm_(dlogits.mT, hidden, beta=beta)
    elif total.device.type == "cuda":
        torch.addmm(total, dlogits.mT, hidden, out_dtype=total.dtype, beta=beta, out=total)
    elif result == torch.bfloat16:
        for part in _classes(dlogits):
            product = dlogits[:, part].mT @ hidden
            total[part].copy_(product) if first else total[part].add_(product)
    else:
        hidden = hidden.to(total.dtype)
        for part in _classes(dlogits):
            total[part].addmm_(dlogits[:, part].to(total.dtype).mT, hidden, beta=beta)


def _forward(a):
    hidden, weight, dtype, (V, D) = a.hidden, a.weight, a.hidden.dtype, a.weight.shape
    write_grad = a.want_dhidden or a.want_dweight or a.want_dbias
    weighted = write_grad and a.token_weight is not None
    # Weights multiply the gradients of the logits before these are rounded.
    wide = compute_dtype(dtype) if weighted else logits_dtype(dtype)
    _, launch = backends.choose("linear_cross_entropy", a.backend, hidden.device, wide)
    rows, target = common.rows(hidden), a.target.reshape(-1).contiguous()
    T, ignored = rows.shape[0], target == a.ignore_index
    # On the CPU only: reading a GPU's tensor would wait for the GPU.
    known = target.is_cpu and not isinstance(target, FakeTensor)
    wrong = target[((target < 0) | (target >= V)) & ~ignored] if known else target[:0]
    if wrong.numel() > 0:
        raise ValueError(
            f"linear_cross_entropy: target must be in [0, {V}) or {a.ignore_index}, got {wrong[0]}"
        )
    chunk = chunk_rows(T, V, hidden.device.type) if a.chunk is None else min(a.chunk, T)
    _, _, correct, dhidden, dweight, dbias, _ = _fake(a)
    correct.zero_()
    projection, shift = weight.to(dtype), None if a.bias is None else a.bias.to(dtype)
    buffers = []
    for kind, n in ((wide, chunk), (dtype, 0 if wide == dtype else chunk)):
        padded = hidden.new_empty(n, -(-V // ALIGNED) * ALIGNED, dtype=kind)
        # With AMX torch's product also reads behind the last column, and multiplies that by 0.
        padded[:, V:].zero_()
        buffers.append(padded[:, :V])
    buffer, narrow = buffers
    losses, nlls = (hidden.new_empty(T, dtype=compute_dtype(dtype)) for _ in range(2))
    factor = None if a.token_weight is None else a.token_weight.reshape(-1).to(losses.dtype)
    if factor is not None:
        factor = factor.masked_fill(ignored, 0)
    if T == 0:
        dweight.zero_(), dbias.zero_()
    options = {"label_smoothing": a.label_smoothing, "ignore_index": a.ignore_index}
    for start in range(0, T, max(chunk, 1)):
        part = slice(start, start + chunk)
        h = rows[part]
        logits = buffer[: h.shape[0]]
        product = logits if wide == logits_dtype(dtype) else narrow[: h.shape[0]]
        _project(h, projection, shift, product)
        if product is not logits:
            logits.copy_(product)
        if a.count_correct:
            # The launch may write gradients over the logits.
            correct += (logits.argmax(1) == target[part]).sum()
        results = {"loss": losses[part], "nll": nlls[part]}
        launch.cross_entropy(
            logits=logits, target=target[part], **options, write_grad=write_grad, **results
        )
        if weighted:
            logits *= factor[part].unsqueeze(1)
        if write_grad and wide != dtype:
            # Products of gradients, which are in [-1, 1] times the token's weight, are in 16 bits.
            logits = narrow[: h.shape[0]].copy_(logits)
        if a.want_dhidden:
            torch.mm(logits, projection, out=dhidden.view(-1, D)[part])
        if a.want_dweight:
            _add_outer(dweight, logits, h, first=start == 0, result=weight.dtype)
        for columns in _classes(logits) if a.want_dbias else ():
            sums = logits[:, columns].sum(0, dtype=dbias.dtype)
            dbias[columns] = sums if start == 0 else dbias[columns] + sums
    if factor is not None:
        losses, nlls = losses * factor, nlls * factor
    count = losses.new_ones(())
    if a.reduction == "none":
        loss, nll = losses.view_as(a.target), nlls.view_as(a.target)
        return loss, nll, correct, dhidden, dweight, dbias, count
    if a.reduction == "mean":
        count = (~ignored).sum() if factor is None else factor.sum()
    # Where every target is ignored, the mean loss is nan and its gradient 0.
    scale = count.masked_fill(count == 0, 1).to(losses.dtype).reciprocal()
    return losses.sum() / count, nlls.sum() / count, correct, dhidden, dweight, dbias, scale


def _plain(a):
    weight, bias = (None if p is None else p.to(a.hidden.dtype) for p in (a.weight, a.bias))
    names = "label_smoothing", "ignore_index", "token_weight", "reduction"
    options = {name: getattr(a, name) for name in names}
    loss, nll = reference(a.hidden, weight, a.target, bias=bias, **options)
    return loss, nll, (project(a.hidden, weight, bias).argmax(-1) == a.target).sum()


def _fake(a):
    dtype = compute_dtype(a.hidden.dtype)
    shape = a.target.shape if a.reduction == "none" else ()
    loss, scale = (a.hidden.new_empty(sizes, dtype=dtype) for sizes in (shape, ()))
    # These are gradients of the summed loss; backward multiplies them by the small factor of the
    # mean, in fp32. Those of weight and bias are in fp32 until then, because a sum over many tokens
    # could overflow fp16.
    dhidden = a.hidden.new_empty(a.hidden.shape if a.want_dhidden else 0)
    dweight = a.weight.new_empty(a.weight.shape if a.want_dweight else 0, dtype=dtype)
    dbias = a.weight.new_empty(a.weight.shape[0] if a.want_dbias else 0, dtype=dtype)
    nll, correct = torch.empty_like(loss), a.target.new_empty(())
    return loss, nll, correct, dhidden, dweight, dbias, scale


def _may_overwrite(ctx, factor: Tensor) -> bool:
    """Whether backward may scale the gradients that forward saved by ``factor`` in place: no other
    code holds them, this is the last backward pass through the graph, and it is not several at once
    (``is_grads_batched`` of `torch.autograd.grad`)."""
    return (
        ctx.bare
        and not ctx.shared
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(factor)
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """``x * factor`` in the compute dtype, rounded once to ``dtype``."""
    # 1-dim, because torch would round a 0-dim factor to the dtype of x.
    factor = factor.view(1)
    if not overwrite:
        return (x * factor).to(dtype)
    if x.dtype == factor.dtype:
        return x.mul_(factor).to(dtype)
    return torch.mul(x, factor, out=x)


def _setup(ctx, a, results):
    ctx.mark_non_differentiable(*results[1:])
    # A hook on saved tensors may keep references to them.
    ctx.shared = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    ctx.again = None
    if a.reduction == "none":
        read = *LEAVES, "target", "token_weight"
        ctx.again = a._replace(**dict.fromkeys(read), reduction="sum", count_correct=False)
        return {name: common.detached(getattr(a, name)) for name in read}
    operands = {name: getattr(a, name) for name in LEAVES}
    grads = {name: getattr(results, f"d{name}") for name in operands}
    ctx.dtypes = {name: None if x is None else x.dtype for name, x in operands.items()}
    return grads | {"scale": results.scale}


def _gradients_of_each(op, ctx, kept, grads) -> dict:
    """The gradients where each token's loss has its own: forward runs again, with these as the
    tokens' weights."""
    factor = grads.loss if kept["token_weight"] is None else grads.loss * kept["token_weight"]
    wants = {f"want_d{name}": getattr(ctx.needs, name) for name in LEAVES}
    given = ctx.again._replace(**kept | wants | {"token_weight": factor})
    results = op.results(*op.registered(*given))
    return {name: getattr(results, f"d{name}") for name in LEAVES}


def _backward(op, ctx, kept, grads):
    if ctx.again is not None:
        return _gradients_of_each(op, ctx, kept, grads)
    factor = grads.loss * kept.pop("scale")
    overwrite = _may_overwrite(ctx, factor)
    return {
        name: _scaled(grad, factor, ctx.dtypes[name], overwrite)
        for name, grad in kept.items()
        if getattr(ctx.needs, name)
    }


_linear_cross_entropy = Op(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? token_weight, float label_smoothing, int ignore_index, str reduction, int? chunk, "
    "bool want_dhidden, bool want_dweight, bool want_dbias, bool count_correct, str? backend) "
    "-> (Tensor loss, Tensor nll, Tensor correct, Tensor dhidden, Tensor dweight, Tensor dbias, "
    "Tensor scale)",
    _forward,
    fake=_fake,
    flops=lambda a: (
        2 * (1 + a.want_dhidden + a.want_dweight) * a.hidden.numel() * a.weight.shape[0]
    ),
    # The op casts weight and bias itself, so that their gradients are summed in fp32.
    cast=("hidden",),
    setup=_setup,
    backward=_backward,
    plain=_plain,
    public=3,
)


def _check_parameter(name: str, p: Tensor, shape: tuple, x: Tensor) -> None:
    """In x's dtype, or in fp32 where x has 16 bits."""
    checks.tensor("linear_cross_entropy", name, p)
    wide = p.dtype == torch.float32 and x.dtype.itemsize == 2
    common.fits("linear_cross_entropy", name, p, shape, x, p.dtype if wide else x.dtype)


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    return_nll: bool = False,
    return_correct: bool = False,
    backend: str | None = None,
) -> Any:
    """Cross entropy of the linear map ``x W^T + b`` against ``target``, without storing all logits.

    ``nll = -log softmax(z)[target]`` and ``loss = (1 - s) * nll + s * mean_v(-log softmax(z)[v])``
    with the logits z and s the label smoothing, each times the target's weight; of each target, or
    summed or averaged over the targets that are not ignored. Forward processes the tokens in
    chunks. While it has the logits of a chunk, it also computes the gradients that are needed. That
    takes three matrix products in all, and autograd saves only the gradients of ``x``,
    ``linear_weight`` and ``linear_bias``. The matrix products are torch's.

    With ``reduction="none"`` the gradients depend on those of the losses. So autograd saves x and
    the parameters in their place, and backward computes the logits again, chunk by chunk, with the
    gradients of the losses as weights: four products. A chunk takes 4 bytes a logit in fp32, 6 in
    fp16, and 2 in bf16, or 6 where its gradients have weights.

    In bf16 the logits are rounded to bf16, as torch's linear rounds them. In fp16, where they could
    overflow, they are in fp32. The gradients of the logits are rounded to x's dtype; the softmax,
    the losses and all sums over tokens are in fp32.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        linear_weight: W, (V, D), in x's dtype, or in fp32 where x has 16 bits. An fp32 weight is
            cast for the products; its gradient is summed in fp32 and not rounded. It may be the
            embedding.
        linear_bias: b, (V,), or None; its dtypes are those of the weight.
        target: (...) int64, each in [0, V) or ``ignore_index``. Any other value is an error on a
            CPU. On a GPU, where a check would wait for the device, it makes the loss nan.
        label_smoothing: in [0, 1].
        ignore_index: targets of this value, which fits into 32 bits, give no loss and no gradient.
        token_weight: (...), any of these dtypes: a factor of the loss of each target, without
            gradient; None is 1.
        reduction: "sum"; "mean": the sum over the sum of the weights of the targets that are not
            ignored, nan where that is 0; or "none".
        chunk_size: tokens per chunk; by default 1/32 of the tokens, at least 256. On a GPU at least
            1,024, and more where the vocabulary has less than 8,192 words.
        return_nll: whether to return the nll too, with the same reduction and without gradient.
        return_correct: whether to return how many targets have the largest logit, int64; of equal
            logits the first counts. An ignored target has none. This reads the logits once more.
        backend: backend of everything between the matrix products, see `deepfast.backend`.

    Returns:
        The loss, 0-dim, or (...) with "none", in fp32 (fp64 for fp64); with ``return_nll`` and
        ``return_correct`` a tuple: the loss, then the nll and the number, each only if requested.

    Raises: as every op, see `deepfast.ops`.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2016, for label smoothing; the
    gradient in forward as in Liger-Kernel (Hsu et al. 2024).
    """
    op = "linear_cross_entropy"
    checks.tensor(op, "x", x)
    common.fits(op, "target", target, x.shape[:-1], x, torch.int64)
    checks.probability(op, label_smoothing, argument="label_smoothing")
    checks.choice(op, REDUCTIONS, reduction=reduction)
    if chunk_size is not None:
        checks.whole(op, chunk_size=chunk_size)
    # Triton takes an integer of 32 bits and one of 64 in different kernels.
    checks.whole(op, -(2**31), 2**31 - 1, ignore_index=ignore_index)
    checks.flag(op, return_nll=return_nll, return_correct=return_correct)
    checks.parameter(op, "token_weight", token_weight, tuple(target.shape), x.device)
    if token_weight is not None and token_weight.requires_grad:
        raise ValueError(
            f"{op}: token_weight must not require a gradient; multiply what reduction='none' gives"
        )
    (x,) = common.autocast(x)
    _check_parameter("linear_weight", linear_weight, ("V", x.shape[-1]), x)
    if linear_bias is not None:
        _check_parameter("linear_bias", linear_bias, (linear_weight.shape[0],), x)
    given = x, linear_weight, linear_bias
    differentiate = torch.is_grad_enabled() and reduction != "none"
    wants = [differentiate and p is not None and p.requires_grad for p in given]
    options = label_smoothing, ignore_index, reduction, chunk_size
    loss, nll, correct = _linear_cross_entropy(
        *given, target, token_weight, *options, *wants, return_correct, backend
    )
    if not return_nll and not return_correct:
        return loss
    return loss, *[nll] * return_nll, *[correct] * return_correct
