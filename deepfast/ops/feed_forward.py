"""The layer-norm and the feed-forward block as one op, which chooses what to save for backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common, norm
from deepfast.ops.activation import activation_grad, activation_op, compute, compute_grad
from deepfast.ops.register import Op
from deepfast.reference.activation import KINDS, activation


def _forward(a):
    n, s, mean, rstd = norm.compute(a)
    h = _up(a, n)
    if not a.want_norm:
        n = None
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


def _grad_forward(a):
    want, relu = _feed_forward_grad.results._make(a.wants), a.activation == "relu"
    dout = common.zeros_if_missing(a.dout, a.sum, a.down.shape[0])
    lean, kept = _lean(a), a.kept
    n = norm.recomputed(a) if lean or want.dup else None
    if lean:
        kept = _up(a, n)
    hidden = kept if relu and (_in_product(a) or not lean) else _activate(a, kept)
    ddown, ddown_bias = common.linear_grads(dout, hidden, want.ddown, want.ddown_bias)
    if relu:
        kept = hidden
    del hidden
    options = a.up_bias, a.activation, a.activation_p, a.activation_seed
    given = dout.matmul(a.down), kept, *options, [True, want.dup_bias], a.backend
    dh, dup_bias = compute_grad(activation_grad.operands(*given), inplace=True)
    del kept, given
    dup, _ = common.linear_grads(dh, n, want.dup, False)
    del n
    dn = dh.matmul(a.up) if a.dn is None else dh.matmul(a.up).add_(a.dn)
    del dh
    return *norm.compute_grads(a, dn), dup, dup_bias, ddown, ddown_bias


def _lean(a) -> bool:
    """Whether the hidden activation was not kept."""
    return list(a.kept.shape) == [0]


def _flops(x, a) -> int:
    """Multiplications and additions of both products. x: (..., D)."""
    return 2 * x.numel() * a.up.shape[0] // x.shape[-1] * (x.shape[-1] + a.down.shape[0])


_feed_forward_grad = Op(
    "feed_forward_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? dn, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? mean, Tensor rstd, "
    "Tensor kept, float eps, bool rms, float dropout_p, Tensor? seed, str activation, "
    "float activation_p, Tensor? activation_seed, bool[] wants, str? backend) -> (Tensor dx, "
    "Tensor dresidual, Tensor dnorm_weight, Tensor dnorm_bias, Tensor dup, Tensor dup_bias, "
    "Tensor ddown, Tensor ddown_bias)",
    _grad_forward,
    flops=lambda a: 2 * _flops(a.sum, a) + _lean(a) * 2 * a.sum.numel() * a.up.shape[0],
)


def _plain(a):
    n, s = norm.plain_norm(a)
    options = {"bias": a.up_bias, "dropout_p": a.activation_p, "seed": a.activation_seed}
    hidden = activation(F.linear(n, a.up), a.activation, **options)
    return F.linear(hidden, a.down, a.down_bias), s, n


def _setup(ctx, a, results) -> dict:
    of_norm = norm.setup_to_recompute(ctx, a, results)
    if not a.want_norm:
        ctx.uncounted.append(results._fields.index("n"))
    return of_norm | {"up_bias": common.detached(a.up_bias)}


_feed_forward = Op(
    "feed_forward(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor up, "
    "Tensor? up_bias, Tensor down, Tensor? down_bias, float eps, bool rms, float dropout_p, "
    "Tensor? seed, str activation, float activation_p, Tensor? activation_seed, bool keep, "
    "bool want_norm, str? backend) -> (Tensor out, Tensor sum, Tensor n, Tensor mean, "
    "Tensor rstd, Tensor kept)",
    _forward,
    flops=lambda a: _flops(a.x, a),
    cast=("x", "residual", "up", "down", "down_bias"),
    grad=_feed_forward_grad,
    setup=_setup,
    backward=norm.backward,
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

    Raises: as every op, see `deepfast.ops`.

    Source: Vaswani et al., Attention Is All You Need, 2017; what is recomputed as in Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    op = "feed_forward"
    checks.choice(op, norm.TYPES, norm_type=norm_type)
    checks.choice(op, KINDS, activation=activation)
    norm_operands = norm_weight, norm_bias, eps, norm_type == "rms"
    x, residual = norm.check(op, x, residual, norm_operands, prefix="norm_")
    p = common.probability(op, dropout_p, training)
    q = common.probability(op, activation_dropout_p, training, "activation_dropout_p")
    checks.flag(op, recompute=recompute, return_norm=return_norm)
    shape = "F", x.shape[-1]
    up_weight, _ = common.linear_operands(op, x, shape, up_weight, None, prefix="up_")
    checks.parameter(op, "up_bias", up_bias, (up_weight.shape[0],), x.device)
    shape, down = ("N", up_weight.shape[0]), (down_weight, down_bias)
    down = common.linear_operands(op, x, shape, *down, prefix="down_")
    seed = common.draw_seed(op, seed, x.device) if p > 0 else None
    drawn = common.draw_seed(op, activation_seed, x.device, "activation_seed") if q > 0 else None
    parameters = norm_weight, norm_bias, up_weight, up_bias, *down
    options = eps, norm_type == "rms", p, seed, activation, q, drawn
    out, total, n = _feed_forward(
        x, residual, *parameters, *options, not recompute, return_norm, backend
    )
    if return_norm:
        return out, n
    return out, x if residual is None and p == 0 else total
