"""The layer-norm and the feed-forward block as one op, which chooses what to save for backward."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common, norm
from deepfast.ops.activation import activation_grad, activation_op, compute, compute_grad
from deepfast.ops.register import register
from deepfast.reference.activation import KINDS, activation


def _forward(a):
    n, s, mean, rstd = norm.compute(a)
    h = _up(a, n)
    if not a.want_norm:
        n = a.x.new_empty(0)
    hidden = h if _in_product(a) else _activate(a, h)
    kept = a.x.new_empty(0) if not a.keep else hidden if a.activation == "relu" else h
    return F.linear(hidden, a.down, a.down_bias), s, n, mean, rstd, kept


def _in_product(a) -> bool:
    """Whether the first product adds the bias and applies ReLU itself.

    On a GPU that saves a pass over the hidden activation. On a CPU torch makes the pass anyway.
    """
    plain = a.activation == "relu" and a.activation_p == 0 and a.up_bias is not None
    return plain and a.up.is_cuda


def _up(a, n):
    """The first product, and the bias and ReLU where `_in_product`."""
    if not _in_product(a):
        return F.linear(n, a.up)
    rows = n.view(-1, n.shape[-1])
    h = torch._addmm_activation(a.up_bias.to(n.dtype), rows, a.up.t())
    return h.view(*n.shape[:-1], a.up.shape[0])


def _activate(a, h):
    """The hidden activation; ReLU's overwrites h, because its backward reads the result alone."""
    given = h, a.up_bias, a.activation, a.activation_p, a.activation_seed, a.backend
    return compute(activation_op.operands(*given), inplace=a.activation == "relu")


def _fake(a):
    y, s, mean, rstd = norm.empty_results(a)
    out = a.x.new_empty((*a.x.shape[:-1], a.down.shape[0]))
    kept = a.x.new_empty((*a.x.shape[:-1], a.up.shape[0]) if a.keep else 0)
    return out, s, y if a.want_norm else a.x.new_empty(0), mean, rstd, kept


def _grad_forward(a):
    want, dn = _feed_forward_grad.results._make(a.wants), a.dn
    if a.dout is None:
        products = _empty_products(a, want, a.sum.new_zeros)
    else:
        relu, lean, kept, n = a.activation == "relu", a.kept.numel() == 0, a.kept, None
        if lean or want.dup:
            n = norm.recomputed(a)
        if lean:
            kept = _up(a, n)
        hidden = kept if relu and (_in_product(a) or not lean) else _activate(a, kept)
        down = common.linear_grads(a.dout, hidden, want.ddown, want.ddown_bias)
        if relu:
            kept = hidden
        del hidden
        given = activation_grad.operands(
            a.dout.matmul(a.down), kept, a.up_bias, a.activation, a.activation_p,
            a.activation_seed, [True, want.dup_bias], a.backend,
        )  # fmt: skip
        dh, dup_bias = compute_grad(given, inplace=True)
        del kept, given
        products = common.linear_grads(dh, n, want.dup, False)[0], dup_bias, *down
        del n
        through = dh.matmul(a.up)
        del dh
        dn = through if dn is None else through.add_(dn)
    return *norm.compute_grads(a, dn), *products


def _empty_products(a, want, make):
    """dup, dup_bias, ddown and ddown_bias, each None where its entry of ``want`` is False."""
    dup = make(a.up.shape) if want.dup else None
    dup_bias = make(a.up.shape[0], dtype=a.rstd.dtype) if want.dup_bias else None
    ddown = make(a.down.shape) if want.ddown else None
    return dup, dup_bias, ddown, make(a.down.shape[0]) if want.ddown_bias else None


def _grad_fake(a):
    want = _feed_forward_grad.results._make(a.wants)
    return *norm.empty_grads(a), *_empty_products(a, want, a.sum.new_empty)


