"""Every kernel launch of the package in plain PyTorch, with the signatures of deepfast._C.

These functions run where nothing is compiled, on any device and dtype, and every backend is tested
against them. They write results into tensors that the caller allocates. There are T tokens and D
channels. States have the storage dtype; weights, statistics and weight gradients have the compute
dtype (fp32, or fp64 for fp64). ``seed`` is a 0-dim int64 tensor, or None without dropout.
"""

import torch

from deepfast.reference.activation import activation, activation_grad
from deepfast.reference.attention import (
    attention,
    grouped,
    scores,
    sentences,
    weight_masks,
)
from deepfast.reference.boundary_launchers import (  # noqa: F401
    attend_pull,
    attend_rows,
    attention_boundary_backward,
    attention_boundary_forward,
    boundary_backward,
    boundary_forward,
    mix_rows,
    pull_rows,
)
from deepfast.reference.dropout import dropout
from deepfast.reference.layer_norm import normalise
from deepfast.reference.linear_cross_entropy import cross_entropy as losses
from deepfast.reference.peephole_lstm import cell, position
from deepfast.reference.rows import affine, entry, load, norm_backward, normalised, put


def layer_norm_forward(x, residual, weight, bias, eps, rms, dropout_p, seed, sum, y, mean, rstd):
    """``sum = residual + dropout(x)``, ``y = LN(sum) * weight + bias``.

    With ``rms`` the normalisation subtracts no mean, and ``mean`` is None.
    """
    s = dropout(load(x), dropout_p, seed)
    s = s if residual is None else s + load(residual)
    if sum is not None:
        sum.copy_(s)
        s = load(sum)
    n, m, r = normalise(s, eps, rms)
    put(mean, m)
    rstd.copy_(r)
    y.copy_(affine(n, weight, bias))


def layer_norm_backward(
    sum, dy, dsum, weight, rms, mean, rstd, dropout_p, seed, dx, dresidual, dweight, dbias
):
    """Gradients of layer_norm_forward from ``dy`` and, unless it is None, ``dsum``."""
    n = normalised(load(sum), mean, rstd)
    g = load(dy)
    put(dweight, (g * n).sum(0))
    put(dbias, g.sum(0))
    ds = norm_backward(affine(g, weight, None), n, rstd, rms)
    ds = ds if dsum is None else ds + load(dsum)
    put(dresidual, ds)
    put(dx, dropout(ds, dropout_p, seed))


def activation_forward(h, bias, kind, dropout_p, seed, out):
    """``out = dropout(act(h + bias))``; ``out`` may be ``h``."""
    out.copy_(activation(h, kind, bias=bias, dropout_p=dropout_p, seed=seed))


def activation_backward(dout, saved, bias, kind, dropout_p, seed, dh, dbias):
    """Gradients of activation_forward. ``saved`` is ``out`` for relu, which needs no bias, and
    ``h`` for gelu; ``dh`` may be ``dout`` or ``saved``."""
    grads = activation_grad(dout, saved, kind, bias=bias, dropout_p=dropout_p, seed=seed)
    dh.copy_(grads[0])
    put(dbias, grads[1])


def depth_mix_forward(sources, weight, norm_weight, norm_bias, norm, eps, out, mean, rstd):
    """``out = sum_k weight[k] * LN_k(sources[k])`` over separate tensors."""
    total = 0
    for k, source in enumerate(sources):
        n = load(source)
        if norm:
            n, mean[k], rstd[k] = normalise(n, eps)
        z = affine(n, entry(norm_weight, k), entry(norm_bias, k))
        total = total + weight[k] * z
    out.copy_(total)


def depth_mix_backward(
    sources, weight, norm_weight, norm_bias, norm, mean, rstd, dout, dsources, dweight,
    dnorm_weight, dnorm_bias,
):  # fmt: skip
    """Gradients of depth_mix_forward; ``dsources`` is empty where no source needs one."""
    g = load(dout)
    for k, source in enumerate(sources):
        n = load(source)
        if norm:
            n = normalised(n, mean[k], rstd[k])
        z = affine(n, entry(norm_weight, k), entry(norm_bias, k))
        u = weight[k] * g
        if dweight is not None:
            dweight[k] = (g * z).sum(0) if weight.dim() == 2 else (g * z).sum()
        if dnorm_weight is not None:
            dnorm_weight[k] = (u * n).sum(0)
        if dnorm_bias is not None:
            dnorm_bias[k] = u.sum(0)
        if dsources:
            u = u if norm_weight is None else u * norm_weight[k]
            dsources[k].copy_(norm_backward(u, n, rstd[k]) if norm else u)


