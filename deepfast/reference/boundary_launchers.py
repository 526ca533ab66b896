"""The launches of the boundary between two layers and of its far passes, in plain PyTorch."""

import torch
from torch import Tensor

from deepfast.reference.dropout import dropout
from deepfast.reference.layer_norm import normalise
from deepfast.reference.rows import affine, entry, load, norm_backward, normalised, put


def _source(states, k, norm_weight, norm_bias):
    return affine(load(states[k]), entry(norm_weight, k), entry(norm_bias, k))


def mix_rows(states, sources, weight, rows, norm_weight, norm_bias, out, out_rows, accumulate):
    """``out[b] = sum_k weight[rows[b], k] * z_k`` over ``sources`` k, added if ``accumulate``."""
    for b, row in zip(out_rows, rows, strict=True):
        total = load(out[b]) if accumulate else 0
        for k in sources:
            total = total + weight[row, k] * _source(states, k, norm_weight, norm_bias)
        out[b] = total


def pull_rows(
    grads, grad_slots, rows, states, sources, weight, norm_weight, norm_bias, out, out_rows,
    accumulate, dweight,
):  # fmt: skip
    """``out[j] = sum_l weight[l, j] * g_l``, added if ``accumulate``, and
    ``dweight[l, j] = <g_l, z_j>``."""
    for b, j in zip(out_rows, sources, strict=True):
        z = _source(states, j, norm_weight, norm_bias)
        total = load(out[b]) if accumulate else 0
        for slot, row in zip(grad_slots, rows, strict=True):
            g = load(grads[slot])
            total = total + weight[row, j] * g
            if dweight is not None:
                dweight[row, j] = (g * z).sum(0) if weight.dim() == 3 else (g * z).sum()
        out[b] = total


def _near(states, near, weight, row, norm_weight, norm_bias, partial):
    x = 0 if partial is None else load(partial)
    for k in near:
        x = x + weight[row, k] * _source(states, k, norm_weight, norm_bias)
    return x if isinstance(x, Tensor) else load(states[0]) * 0


def _output(x, weight, bias, eps, rms, out, mean, rstd):
    n, m, r = normalise(x, eps, rms)
    out.copy_(affine(n, weight, bias))
    put(mean, m)
    rstd.copy_(r)


def _output_backward(x, dout, weight, rms, mean, rstd, dweight, dbias):
    n, d = normalised(x, mean, rstd), load(dout)
    put(dweight, (d * n).sum(0))
    put(dbias, d.sum(0))
    return norm_backward(affine(d, weight, None), n, rstd, rms)


def boundary_forward(
    branch, residual, dropout_p, seed, states, k, near, weight, norm_weight, norm_bias, norm_source,
    source_eps, source_rms, partial, out_norm_weight, out_norm_bias, out_eps, out_rms, x, out,
    source_rstd, out_mean, out_rstd,
):  # fmt: skip
    """Stores ``y = residual + dropout(branch)`` in slot k and computes the next layer's input.

    ``x = partial + sum_{j in near} weight[k, j] * z_j`` and ``out = LN(x)``. With ``out_rms`` that
    normalisation subtracts no mean, and ``out_mean`` is None; with ``source_rms`` that of y
    subtracts none. Where ``branch`` is None, slot k is only read: the launch recomputes a layer's
    input from the states.
    """
    if branch is not None:
        y = dropout(load(branch), dropout_p, seed)
        y = y if residual is None else y + load(residual)
        if norm_source:
            y, _, rstd = normalise(y, source_eps, source_rms)
            source_rstd.copy_(rstd)
        states[k] = y
    mixed = _near(states, near, weight, k, norm_weight, norm_bias, partial)
    put(x, mixed)
    if out is not None:
        _output(mixed, out_norm_weight, out_norm_bias, out_eps, out_rms, out, out_mean, out_rstd)


