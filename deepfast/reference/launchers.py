"""Every kernel launch of the package in plain PyTorch, with the signatures of deepfast._C.

These functions run where nothing is compiled, on any device and dtype, and every backend is tested
against them. They write results into tensors that the caller allocates. There are T tokens and D
channels. States have the storage dtype; weights, statistics and weight gradients have the compute
dtype (fp32, or fp64 for fp64). ``seed`` is a 0-dim int64 tensor, or None without dropout.
"""

import torch
from torch import Tensor

from deepfast.reference.activation import activation, activation_grad
from deepfast.reference.attention import (
    attention,
    scores,
    sentences,
    weight_masks,
)
from deepfast.reference.dropout import dropout
from deepfast.reference.layer_norm import compute_dtype, normalise
from deepfast.reference.linear_cross_entropy import cross_entropy as losses
from deepfast.reference.peephole_lstm import cell, position


def _load(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x.dtype))


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


def _normalised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (x if mean is None else x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def _norm_backward(dn: Tensor, n: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    a = 0 if rms else dn.mean(-1, keepdim=True)
    return rstd.unsqueeze(-1) * (dn - a - n * (dn * n).mean(-1, keepdim=True))


def _put(target: Tensor | None, value: Tensor) -> None:
    if target is not None:
        target.copy_(value)


def layer_norm_forward(x, residual, weight, bias, eps, rms, dropout_p, seed, sum, y, mean, rstd):
    """``sum = residual + dropout(x)``, ``y = LN(sum) * weight + bias``.

    With ``rms`` the normalisation subtracts no mean, and ``mean`` is None.
    """
    s = dropout(_load(x), dropout_p, seed)
    s = s if residual is None else s + _load(residual)
    if sum is not None:
        sum.copy_(s)
        s = _load(sum)
    n, m, r = normalise(s, eps, rms)
    _put(mean, m)
    rstd.copy_(r)
    y.copy_(_affine(n, weight, bias))


def layer_norm_backward(
    sum, dy, dsum, weight, rms, mean, rstd, dropout_p, seed, dx, dresidual, dweight, dbias
):
    """Gradients of layer_norm_forward from ``dy`` and, unless it is None, ``dsum``."""
    n = _normalised(_load(sum), mean, rstd)
    g = _load(dy)
    _put(dweight, (g * n).sum(0))
    _put(dbias, g.sum(0))
    ds = _norm_backward(_affine(g, weight, None), n, rstd, rms)
    ds = ds if dsum is None else ds + _load(dsum)
    _put(dresidual, ds)
    _put(dx, dropout(ds, dropout_p, seed))


def activation_forward(h, bias, kind, dropout_p, seed, out):
    """``out = dropout(act(h + bias))``; ``out`` may be ``h``."""
    out.copy_(activation(h, kind, bias=bias, dropout_p=dropout_p, seed=seed))


def activation_backward(dout, saved, bias, kind, dropout_p, seed, dh, dbias):
    """Gradients of activation_forward. ``saved`` is ``out`` for relu, which needs no bias, and
    ``h`` for gelu; ``dh`` may be ``dout`` or ``saved``."""
    grads = activation_grad(dout, saved, kind, bias=bias, dropout_p=dropout_p, seed=seed)
    dh.copy_(grads[0])
    _put(dbias, grads[1])


def _entry(parameter: Tensor | None, k: int) -> Tensor | None:
    return None if parameter is None else parameter[k]


def _source(states, k, norm_weight, norm_bias):
    return _affine(_load(states[k]), _entry(norm_weight, k), _entry(norm_bias, k))


def advise_states(states):
    """Advises the memory system about a new buffer of states. The reference does nothing."""


def mix_rows(states, sources, weight, rows, norm_weight, norm_bias, out, out_rows, accumulate):
    """``out[b] = sum_k weight[rows[b], k] * z_k`` over ``sources`` k, added if ``accumulate``."""
    for b, row in zip(out_rows, rows, strict=True):
        total = _load(out[b]) if accumulate else 0
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
        total = _load(out[b]) if accumulate else 0
        for slot, row in zip(grad_slots, rows, strict=True):
            g = _load(grads[slot])
            total = total + weight[row, j] * g
            if dweight is not None:
                dweight[row, j] = (g * z).sum(0) if weight.dim() == 3 else (g * z).sum()
        out[b] = total


def _near(states, near, weight, row, norm_weight, norm_bias, partial):
    x = 0 if partial is None else _load(partial)
    for k in near:
        x = x + weight[row, k] * _source(states, k, norm_weight, norm_bias)
    return x if isinstance(x, Tensor) else _load(states[0]) * 0


def _output(x, weight, bias, eps, rms, out, mean, rstd):
    n, m, r = normalise(x, eps, rms)
    out.copy_(_affine(n, weight, bias))
    _put(mean, m)
    rstd.copy_(r)


def _output_backward(x, dout, weight, rms, mean, rstd, dweight, dbias):
    n, d = _normalised(x, mean, rstd), _load(dout)
    _put(dweight, (d * n).sum(0))
    _put(dbias, d.sum(0))
    return _norm_backward(_affine(d, weight, None), n, rstd, rms)


def boundary_forward(
    branch, residual, dropout_p, seed, states, k, near, weight, norm_weight, norm_bias, norm_source,
    source_eps, partial, out_norm_weight, out_norm_bias, out_eps, out_rms, x, out, source_rstd,
    out_mean, out_rstd,
):  # fmt: skip
    """Stores ``y = residual + dropout(branch)`` in slot k and computes the next layer's input.

    ``x = partial + sum_{j in near} weight[k, j] * z_j`` and ``out = LN(x)``. With ``out_rms`` that
    normalisation subtracts no mean, and ``out_mean`` is None. Where ``branch`` is None, slot k is
    only read: the launch recomputes a layer's input from the states.
    """
    if branch is not None:
        y = dropout(_load(branch), dropout_p, seed)
        y = y if residual is None else y + _load(residual)
        if norm_source:
            y, _, rstd = normalise(y, source_eps)
            source_rstd.copy_(rstd)
        states[k] = y
    mixed = _near(states, near, weight, k, norm_weight, norm_bias, partial)
    _put(x, mixed)
    if out is not None:
        _output(mixed, out_norm_weight, out_norm_bias, out_eps, out_rms, out, out_mean, out_rstd)


def boundary_backward(
    states, k, near, weight, norm_weight, norm_bias, norm_source, partial, out_norm_weight,
    out_norm_bias, out_rms, source_rstd, out_mean, out_rstd, dropout_p, seed, dx, dout, grads,
    grad_slot, pull_rows, pull_slots, pulled, dbranch, dresidual, dweight, dnorm_weight, dnorm_bias,
    dout_norm_weight, dout_norm_bias,
):  # fmt: skip
    """Stores g, the gradient of row k, and computes the gradient of the pushed state.

    ``dz_k = pulled + sum_{l in pull_rows} weight[l, k] * g_l``, and from it, through the state's
    layer-norm and dropout, ``dbranch`` and ``dresidual``.
    """
    g = 0 if dx is None else _load(dx)
    if dout is not None:
        mixed = _near(states, near, weight, k, norm_weight, norm_bias, partial)
        g = g + _output_backward(
            mixed, dout, out_norm_weight, out_rms, out_mean, out_rstd, dout_norm_weight,
            dout_norm_bias,
        )  # fmt: skip
    n = _load(states[k]).clone()
    z = _source(states, k, norm_weight, norm_bias).clone()
    grads[grad_slot] = g
    u = n * 0 if pulled is None else _load(pulled)
    for index, slot_l in zip(pull_rows, pull_slots, strict=True):
        g_l = g if index == k else _load(grads[slot_l])
        u = u + weight[index, k] * g_l
        if dweight is not None:
            dweight[index, k] = (g_l * z).sum(0) if weight.dim() == 3 else (g_l * z).sum()
    _put(dnorm_weight, (u * n).sum(0))
    _put(dnorm_bias, u.sum(0))
    u = u if norm_weight is None else u * norm_weight[k]
    u = _norm_backward(u, n, source_rstd) if norm_source else u
    _put(dresidual, u)
    _put(dbranch, dropout(u, dropout_p, seed))


def _scores(states, j, query, bias, rows, source_rstd):
    """The scores (T,) of state j for each of ``rows``."""
    n = _load(states[j]) * source_rstd[j].unsqueeze(-1)
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
    zero = torch.zeros_like(_load(like))
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
            x, stats = _load(out[b]), None if out_stats is None else out_stats[b]
        for k in sources:
            (score,) = _scores(states, k, query, bias, [row], source_rstd)
            x, stats = _join(x, stats, _load(states[k]), score, kind)
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
        v = _load(states[j])
        total = _load(out[b]) if accumulate else torch.zeros_like(v)
        for slot, row in zip(grad_slots, rows, strict=True):
            total = total + _pull_attention(
                states, j, v, _load(grads[slot]), row, query, bias, kind, source_rstd, stats,
                dquery, dbias,
            )  # fmt: skip
        out[b] = total


def _attend_near(states, near, query, bias, kind, row, source_rstd, partial, partial_stats):
    x, stats = _no_sources(states[0], kind)
    if partial is not None:
        x, stats = _load(partial), partial_stats
    for k in near:
        (score,) = _scores(states, k, query, bias, [row], source_rstd)
        x, stats = _join(x, stats, _load(states[k]), score, kind)
    return x, stats


def attention_boundary_forward(
    branch, residual, dropout_p, seed, states, k, near, query, bias, kind, eps, partial,
    partial_stats, out_norm_weight, out_norm_bias, out_eps, out_rms, x, out, source_rstd, stats,
    out_mean, out_rstd,
):  # fmt: skip
    """`boundary_forward` with the weights of `attend_rows`: ``partial`` is joined to the states of
    ``near``. ``source_rstd[k] = 1 / RMS(z_k)``, and ``stats[k]`` gets the row's statistics."""
    if branch is not None:
        y = dropout(_load(branch), dropout_p, seed)
        states[k] = y if residual is None else y + _load(residual)
        source_rstd[k] = (_load(states[k]).square().mean(-1) + eps).rsqrt()
    mixed, found = _attend_near(
        states, near, query, bias, kind, k, source_rstd, partial, partial_stats
    )
    if found is not None:
        stats[k, :2] = found
    _put(x, mixed)
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
    g = 0 if dx is None else _load(dx)
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
    v = _load(states[k]).clone()
    grads[grad_slot] = g
    g = _load(grads[grad_slot])
    if stats is not None:
        stats[k, 2] = (g * mixed).sum(-1)
    u = torch.zeros_like(v) if pulled is None else _load(pulled)
    for row, slot in zip(pull_rows, pull_slots, strict=True):
        u = u + _pull_attention(
            states, k, v, g if row == k else _load(grads[slot]), row, query, bias, kind,
            source_rstd, stats, dquery, dbias,
        )  # fmt: skip
    _put(dresidual, u)
    _put(dbranch, dropout(u, dropout_p, seed))


def depth_mix_forward(sources, weight, norm_weight, norm_bias, norm, eps, out, mean, rstd):
    """``out = sum_k weight[k] * LN_k(sources[k])`` over separate tensors."""
    total = 0
    for k, source in enumerate(sources):
        n = _load(source)
        if norm:
            n, mean[k], rstd[k] = normalise(n, eps)
        z = _affine(n, _entry(norm_weight, k), _entry(norm_bias, k))
        total = total + weight[k] * z
    out.copy_(total)


def depth_mix_backward(
    sources, weight, norm_weight, norm_bias, norm, mean, rstd, dout, dsources, dweight,
    dnorm_weight, dnorm_bias,
):  # fmt: skip
    """Gradients of depth_mix_forward; ``dsources`` is empty where no source needs one."""
    g = _load(dout)
    for k, source in enumerate(sources):
        n = _load(source)
        if norm:
            n = _normalised(n, mean[k], rstd[k])
        z = _affine(n, _entry(norm_weight, k), _entry(norm_bias, k))
        u = weight[k] * g
        if dweight is not None:
            dweight[k] = (g * z).sum(0) if weight.dim() == 2 else (g * z).sum()
        if dnorm_weight is not None:
            dnorm_weight[k] = (u * n).sum(0)
        if dnorm_bias is not None:
            dnorm_bias[k] = u.sum(0)
        if dsources:
            u = u if norm_weight is None else u * norm_weight[k]
            dsources[k].copy_(_norm_backward(u, n, rstd[k]) if norm else u)


def _depth_scores(sources, query, scores, norm, eps):
    """The sources (K, T, D), the factors of their norms (K, T, 1), and the scores (T, K, H)."""
    v = torch.stack([_load(x) for x in sources])
    r = (v.square().mean(-1, keepdim=True) + eps).rsqrt() if norm else torch.ones_like(v[..., :1])
    return v, r, torch.einsum("ktd,hd->tkh", v * r, query) if scores is None else scores


def depth_attention_forward(sources, query, scores, norm, eps, out, lse, most, total):
    """``out = sum_k softmax_k(s)_k v_k``, (T * H, D): row t * H + h has token t and hop h.

    Also, (T, H) each: ``most``, the largest score, ``total = sum_k exp(s_k - most)`` and
    ``lse = most + log(total)``. With a query (H, D), ``s_kh = query_h . v_k``, where ``norm``
    replaces v_k by RMSNorm(v_k). Without a query s is ``scores``. Where lse, most and total are
    None, the scores are the weights, without a softmax.
    """
    v, _, s = _depth_scores(sources, query, scores, norm, eps)
    p = s if most is None else s.softmax(1)
    out.copy_(torch.einsum("tkh,ktd->thd", p, v).flatten(0, 1))
    if most is None:
        return
    lse.copy_(s.logsumexp(1))
    most.copy_(s.amax(1))
    total.copy_((s - most.unsqueeze(1)).exp().sum(1))


def depth_attention_backward(
    sources, query, scores, norm, eps, out, most, total, dout, dlse, dsources, accumulate, dquery,
    dscores,
):  # fmt: skip
    """Gradients of depth_attention_forward from ``dout`` and, unless it is None, ``dlse``.

    ``dsources`` is empty where no source needs one; with ``accumulate`` the gradients are added to
    what is there. Without a softmax out, most and total are None.
    """
    v, r, s = _depth_scores(sources, query, scores, norm, eps)
    g = _load(dout).unflatten(0, (s.shape[0], s.shape[2]))
    p, ds = s, torch.einsum("thd,ktd->tkh", g, v)
    if most is not None:
        delta = (g * _load(out).unflatten(0, most.shape)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        p = (s - most.unsqueeze(1)).exp() / total.unsqueeze(1)
        ds = p * (ds - delta.unsqueeze(1))
    _put(dscores, ds)
    c = ds * r.transpose(0, 1)
    if dquery is not None:
        dquery.copy_(torch.einsum("tkh,ktd->hd", c, v))
    dv = torch.einsum("tkh,thd->ktd", p, g)
    dv = dv if query is None else dv + torch.einsum("tkh,hd->ktd", c, query)
    if norm:
        dv = dv - v * r.square() * (ds * s).sum(-1).T.unsqueeze(-1) / v.shape[-1]
    for target, d in zip(dsources, dv, strict=False):
        target.copy_(_load(target) + d if accumulate else d)


def attention_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, dropout_p,
    seed, o, lse,
):  # fmt: skip
    """``o = dropout(softmax(scale q k^T)) v`` for every sentence and head; lse (H, T_q)."""
    values = attention(
        _load(q), _load(k), _load(v), cu_seqlens_q, cu_seqlens_k,
        causal=causal, scale=scale, dropout_p=dropout_p, seed=seed,
    )  # fmt: skip
    _put(o, values[0])
    _put(lse, values[1])


def attention_backward(
    q, k, v, o, lse, do, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale,
    dropout_p, seed, dq, dk, dv,
):  # fmt: skip
    """Gradients of attention_forward from that of ``o``."""
    masks = weight_masks(seed, q.shape[0], q.shape[1], max_seqlen_k, dropout_p, _load(q))
    for a, b in sentences(cu_seqlens_q, cu_seqlens_k):
        q_a, k_b, v_b, g = _load(q[a]), _load(k[b]), _load(v[b]), _load(do[a])
        s = scores(q_a, k_b, causal, scale)
        weights = (s - lse[:, a, None]).exp().masked_fill(s == -torch.inf, 0)
        mask = masks[a, :, : s.shape[2]].transpose(0, 1)
        dweights = torch.einsum("mhd,nhd->hmn", g, v_b) * mask
        delta = (g * _load(o[a])).sum(-1).T
        ds = scale * weights * (dweights - delta.unsqueeze(-1))
        dq[a] = torch.einsum("hmn,nhd->mhd", ds, k_b)
        dk[b] = torch.einsum("hmn,mhd->nhd", ds, q_a)
        dv[b] = torch.einsum("hmn,mhd->nhd", weights * mask, g)


def cross_entropy(logits, target, label_smoothing, ignore_index, write_grad, loss, nll):
    """``loss`` and ``nll`` of each row; with ``write_grad`` the gradient overwrites the logits.

    logits (T, V), target (T,) int64, loss and nll (T,) in the compute dtype. The gradient is
    ``softmax - (1 - label_smoothing) * onehot - label_smoothing / V``, 0 where ignored.
    """
    x = _load(logits)
    values = losses(x, target, label_smoothing, ignore_index)
    loss.copy_(values[0])
    nll.copy_(values[1])
    if write_grad:
        counts = (target != ignore_index).unsqueeze(-1)
        d = x.softmax(-1) - label_smoothing / x.shape[1]
        hit = target.unsqueeze(-1).where(counts, 0)
        d.scatter_add_(-1, hit, torch.full_like(d[:, :1], label_smoothing - 1))
        logits.copy_(d.where(counts, 0.0))


def _running(steps, batch, lengths, device):
    """The lengths (``steps`` for every sentence where None), and the indices of the sentences."""
    if lengths is None:
        lengths = torch.full((batch,), steps, device=device)
    return lengths.clamp(0, steps), torch.arange(batch, device=device)


def peephole_lstm_forward(
    f, weight, peephole, h0, c0, lengths, reverse, h, h_last, c_last, c, gates
):
    """``z = f_t + h_{t-1} W`` and the cell of `deepfast.reference.peephole_lstm`, step by step.

    f and gates (T, B, 4H), h and c (T, B, H), c in the compute dtype. c and gates are both given or
    both None. After a sentence's length h, c and gates are 0. h0 and c0 (B, H), or None for zeros.
    """
    length, row = _running(f.shape[0], f.shape[1], lengths, f.device)
    w = _load(weight)
    for out in (h, c, gates):
        if out is not None:
            out.zero_()
    h_last.zero_() if h0 is None else h_last.copy_(h0)
    c_last.zero_() if c0 is None else c_last.copy_(c0)
    for step in range(f.shape[0]):
        at = row[step < length]
        place = position(step, length[at], reverse), at
        new_h, new_c, activations = cell(
            _load(f[place]) + _load(h_last[at]) @ w, c_last[at], peephole
        )
        h_last[at], c_last[at] = new_h.to(h.dtype), new_c
        h[place] = h_last[at]
        if c is not None:
            c[place], gates[place] = new_c, activations.to(f.dtype)


def peephole_lstm_backward(
    dh, dh_last, dc_last, weight, peephole, c0, lengths, reverse, c, gates, df, dh0, dc0, dpeephole
):
    """Gradients of peephole_lstm_forward, except the weight's, ``sum_t h_{t-1}^T df_t``.

    df is 0 after a sentence's length; dh, dh_last and dc_last may be None.
    """
    length, row = _running(df.shape[0], df.shape[1], lengths, df.device)
    w = _load(weight)
    c_zero = c.new_zeros(c.shape[1:]) if c0 is None else c0
    dh_in = torch.zeros_like(c_zero) if dh_last is None else _load(dh_last).clone()
    dc_in = torch.zeros_like(c_zero) if dc_last is None else dc_last.clone()
    df.zero_()
    dpeephole.zero_()
    for step in reversed(range(df.shape[0])):
        at = row[step < length]
        place = position(step, length[at], reverse), at
        before = c[position(step - 1, length[at], reverse), at] if step else c_zero[at]
        value, enter, stay, leave = _load(gates[place]).chunk(4, -1)
        now, d = c[place], dh_in[at] if dh is None else dh_in[at] + _load(dh[place])
        top = now.tanh()
        dpi = d * top * leave * (1 - leave)
        dc = dc_in[at] + d * leave * (1 - top * top) + dpi * peephole[2]
        drho, dphi = dc * value * enter * (1 - enter), dc * before * stay * (1 - stay)
        dz = torch.cat((dc * enter * (1 - value * value), drho, dphi, dpi), -1)
        df[place] = dz.to(df.dtype)
        dpeephole += torch.stack(
            [(drho * before).sum(0), (dphi * before).sum(0), (dpi * now).sum(0)]
        )
        dc_in[at] = dc * stay + drho * peephole[0] + dphi * peephole[1]
        dh_in[at] = dz @ w.T
    _put(dh0, dh_in)
    _put(dc0, dc_in)