def _depth_scores(sources, query, scores, norm, eps):
    """The sources (K, T, D), the factors of their norms (K, T, 1), and the scores (T, K, H)."""
    v = torch.stack([load(x) for x in sources])
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
    g = load(dout).unflatten(0, (s.shape[0], s.shape[2]))
    p, ds = s, torch.einsum("thd,ktd->tkh", g, v)
    if most is not None:
        delta = (g * load(out).unflatten(0, most.shape)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        p = (s - most.unsqueeze(1)).exp() / total.unsqueeze(1)
        ds = p * (ds - delta.unsqueeze(1))
    put(dscores, ds)
    c = ds * r.transpose(0, 1)
    if dquery is not None:
        dquery.copy_(torch.einsum("tkh,ktd->hd", c, v))
    dv = torch.einsum("tkh,thd->ktd", p, g)
    dv = dv if query is None else dv + torch.einsum("tkh,hd->ktd", c, query)
    if norm:
        dv = dv - v * r.square() * (ds * s).sum(-1).T.unsqueeze(-1) / v.shape[-1]
    for target, d in zip(dsources, dv, strict=False):
        target.copy_(load(target) + d if accumulate else d)


def attention_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right, scale,
    dropout_p, seed, o, lse,
):  # fmt: skip
    """``o = dropout(softmax(scale q k^T)) v`` for every sentence and head; lse (H, T_q)."""
    values = attention(
        load(q), load(k), load(v), cu_seqlens_q, cu_seqlens_k,
        left=left, right=right, scale=scale, dropout_p=dropout_p, seed=seed,
    )  # fmt: skip
    put(o, values[0])
    put(lse, values[1])


def attention_backward(
    q, k, v, o, lse, dout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right,
    scale, dropout_p, seed, dq, dk, dv,
):  # fmt: skip
    """Gradients of attention_forward from that of ``o``."""
    heads, groups = q.shape[1], (k.shape[1], -1)
    masks = weight_masks(seed, q.shape[0], heads, max_seqlen_k, dropout_p, load(q))
    for a, b in sentences(cu_seqlens_q, cu_seqlens_k):
        q_a, g = load(q[a]), load(dout[a])
        k_b, v_b = grouped(load(k[b]), heads), grouped(load(v[b]), heads)
        s = scores(q_a, k_b, left, right, scale)
        weights = (s - lse[:, a, None]).exp().masked_fill(s == -torch.inf, 0)
        mask = masks[a, :, : s.shape[2]].transpose(0, 1)
        dweights = torch.einsum("mhd,nhd->hmn", g, v_b) * mask
        delta = (g * load(o[a])).sum(-1).T
        ds = scale * weights * (dweights - delta.unsqueeze(-1))
        dq[a] = torch.einsum("hmn,nhd->mhd", ds, k_b)
        dk[b] = torch.einsum("hmn,mhd->nhd", ds, q_a).unflatten(1, groups).sum(2)
        dv[b] = torch.einsum("hmn,mhd->nhd", weights * mask, g).unflatten(1, groups).sum(2)


def cross_entropy(logits, target, label_smoothing, ignore_index, write_grad, loss, nll):
    """``loss`` and ``nll`` of each row; with ``write_grad`` the gradient overwrites the logits.

    logits (T, V), target (T,) int64, loss and nll (T,) in the compute dtype. The gradient is
    ``softmax - (1 - label_smoothing) * onehot - label_smoothing / V``, 0 where ignored.
    """
    x = load(logits)
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
    w = load(weight)
    for out in (h, c, gates):
        if out is not None:
            out.zero_()
    h_last.zero_() if h0 is None else h_last.copy_(h0)
    c_last.zero_() if c0 is None else c_last.copy_(c0)
    for step in range(f.shape[0]):
        at = row[step < length]
        place = position(step, length[at], reverse), at
        new_h, new_c, activations = cell(
            load(f[place]) + load(h_last[at]) @ w, c_last[at], peephole
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
    w = load(weight)
    c_zero = c.new_zeros(c.shape[1:]) if c0 is None else c0
    dh_in = torch.zeros_like(c_zero) if dh_last is None else load(dh_last).clone()
    dc_in = torch.zeros_like(c_zero) if dc_last is None else dc_last.clone()
    df.zero_()
    dpeephole.zero_()
    for step in reversed(range(df.shape[0])):
        at = row[step < length]
        place = position(step, length[at], reverse), at
        before = c[position(step - 1, length[at], reverse), at] if step else c_zero[at]
        value, enter, stay, leave = load(gates[place]).chunk(4, -1)
        now, d = c[place], dh_in[at] if dh is None else dh_in[at] + load(dh[place])
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
    put(dh0, dh_in)
    put(dc0, dc_in)