def boundary_backward(
    states, k, near, weight, norm_weight, norm_bias, norm_source, source_rms, partial,
    out_norm_weight, out_norm_bias, out_rms, source_rstd, out_mean, out_rstd, dropout_p, seed, dx,
    dout, grads, grad_slot, pull_rows, pull_slots, pulled, dbranch, dresidual, dweight,
    dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias,
):  # fmt: skip
    """Stores g, the gradient of row k, and computes the gradient of the pushed state.

    ``dz_k = pulled + sum_{l in pull_rows} weight[l, k] * g_l``, and from it, through the state's
    layer-norm and dropout, ``dbranch`` and ``dresidual``.
    """
    g = 0 if dx is None else load(dx)
    if dout is not None:
        mixed = _near(states, near, weight, k, norm_weight, norm_bias, partial)
        g = g + _output_backward(
            mixed, dout, out_norm_weight, out_rms, out_mean, out_rstd, dout_norm_weight,
            dout_norm_bias,
        )  # fmt: skip
    n = load(states[k]).clone()
    z = _source(states, k, norm_weight, norm_bias).clone()
    grads[grad_slot] = g
    u = n * 0 if pulled is None else load(pulled)
    for index, slot_l in zip(pull_rows, pull_slots, strict=True):
        g_l = g if index == k else load(grads[slot_l])
        u = u + weight[index, k] * g_l
        if dweight is not None:
            dweight[index, k] = (g_l * z).sum(0) if weight.dim() == 3 else (g_l * z).sum()
    put(dnorm_weight, (u * n).sum(0))
    put(dnorm_bias, u.sum(0))
    u = u if norm_weight is None else u * norm_weight[k]
    u = norm_backward(u, n, source_rstd, source_rms) if norm_source else u
    put(dresidual, u)
    put(dbranch, dropout(u, dropout_p, seed))


def _scores(states, j, query, bias, rows, source_rstd):
    """The scores (T,) of state j for each of ``rows``."""
    n = load(states[j]) * source_rstd[j].unsqueeze(-1)
    return [n @ query[row] + (0 if bias is None else bias[row, j]) for row in rows]


def _join(x, stats, v, score, kind):
    """The sum (T, D) and its statistics after one more source v with ``score`` (T,).

    stats: the largest score and ``sum exp(score - largest)``, of which x is the weighted mean; None
        for relu.
    """
    if kind == "relu":
        return x + score.relu().unsqueeze(-1) * v, None
    most = torch.maximum(stats[0], score)
    kept, p = stats[1] * (stats[0] - most).exp(), (score - most).exp()
    total = kept + p
    x = x * (kept / total).unsqueeze(-1) + (p / total).unsqueeze(-1) * v
    return x, torch.stack((most, total))


def _no_sources(like, kind):
    zero = torch.zeros_like(load(like))
    none = zero.new_empty(2, zero.shape[0])
    none[0], none[1] = float("-inf"), 0
    return zero, None if kind == "relu" else none


def attend_rows(
    states, sources, query, bias, kind, source_rstd, rows, out, out_stats, out_rows, accumulate
):  # fmt: skip
    """``out[b] = sum_k p_k z_k`` over ``sources`` k for each of ``rows``, and the statistics of the
    softmax; joined to what they hold if ``accumulate``. z_k is in slot k, ``p = softmax(s)`` or
    ``relu(s)``, and ``s_k = query[row] . z_k * source_rstd[k] + bias[row, k]``."""
    for b, row in zip(out_rows, rows, strict=True):
        x, stats = _no_sources(out[b], kind)
        if accumulate:
            x, stats = load(out[b]), None if out_stats is None else out_stats[b]
        for k in sources:
            (score,) = _scores(states, k, query, bias, [row], source_rstd)
            x, stats = _join(x, stats, load(states[k]), score, kind)
        out[b] = x
        if stats is not None:
            out_stats[b] = stats


def _attend_back(g, v, score, r, q, stats, kind):
    """What a row with gradient g and query q adds to dz of a source v, to dq, and ds (T,)."""
    slope = (g * v).sum(-1)
    if kind == "relu":
        p, ds = score.relu(), slope * (score > 0)
    else:
        p = (score - stats[0]).exp() / stats[1]
        ds = p * (slope - stats[2])
    n, ds_r = v * r.unsqueeze(-1), (ds * r).unsqueeze(-1)
    dz = p.unsqueeze(-1) * g + ds_r * (q - n * ((n @ q) / v.shape[-1]).unsqueeze(-1))
    return dz, (ds.unsqueeze(-1) * n).sum(0), ds


