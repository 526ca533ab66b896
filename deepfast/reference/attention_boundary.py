"""The launches of the boundary between two layers of attention residuals, and of its far passes."""

import torch

from deepfast.reference.boundary import output_backward, put_output
from deepfast.reference.dropout import dropout
from deepfast.reference.rows import load, put


def _dot(n, q):
    """``n . q`` (T,). Not a matrix product, which autocast would compute in half precision."""
    return (n * q).sum(-1)


def _score(a, j, row):
    """The score (T,) of state j for ``row``."""
    n = load(a.states[j]) * a.source_rstd[j].unsqueeze(-1)
    return _dot(n, a.query[row]) + (0 if a.bias is None else a.bias[row, j])


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


def _attend(a, row, x, stats, sources):
    """The sum x (T, D) and its statistics after ``sources``, by the scores of ``row``."""
    for k in sources:
        x, stats = _join(x, stats, load(a.states[k]), _score(a, k, row), a.kind)
    return x, stats


def attend_rows(a):
    """``out[b] = sum_k p_k z_k`` over ``sources`` k for each of ``rows``, and the statistics of the
    softmax; joined to what they hold if ``accumulate``. z_k is in slot k, ``p = softmax(s)`` or
    ``relu(s)``, and ``s_k = query[row] . z_k * source_rstd[k] + bias[row, k]``."""
    for b, row in zip(a.out_rows, a.rows, strict=True):
        x, stats = _no_sources(a.out[b], a.kind)
        if a.accumulate:
            x, stats = load(a.out[b]), None if a.out_stats is None else a.out_stats[b]
        a.out[b], stats = _attend(a, row, x, stats, a.sources)
        if stats is not None:
            a.out_stats[b] = stats


def _pull_attention(a, j, v, g, row):
    """The part of dz of state j, v, that ``row`` with gradient g adds. Adds to ``dquery`` and sets
    ``dbias``."""
    r, q = a.source_rstd[j], a.query[row]
    score = _dot(v * r.unsqueeze(-1), q) + (0 if a.bias is None else a.bias[row, j])
    slope = (g * v).sum(-1)
    if a.kind == "relu":
        p, ds = score.relu(), slope * (score > 0)
    else:
        most, total, delta = a.stats[row]
        p = (score - most).exp() / total
        ds = p * (slope - delta)
    n, ds_r = v * r.unsqueeze(-1), (ds * r).unsqueeze(-1)
    if a.dquery is not None:
        a.dquery[row] += (ds.unsqueeze(-1) * n).sum(0)
    if a.dbias is not None:
        a.dbias[row, j] = ds.sum()
    return p.unsqueeze(-1) * g + ds_r * (q - n * (_dot(n, q) / v.shape[-1]).unsqueeze(-1))


def attend_pull(a):
    """``out[j] = sum_l`` of what row l adds to the gradient of state j, added if ``accumulate``.

    ``stats[l]`` has the softmax's two statistics and ``<g_l, x_l>``. Adds to ``dquery`` and sets
    the entries of ``dbias``.
    """
    for b, j in zip(a.out_rows, a.sources, strict=True):
        v = load(a.states[j])
        total = load(a.out[b]) if a.accumulate else torch.zeros_like(v)
        for slot, row in zip(a.grad_slots, a.rows, strict=True):
            total = total + _pull_attention(a, j, v, load(a.grads[slot]), row)
        a.out[b] = total


def _attend_near(a):
    """x of row k and its statistics: ``partial`` joined to the near states."""
    x, stats = _no_sources(a.states[0], a.kind)
    if a.partial is not None:
        x, stats = load(a.partial), a.partial_stats
    return _attend(a, a.k, x, stats, a.near)


def attention_boundary_forward(a):
    """`boundary_forward` with the weights of `attend_rows`: ``partial`` is joined to the states of
    ``near``. ``source_rstd[k] = 1 / RMS(z_k)``, and ``stats[k]`` gets the row's statistics."""
    if a.branch is not None:
        y = dropout(load(a.branch), a.dropout_p, a.seed)
        a.states[a.k] = y if a.residual is None else y + load(a.residual)
        a.source_rstd[a.k] = (load(a.states[a.k]).square().mean(-1) + a.eps).rsqrt()
    mixed, stats = _attend_near(a)
    if stats is not None:
        a.stats[a.k, :2] = stats
    put(a.x, mixed)
    if a.out is not None:
        put_output(a, mixed)


def attention_boundary_backward(a):
    """`boundary_backward` with the weights of `attend_rows`. ``stats[k, 2]`` gets <g, x>, of the
    rounded g, which is the one that later boundaries read."""
    g = 0 if a.dx is None else load(a.dx)
    mixed = None
    if a.dout is not None or a.stats is not None:
        mixed, _ = _attend_near(a)
    if a.dout is not None:
        g = g + output_backward(a, mixed)
    v = load(a.states[a.k]).clone()
    a.grads[a.grad_slot] = g
    g = load(a.grads[a.grad_slot])
    if a.stats is not None:
        a.stats[a.k, 2] = (g * mixed).sum(-1)
    u = torch.zeros_like(v) if a.pulled is None else load(a.pulled)
    for row, slot in zip(a.pull_rows, a.pull_slots, strict=True):
        u = u + _pull_attention(a, a.k, v, g if row == a.k else load(a.grads[slot]), row)
    put(a.dresidual, u)
    put(a.dbranch, dropout(u, a.dropout_p, a.seed))
