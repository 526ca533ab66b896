"""The launches of the boundary between two layers of DLCL, and of its far passes."""

from torch import Tensor

from deepfast.reference.dropout import dropout
from deepfast.reference.layer_norm import normalise
from deepfast.reference.rows import affine, entry, load, norm_backward, normalised, put


def _source(a, k):
    return affine(load(a.states[k]), entry(a.norm_weight, k), entry(a.norm_bias, k))


def mix_rows(a):
    """``out[b] = sum_k weight[rows[b], k] * z_k`` over ``sources`` k, added if ``accumulate``."""
    for b, row in zip(a.out_rows, a.rows, strict=True):
        total = load(a.out[b]) if a.accumulate else 0
        for k in a.sources:
            total = total + a.weight[row, k] * _source(a, k)
        a.out[b] = total


def _store_dweight(a, row, k, g, z):
    if a.dweight is not None:
        a.dweight[row, k] = (g * z).sum(0) if a.weight.dim() == 3 else (g * z).sum()


def pull_rows(a):
    """``out[j] = sum_l weight[l, j] * g_l``, added if ``accumulate``, and
    ``dweight[l, j] = <g_l, z_j>``."""
    for b, j in zip(a.out_rows, a.sources, strict=True):
        z = _source(a, j)
        total = load(a.out[b]) if a.accumulate else 0
        for slot, row in zip(a.grad_slots, a.rows, strict=True):
            g = load(a.grads[slot])
            total = total + a.weight[row, j] * g
            _store_dweight(a, row, j, g, z)
        a.out[b] = total


def _near(a):
    """x of row k: ``partial`` and the near states' share."""
    x = 0 if a.partial is None else load(a.partial)
    for j in a.near:
        x = x + a.weight[a.k, j] * _source(a, j)
    return x if isinstance(x, Tensor) else load(a.states[0]) * 0


def put_output(a, x):
    n, m, r = normalise(x, a.out_eps, a.out_rms)
    a.out.copy_(affine(n, a.out_norm_weight, a.out_norm_bias))
    put(a.out_mean, m)
    a.out_rstd.copy_(r)


def output_backward(a, x):
    n, d = normalised(x, a.out_mean, a.out_rstd), load(a.dout)
    put(a.dout_norm_weight, (d * n).sum(0))
    put(a.dout_norm_bias, d.sum(0))
    return norm_backward(affine(d, a.out_norm_weight, None), n, a.out_rstd, a.out_rms)


def boundary_forward(a):
    """Stores ``y = residual + dropout(branch)`` in slot k and computes the next layer's input.

    ``x = partial + sum_{j in near} weight[k, j] * z_j`` and ``out = LN(x)``. With ``out_rms`` that
    normalisation subtracts no mean, and ``out_mean`` is None; with ``source_rms`` that of y
    subtracts none. Where ``branch`` is None, slot k is only read: the launch recomputes a layer's
    input from the states.
    """
    if a.branch is not None:
        y = dropout(load(a.branch), a.dropout_p, a.seed)
        y = y if a.residual is None else y + load(a.residual)
        if a.norm_source:
            y, _, rstd = normalise(y, a.source_eps, a.source_rms)
            a.source_rstd.copy_(rstd)
        a.states[a.k] = y
    mixed = _near(a)
    put(a.x, mixed)
    if a.out is not None:
        put_output(a, mixed)


def boundary_backward(a):
    """Stores g, the gradient of row k, and computes the gradient of the pushed state.

    ``dz_k = pulled + sum_{l in pull_rows} weight[l, k] * g_l``, and from it, through the state's
    layer-norm and dropout, ``dbranch`` and ``dresidual``.
    """
    g = 0 if a.dx is None else load(a.dx)
    if a.dout is not None:
        g = g + output_backward(a, _near(a))
    n = load(a.states[a.k]).clone()
    z = _source(a, a.k).clone()
    a.grads[a.grad_slot] = g
    u = n * 0 if a.pulled is None else load(a.pulled)
    for row, slot in zip(a.pull_rows, a.pull_slots, strict=True):
        g_l = g if row == a.k else load(a.grads[slot])
        u = u + a.weight[row, a.k] * g_l
        _store_dweight(a, row, a.k, g_l, z)
    put(a.dnorm_weight, (u * n).sum(0))
    put(a.dnorm_bias, u.sum(0))
    u = u if a.norm_weight is None else u * a.norm_weight[a.k]
    u = norm_backward(u, n, a.source_rstd, a.source_rms) if a.norm_source else u
    put(a.dresidual, u)
    put(a.dbranch, dropout(u, a.dropout_p, a.seed))
