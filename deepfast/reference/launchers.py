"""Every kernel launch of the package in plain PyTorch.

Each function takes the operands as one record, whose fields `deepfast.launches` lists. These
functions run where nothing is compiled, on any device and dtype, and every backend is tested
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
    affine,
    attend_pull,
    attend_rows,
    attention_boundary_backward,
    attention_boundary_forward,
    boundary_backward,
    boundary_forward,
    entry,
    load,
    mix_rows,
    norm_backward,
    normalised,
    pull_rows,
    put,
)
from deepfast.reference.dropout import dropout
from deepfast.reference.layer_norm import normalise
from deepfast.reference.linear_cross_entropy import cross_entropy as losses
from deepfast.reference.peephole_lstm import cell, position


def layer_norm_forward(a):
    """``sum = residual + dropout(x)``, ``y = LN(sum) * weight + bias``.

    With ``rms`` the normalisation subtracts no mean, and ``mean`` is None.
    """
    s = dropout(load(a.x), a.dropout_p, a.seed)
    s = s if a.residual is None else s + load(a.residual)
    if a.sum is not None:
        a.sum.copy_(s)
        s = load(a.sum)
    n, m, r = normalise(s, a.eps, a.rms)
    put(a.mean, m)
    a.rstd.copy_(r)
    a.y.copy_(affine(n, a.weight, a.bias))


def layer_norm_backward(a):
    """Gradients of layer_norm_forward from ``dy`` and, unless it is None, ``dsum``."""
    n = normalised(load(a.sum), a.mean, a.rstd)
    g = load(a.dy)
    put(a.dweight, (g * n).sum(0))
    put(a.dbias, g.sum(0))
    ds = norm_backward(affine(g, a.weight, None), n, a.rstd, a.rms)
    ds = ds if a.dsum is None else ds + load(a.dsum)
    put(a.dresidual, ds)
    put(a.dx, dropout(ds, a.dropout_p, a.seed))


def activation_forward(a):
    """``out = dropout(act(h + bias))``; ``out`` may be ``h``."""
    a.out.copy_(activation(a.h, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed))


def activation_backward(a):
    """Gradients of activation_forward. ``saved`` is ``out`` for relu, which needs no bias, and
    ``h`` for gelu; ``dh`` may be ``dout`` or ``saved``."""
    grads = activation_grad(
        a.dout, a.saved, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed
    )
    a.dh.copy_(grads[0])
    put(a.dbias, grads[1])


def depth_mix_forward(a):
    """``out = sum_k weight[k] * LN_k(sources[k])`` over separate tensors."""
    total = 0
    for k, source in enumerate(a.sources):
        n = load(source)
        if a.norm:
            n, a.mean[k], a.rstd[k] = normalise(n, a.eps)
        z = affine(n, entry(a.norm_weight, k), entry(a.norm_bias, k))
        total = total + a.weight[k] * z
    a.out.copy_(total)


def depth_mix_backward(a):
    """Gradients of depth_mix_forward; ``dsources`` is empty where no source needs one."""
    g = load(a.dout)
    for k, source in enumerate(a.sources):
        n = load(source)
        if a.norm:
            n = normalised(n, a.mean[k], a.rstd[k])
        z = affine(n, entry(a.norm_weight, k), entry(a.norm_bias, k))
        u = a.weight[k] * g
        if a.dweight is not None:
            a.dweight[k] = (g * z).sum(0) if a.weight.dim() == 2 else (g * z).sum()
        if a.dnorm_weight is not None:
            a.dnorm_weight[k] = (u * n).sum(0)
        if a.dnorm_bias is not None:
            a.dnorm_bias[k] = u.sum(0)
        if a.dsources:
            u = u if a.norm_weight is None else u * a.norm_weight[k]
            a.dsources[k].copy_(norm_backward(u, n, a.rstd[k]) if a.norm else u)


def _depth_scores(a):
    """The sources (K, T, D), the factors of their norms (K, T, 1), and the scores (T, K, H)."""
    v = torch.stack([load(x) for x in a.sources])
    r = torch.ones_like(v[..., :1])
    r = (v.square().mean(-1, keepdim=True) + a.eps).rsqrt() if a.norm else r
    return v, r, torch.einsum("ktd,hd->tkh", v * r, a.query) if a.scores is None else a.scores


def depth_attention_forward(a):
    """``out = sum_k softmax_k(s)_k v_k``, (T * H, D): row t * H + h has token t and hop h.

    Also, (T, H) each: ``most``, the largest score, ``total = sum_k exp(s_k - most)`` and
    ``lse = most + log(total)``. With a query (H, D), ``s_kh = query_h . v_k``, where ``norm``
    replaces v_k by RMSNorm(v_k). Without a query s is ``scores``. Where lse, most and total are
    None, the scores are the weights, without a softmax.
    """
    v, _, s = _depth_scores(a)
    p = s if a.most is None else s.softmax(1)
    a.out.copy_(torch.einsum("tkh,ktd->thd", p, v).flatten(0, 1))
    if a.most is None:
        return
    a.lse.copy_(s.logsumexp(1))
    a.most.copy_(s.amax(1))
    a.total.copy_((s - a.most.unsqueeze(1)).exp().sum(1))


def depth_attention_backward(a):
    """Gradients of depth_attention_forward from ``dout`` and, unless it is None, ``dlse``.

    ``dsources`` is empty where no source needs one; with ``accumulate`` the gradients are added to
    what is there. Without a softmax out, most and total are None.
    """
    v, r, s = _depth_scores(a)
    g = load(a.dout).unflatten(0, (s.shape[0], s.shape[2]))
    p, ds = s, torch.einsum("thd,ktd->tkh", g, v)
    if a.most is not None:
        delta = (g * load(a.out).unflatten(0, a.most.shape)).sum(-1)
        delta = delta if a.dlse is None else delta - a.dlse
        p = (s - a.most.unsqueeze(1)).exp() / a.total.unsqueeze(1)
        ds = p * (ds - delta.unsqueeze(1))
    put(a.dscores, ds)
    c = ds * r.transpose(0, 1)
    if a.dquery is not None:
        a.dquery.copy_(torch.einsum("tkh,ktd->hd", c, v))
    dv = torch.einsum("tkh,thd->ktd", p, g)
    dv = dv if a.query is None else dv + torch.einsum("tkh,hd->ktd", c, a.query)
    if a.norm:
        dv = dv - v * r.square() * (ds * s).sum(-1).T.unsqueeze(-1) / v.shape[-1]
    for target, d in zip(a.dsources, dv, strict=False):
        target.copy_(load(target) + d if a.accumulate else d)


def attention_forward(a):
    """``o = dropout(softmax(scale q k^T)) v`` for every sentence and head; lse (H, T_q)."""
    values = attention(
        load(a.q), load(a.k), load(a.v), a.cu_seqlens_q, a.cu_seqlens_k,
        left=a.left, right=a.right, scale=a.scale, dropout_p=a.dropout_p, seed=a.seed,
    )  # fmt: skip
    put(a.o, values[0])
    put(a.lse, values[1])


def attention_backward(a):
    """Gradients of attention_forward from that of ``o``."""
    heads, groups = a.q.shape[1], (a.k.shape[1], -1)
    masks = weight_masks(a.seed, a.q.shape[0], heads, a.max_seqlen_k, a.dropout_p, load(a.q))
    for rows, keys in sentences(a.cu_seqlens_q, a.cu_seqlens_k):
        q_a, g = load(a.q[rows]), load(a.dout[rows])
        k_b, v_b = grouped(load(a.k[keys]), heads), grouped(load(a.v[keys]), heads)
        s = scores(q_a, k_b, a.left, a.right, a.scale)
        weights = (s - a.lse[:, rows, None]).exp().masked_fill(s == -torch.inf, 0)
        mask = masks[rows, :, : s.shape[2]].transpose(0, 1)
        dweights = torch.einsum("mhd,nhd->hmn", g, v_b) * mask
        delta = (g * load(a.o[rows])).sum(-1).T
        ds = a.scale * weights * (dweights - delta.unsqueeze(-1))
        a.dq[rows] = torch.einsum("hmn,nhd->mhd", ds, k_b)
        a.dk[keys] = torch.einsum("hmn,mhd->nhd", ds, q_a).unflatten(1, groups).sum(2)
        a.dv[keys] = torch.einsum("hmn,mhd->nhd", weights * mask, g).unflatten(1, groups).sum(2)


def cross_entropy(a):
    """``loss`` and ``nll`` of each row; with ``write_grad`` the gradient overwrites the logits.

    logits (T, V), target (T,) int64, loss and nll (T,) in the compute dtype. The gradient is
    ``softmax - (1 - label_smoothing) * onehot - label_smoothing / V``, 0 where ignored.
    """
    x = load(a.logits)
    values = losses(x, a.target, a.label_smoothing, a.ignore_index)
    a.loss.copy_(values[0])
    a.nll.copy_(values[1])
    if a.write_grad:
        counts = (a.target != a.ignore_index).unsqueeze(-1)
        d = x.softmax(-1) - a.label_smoothing / x.shape[1]
        hit = a.target.unsqueeze(-1).where(counts, 0)
        d.scatter_add_(-1, hit, torch.full_like(d[:, :1], a.label_smoothing - 1))
        a.logits.copy_(d.where(counts, 0.0))


def _running(steps, batch, lengths, device):
    """The lengths (``steps`` for every sentence where None), and the indices of the sentences."""
    if lengths is None:
        lengths = torch.full((batch,), steps, device=device)
    return lengths.clamp(0, steps), torch.arange(batch, device=device)


def peephole_lstm_forward(a):
    """``z = f_t + h_{t-1} W`` and the cell of `deepfast.reference.peephole_lstm`, step by step.

    f and gates (T, B, 4H), h and c (T, B, H), c in the compute dtype. c and gates are both given or
    both None. After a sentence's length h, c and gates are 0. h0 and c0 (B, H), or None for zeros.
    """
    length, row = _running(a.f.shape[0], a.f.shape[1], a.lengths, a.f.device)
    w = load(a.weight)
    for out in (a.h, a.c, a.gates):
        if out is not None:
            out.zero_()
    a.h_last.zero_() if a.h0 is None else a.h_last.copy_(a.h0)
    a.c_last.zero_() if a.c0 is None else a.c_last.copy_(a.c0)
    for step in range(a.f.shape[0]):
        at = row[step < length]
        place = position(step, length[at], a.reverse), at
        new_h, new_c, activations = cell(
            load(a.f[place]) + load(a.h_last[at]) @ w, a.c_last[at], a.peephole
        )
        a.h_last[at], a.c_last[at] = new_h.to(a.h.dtype), new_c
        a.h[place] = a.h_last[at]
        if a.c is not None:
            a.c[place], a.gates[place] = new_c, activations.to(a.f.dtype)


def peephole_lstm_backward(a):
    """Gradients of peephole_lstm_forward, except the weight's, ``sum_t h_{t-1}^T df_t``.

    df is 0 after a sentence's length; dh, dh_last and dc_last may be None.
    """
    length, row = _running(a.df.shape[0], a.df.shape[1], a.lengths, a.df.device)
    w = load(a.weight)
    c_zero = a.c.new_zeros(a.c.shape[1:]) if a.c0 is None else a.c0
    dh_in = torch.zeros_like(c_zero) if a.dh_last is None else load(a.dh_last).clone()
    dc_in = torch.zeros_like(c_zero) if a.dc_last is None else a.dc_last.clone()
    a.df.zero_()
    a.dpeephole.zero_()
    for step in reversed(range(a.df.shape[0])):
        at = row[step < length]
        place = position(step, length[at], a.reverse), at
        before = a.c[position(step - 1, length[at], a.reverse), at] if step else c_zero[at]
        value, enter, stay, leave = load(a.gates[place]).chunk(4, -1)
        now, d = a.c[place], dh_in[at] if a.dh is None else dh_in[at] + load(a.dh[place])
        top = now.tanh()
        dpi = d * top * leave * (1 - leave)
        dc = dc_in[at] + d * leave * (1 - top * top) + dpi * a.peephole[2]
        drho, dphi = dc * value * enter * (1 - enter), dc * before * stay * (1 - stay)
        dz = torch.cat((dc * enter * (1 - value * value), drho, dphi, dpi), -1)
        a.df[place] = dz.to(a.df.dtype)
        a.dpeephole.add_(
            torch.stack([(drho * before).sum(0), (dphi * before).sum(0), (dpi * now).sum(0)])
        )
        dc_in[at] = dc * stay + drho * a.peephole[0] + dphi * a.peephole[1]
        dh_in[at] = dz @ w.T
    put(a.dh0, dh_in)
    put(a.dc0, dc_in)