def _products_flops(x, up, down) -> int:
    return 2 * math.prod(x) * (up[0] + down[0] * up[0] // x[-1])


def _grad_flops(a) -> int:
    recomputed = 2 * math.prod(a.sum) * a.up[0] if list(a.kept) == [0] else 0
    return recomputed + 2 * _products_flops(a.sum, a.up, a.down)


_feed_forward_grad = register(
    "feed_forward_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? dn, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? mean, Tensor rstd, "
    "Tensor kept, float eps, bool rms, float dropout_p, Tensor? seed, str activation, "
    "float activation_p, Tensor? activation_seed, bool[] wants, str? backend) -> (Tensor dx, "
    "Tensor dresidual, Tensor dnorm_weight, Tensor dnorm_bias, Tensor dup, Tensor dup_bias, "
    "Tensor ddown, Tensor ddown_bias)",
    _grad_forward,
    fake=_grad_fake,
    flops=_grad_flops,
)


def _plain(a):
    n, s = norm.plain_norm(a)
    h = F.linear(n, a.up)
    h = activation(
        h, a.activation, bias=a.up_bias, dropout_p=a.activation_p, seed=a.activation_seed
    )
    return F.linear(h, a.down, a.down_bias), s, n


def _setup(ctx, a, results):
    ctx.want_norm = a.want_norm
    return norm.kept_to_recompute(ctx, a, results) | {
        "up": a.up, "up_bias": common.detached(a.up_bias), "down": a.down, "kept": results.kept,
        "activation": a.activation, "activation_p": a.activation_p,
        "activation_seed": a.activation_seed,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    dn = grads.n if ctx.want_norm else None
    return norm.norm_gradients(_feed_forward_grad, ctx, kept, grads.sum, dout=grads.out, dn=dn)


_feed_forward = register(
    "feed_forward(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor up, "
    "Tensor? up_bias, Tensor down, Tensor? down_bias, float eps, bool rms, float dropout_p, "
    "Tensor? seed, str activation, float activation_p, Tensor? activation_seed, bool keep, "
    "bool want_norm, str? backend) -> (Tensor out, Tensor sum, Tensor n, Tensor mean, "
    "Tensor rstd, Tensor kept)",
    _forward,
    fake=_fake,
    flops=lambda a: _products_flops(a.x, a.up, a.down),
    cast=("x", "residual", "up", "down", "down_bias"),
    setup=_setup,
    backward=_backward,
    plain=_plain,
    public=3,
)


def feed_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm_type: str = "layer",
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    activation: str = "relu",
    activation_dropout_p: float = 0.0,
    training: bool = False,
    recompute: bool = False,
    return_norm: bool = False,
    seed: int | Tensor | None = None,
    activation_seed: int | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``dropout(act(n up_weight^T + up_bias)) down_weight^T + down_bias`` with n = LN(s) and
    s = residual + dropout(x).

    Autograd saves s and, without ``recompute``, one hidden activation. Backward recomputes the
    layer-norm and, for GELU, the activation. It regenerates dropout masks from their seeds; ReLU's
    mask is where its output is not 0. With ``recompute`` backward computes the first matrix product
    again: that is a sixth more matrix work in the block, for a fifth of its memory at F = 4 D. The
    matrix products are torch's. The bias of the first is added by the activation, or on a GPU by
    the product itself where only ReLU follows; its gradient comes from the activation's backward.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias: (D,), parameters of the layer-norm, or None.
        up_weight: (F, D), in x's dtype.
        up_bias: (F,), any of these dtypes, or None.
        down_weight, down_bias: (N, F) and (N,) or None, in x's dtype.
        eps: added to the variance.
        norm_type: "layer", or "rms" for `rms_norm`.
        residual: shaped like x.
        dropout_p, activation_dropout_p: probability of dropout on x and on the hidden activation,
            while ``training``.
        activation: "relu" or "gelu".
        recompute: whether backward computes the hidden activation again.
        return_norm: whether to return n in place of s, for a post-norm layer.
        seed, activation_seed: seeds of the two dropout masks, see `layer_norm`.
        backend: backend of layer-norm and activation, see `deepfast.backend`.

    Returns:
        (..., N), and s (x itself without residual and dropout), or n with ``return_norm``.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Vaswani et al., Attention Is All You Need, 2017; what is recomputed as in Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    name = "feed_forward"
    checks.choice(name, norm.TYPES, norm_type=norm_type)
    rms = norm_type == "rms"
    x, residual, dim = norm.check(
        name, x, residual, (norm_weight, norm_bias, eps, rms), prefix="norm_"
    )
    checks.probability(name, dropout_p)
    checks.choice(name, KINDS, activation=activation)
    checks.probability(name, activation_dropout_p, argument="activation_dropout_p")
    checks.flag(name, training=training, recompute=recompute, return_norm=return_norm)
    names = "up_weight", "F", "up_bias"
    up_weight, _ = common.linear_operands(name, x, dim, names, up_weight, None)
    checks.parameter(name, "up_bias", up_bias, (up_weight.shape[0],), x.device)
    names = "down_weight", "N", "down_bias"
    down_weight, down_bias = common.linear_operands(
        name, x, up_weight.shape[0], names, down_weight, down_bias
    )
    p, q = (dropout_p, activation_dropout_p) if training else (0.0, 0.0)
    seed = common.draw_seed(name, seed, x.device) if p > 0 else None
    if q > 0:
        activation_seed = common.draw_seed(
            name, activation_seed, x.device, argument="activation_seed"
        )
    else:
        activation_seed = None
    out, total, n = _feed_forward(
        x=x, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias, up=up_weight,
        up_bias=up_bias, down=down_weight, down_bias=down_bias, eps=eps, rms=rms, dropout_p=p,
        seed=seed, activation=activation, activation_p=q, activation_seed=activation_seed,
        keep=not recompute, want_norm=return_norm, backend=backend,
    )  # fmt: skip
    if return_norm:
        return out, n
    return out, x if residual is None and p == 0 else total
