"""Transformer layers and stacks written out in PyTorch."""

import math

import torch
import torch.nn.functional as F

from deepfast.nn.layer_norm import NoNorm
from deepfast.reference import attention_residuals as reference
from deepfast.reference.layer_norm import rms_norm

DIM, HEADS = 12, 3


def shaken(module):
    """Norms, biases and depth weights away from their init, where mistakes cancel."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def norm_of(m, x):
    if isinstance(m, NoNorm):
        return x
    if m.bias is None:
        return F.rms_norm(x, m.weight.shape, m.weight, m.eps)
    return F.layer_norm(x, m.weight.shape, m.weight, m.bias, m.eps)


def attend(m, x, encoded=None, padding=None, causal=False):
    """Multi-head attention written out on (B, S, D)."""
    width = m.dim // m.heads
    if m.cross:
        q = m.query(x)
        k, v = m.key_value(encoded).chunk(2, -1)
    else:
        q, k, v = m.query_key_value(x).split([m.dim, *[m.num_kv_heads * width] * 2], -1)

    def heads(t):
        t = t.unflatten(-1, (-1, width)).transpose(1, 2)
        return t.repeat_interleave(m.heads // t.shape[1], 1)

    q, k, v = heads(q), heads(k), heads(v)
    score = q @ k.transpose(-1, -2) / math.sqrt(width)
    if padding is not None:
        score = score.masked_fill(padding[:, None, None, :], -math.inf)
    if causal:
        later = torch.ones(score.shape[-2:]).triu(1).bool()
        score = score.masked_fill(later, -math.inf)
    left, right = (math.inf if side < 0 else side for side in m.window)
    if not m.cross:
        # Padding takes no place. A finite score keeps what padding gives out of the gradients.
        real = torch.ones(x.shape[:2]) if padding is None else ~padding
        place = real.cumsum(1)
        before = place[:, :, None] - place[:, None]
        unseen = (before > left) | (-before > right)
        score = score.masked_fill(unseen[:, None], -1e30 if padding is not None else -math.inf)
    return m.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


def feed(m, x):
    return m.down(torch.relu(m.up(x)))


def encoder_layer(m, x, n, padding=None, z=1.0):
    """The layer from its input x, with n = LN(x) where the layer's first LN is the stack's."""
    if m.norm == "pre":
        x = x + z * attend(m.attention, n, padding=padding)
        return x + z * feed(m.feed_forward, norm_of(m.feed_forward_norm, x))
    x = norm_of(m.attention_norm, x + z * attend(m.attention, x, padding=padding))
    return norm_of(m.feed_forward_norm, x + z * feed(m.feed_forward, x))


def decoder_layer(m, x, n, encoded, padding=None, encoded_padding=None, z=1.0):
    def own(n):
        return z * attend(m.attention, n, padding=padding, causal=True)

    def cross(n):
        return z * attend(m.cross_attention, n, encoded, encoded_padding)

    if m.norm == "pre":
        x = x + own(n)
        x = x + cross(norm_of(m.cross_attention_norm, x))
        return x + z * feed(m.feed_forward, norm_of(m.feed_forward_norm, x))
    x = norm_of(m.attention_norm, x + own(x))
    x = norm_of(m.cross_attention_norm, x + cross(x))
    return norm_of(m.feed_forward_norm, x + z * feed(m.feed_forward, x))


def sublayers(m, encoded=None):
    """The parts of a pre-norm layer in their order, each from its normalised input to its
    branch."""
    parts = [lambda n: attend(m.attention, n, causal=encoded is not None)]
    if encoded is not None:
        parts.append(lambda n: attend(m.cross_attention, n, encoded))
    return [*parts, lambda n: feed(m.feed_forward, n)]


def attention_row(m, v, row):
    """Row ``row`` of the attention residuals m over what was pushed, by the reference."""
    query = m.query * m.scale if m.norm_weight is None else m.query * m.scale * m.norm_weight
    if m.bias is None and m.window is None:
        if m.block is None:
            return reference.full(v, query, row, m.eps)
        return reference.block(v, query, row, m.reads * m.block, m.eps)
    # Of running sums each block's last is read, of all states those in the window.
    states = []
    for x, running in zip(v[: row + 1], m.running, strict=False):
        states.append(x + states[-1] if running else x)
    if m.bias is None:
        return reference.attend(states[-m.window :], query[row], m.eps)
    total = 0
    for k in m.pattern[row]:
        n, _ = rms_norm(states[k], eps=m.eps)
        total += ((n * query[row]).sum(-1, keepdim=True) + m.bias[row, k]).relu() * states[k]
    return total


def stack_and_sum(connection, x, bodies):
    """The naive loop: every state kept, stacked, normalised and summed at every layer."""
    d, states = connection.depth, [x]
    w = None if d is None else d.effective_weight()

    def mix(row):
        if d is None:
            return states[-1]

        def own_norm(t, k):
            if k == 0 and not d.normalize_embedding:
                return t
            if d.norm_kind == "rms":
                return F.rms_norm(t, (DIM,), d.norm_weight[k], d.eps)
            return F.layer_norm(t, (DIM,), d.norm_weight[k], d.norm_bias[k], d.eps)

        z = [own_norm(s, k) if d.norm == "pre" else s for k, s in enumerate(states)]
        total = (torch.stack(z) * w[row, : row + 1].reshape(row + 1, 1, 1, -1)).sum(0)
        return own_norm(total, row) if d.norm == "post" else total

    for row, body in enumerate(bodies):
        x = mix(row)
        n = norm_of(connection.norms[row], x) if connection.norm == "pre" else x
        states.append(body(x, n))
    x = mix(len(bodies))
    return norm_of(connection.norms[-1], x) if connection.norm == "pre" else x


def naive_encoder(m, x, padding=None, gates=None):
    gates = [1.0] * len(m.layers) if gates is None else gates
    bodies = [
        lambda x, n, f=f, z=z: encoder_layer(f, x, n, padding, z)
        for f, z in zip(m.layers, gates, strict=True)
    ]
    return stack_and_sum(m.connection, x, bodies)


def naive_decoder(m, x, encoded, padding=None, encoded_padding=None, gates=None):
    gates = [1.0] * len(m.layers) if gates is None else gates
    bodies = [
        lambda x, n, f=f, z=z: decoder_layer(f, x, n, encoded, padding, encoded_padding, z)
        for f, z in zip(m.layers, gates, strict=True)
    ]
    return stack_and_sum(m.connection, x, bodies)


def assert_same(got, want, module, inputs, keep=None):
    """Outputs and the gradients of inputs and all parameters."""
    keep = torch.ones(want.shape[:2]).bool() if keep is None else keep
    assert got[~keep].eq(0).all()
    torch.testing.assert_close(got[keep], want[keep], rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(want[keep])
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    a, b = (
        torch.autograd.grad((out[keep] * weight).sum(), leaves, materialize_grads=True)
        for out in (got, want)
    )
    for got, want in zip(a, b, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)