def _pull_attention(states, j, v, g, row, query, bias, kind, source_rstd, stats, dquery, dbias):
    r = source_rstd[j]
    score = (v * r.unsqueeze(-1)) @ query[row] + (0 if bias is None else bias[row, j])
    of_row = None if stats is None else stats[row]
    dz, dq, ds = _attend_back(g, v, score, r, query[row], of_row, kind)
    if dquery is not None:
        dquery[row] += dq
    if dbias is not None:
        dbias[row, j] = ds.sum()
    return dz


def attend_pull(
    grads, grad_slots, rows, states, sources, query, bias, kind, source_rstd, stats, out, out_rows,
    accumulate, dquery, dbias,
):  # fmt: skip
    """``out[j] = sum_l`` of what row l adds to the gradient of state j, added if ``accumulate``.

    ``stats[l]`` has the softmax's two statistics and ``<g_l, x_l>``. Adds to ``dquery`` and sets
    the entries of ``dbias``.
    """
    for b, j in zip(out_rows, sources, strict=True):
        v = load(states[j])
        total = load(out[b]) if accumulate else torch.zeros_like(v)
        for slot, row in zip(grad_slots, rows, strict=True):
            total = total + _pull_attention(
                states, j, v, load(grads[slot]), row, query, bias, kind, source_rstd, stats,
                dquery, dbias,
            )  # fmt: skip
        out[b] = total


def _attend_near(states, near, query, bias, kind, row, source_rstd, partial, partial_stats):
    x, stats = _no_sources(states[0], kind)
    if partial is not None:
        x, stats = load(partial), partial_stats
    for k in near:
        (score,) = _scores(states, k, query, bias, [row], source_rstd)
        x, stats = _join(x, stats, load(states[k]), score, kind)
    return x, stats


def attention_boundary_forward(
    branch, residual, dropout_p, seed, states, k, near, query, bias, kind, eps, partial,
    partial_stats, out_norm_weight, out_norm_bias, out_eps, out_rms, x, out, source_rstd, stats,
    out_mean, out_rstd,
):  # fmt: skip
    """`boundary_forward` with the weights of `attend_rows`: ``partial`` is joined to the states of
    ``near``. ``source_rstd[k] = 1 / RMS(z_k)``, and ``stats[k]`` gets the row's statistics."""
    if branch is not None:
        y = dropout(load(branch), dropout_p, seed)
        states[k] = y if residual is None else y + load(residual)
        source_rstd[k] = (load(states[k]).square().mean(-1) + eps).rsqrt()
    mixed, found = _attend_near(
        states, near, query, bias, kind, k, source_rstd, partial, partial_stats
    )
    if found is not None:
        stats[k, :2] = found
    put(x, mixed)
    if out is not None:
        _output(mixed, out_norm_weight, out_norm_bias, out_eps, out_rms, out, out_mean, out_rstd)


def attention_boundary_backward(
    states, k, near, query, bias, kind, partial, partial_stats, out_norm_weight, out_norm_bias,
    out_rms, source_rstd, stats, out_mean, out_rstd, dropout_p, seed, dx, dout, grads, grad_slot,
    pull_rows, pull_slots, pulled, dbranch, dresidual, dquery, dbias, dout_norm_weight,
    dout_norm_bias,
):  # fmt: skip
    """`boundary_backward` with the weights of `attend_rows`. ``stats[k, 2]`` gets <g, x>, of the
    rounded g, which is the one that later boundaries read."""
    g = 0 if dx is None else load(dx)
    mixed = None
    if dout is not None or stats is not None:
        mixed, _ = _attend_near(
            states, near, query, bias, kind, k, source_rstd, partial, partial_stats
        )
    if dout is not None:
        g = g + _output_backward(
            mixed, dout, out_norm_weight, out_rms, out_mean, out_rstd, dout_norm_weight,
            dout_norm_bias,
        )  # fmt: skip
    v = load(states[k]).clone()
    grads[grad_slot] = g
    g = load(grads[grad_slot])
    if stats is not None:
        stats[k, 2] = (g * mixed).sum(-1)
    u = torch.zeros_like(v) if pulled is None else load(pulled)
    for row, slot in zip(pull_rows, pull_slots, strict=True):
        u = u + _pull_attention(
            states, k, v, g if row == k else load(grads[slot]), row, query, bias, kind,
            source_rstd, stats, dquery, dbias,
        )  # fmt: skip
    put(dresidual, u)
    put(dbranch, dropout(u, dropout_p, seed))
