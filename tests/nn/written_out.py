"""Transformer layers and stacks written out in PyTorch."""

import math

import torch
import torch.nn.functional as F

from deepfast.nn.layer_norm import NoNorm
from tests.specifications.connections import PlainHistory

DIM, HEADS = 12, 3
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()


def shaken(module):
    """Norms, biases and depth weights away from their init, where mistakes cancel."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def norm_of(m, x, eps=None):
    if isinstance(m, NoNorm):
        return x
    eps = m.eps if eps is None else eps
    if m.bias is None:
        return F.rms_norm(x, m.weight.shape, m.weight, eps)
    return F.layer_norm(x, m.weight.shape, m.weight, m.bias, eps)


def attend(m, x, encoded=None, padding=None, causal=False):
    """Multi-head attention written out on (B, S, D)."""
    width = m.dim // m.num_heads
    if m.cross:
        q = m.query(x)
        k, v = m.key_value(encoded).chunk(2, -1)
    else:
        shares = [m.num_kv_heads * width] * 2
        q, k, v = m.query_key_value(x).split([m.dim, *shares], -1)

    def heads(t):
        t = t.unflatten(-1, (-1, width)).transpose(1, 2)
        return t.repeat_interleave(m.num_heads // t.shape[1], 1)

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
        real = torch.ones(k.shape[0], k.shape[2]) if padding is None else ~padding
        place = real.cumsum(1)
        before = place[:, :, None] - place[:, None]
        unseen = (before > left) | (-before > right)
        score = score.masked_fill(unseen[:, None], -1e30 if padding is not None else -math.inf)
    return m.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


def sublayers(m, encoded=None, padding=None, encoded_padding=None, z=1.0):
    """A layer's parts in their order: the norm of each, and the branch, scaled by the gate z."""
    causal = encoded is not None
    found = [
        (m.attention_norm, lambda n: z * attend(m.attention, n, padding=padding, causal=causal))
    ]
    if encoded is not None:
        cross = m.cross_attention
        found.append(
            (m.cross_attention_norm, lambda n: z * attend(cross, n, encoded, encoded_padding))
        )
    return [*found, (m.feed_forward_norm, lambda n: z * feed_forward(m.feed_forward, n))]


def feed_forward(m, n):
    hidden = m.up(n)
    if m.activation == "swiglu":
        gate, hidden = hidden.chunk(2, -1)
        return m.down(F.silu(gate) * hidden)
    return m.down(F.relu(hidden) if m.activation == "relu" else F.gelu(hidden))


def layer(m, x, n, *given, alpha=1, eps=None):
    """The layer from its input x, with n = LN(x) where the layer's first LN is the stack's.

    ``given`` is what `sublayers` takes. DeepNorm has an ``alpha``, and norms with this eps.
    """
    for part, (norm, branch) in enumerate(sublayers(m, *given)):
        if m.norm == "post":
            x = norm_of(norm, alpha * x + branch(x), eps)
        else:
            x = x + branch(n if part == 0 else norm_of(norm, x))
    return x


def naive(m, x, encoded=None, padding=None, encoded_padding=None, gates=None, inputs=None):
    """An encoder, or with ``encoded`` a decoder: every state kept, and summed at every layer.

    ``inputs`` is a list to append to what the layers, or the sublayers that read, have read.
    """
    c, given = m.connection, (encoded, padding, encoded_padding)
    gates = [1.0] * len(m.layers) if gates is None else gates
    bodies = [
        lambda x, n, f=f, z=z: layer(f, x, n, *given, z)
        for f, z in zip(m.layers, gates, strict=True)
    ]
    attends = "attnres" in c.kind
    if attends and c.reads > 1:
        parts = [part for f in m.layers for part in sublayers(f, *given)]
        bodies = [lambda x, n, f=branch: x + f(n) for _, branch in parts]
    history = None if c.depth is None else PlainHistory(c.depth)
    for row in range(len(bodies) + 1):
        x = x if history is None else history.push(x)
        if inputs is not None:
            inputs.append(x)
        n = norm_of(c.norms[row], x) if c.norm == "pre" else x
        if row < len(bodies):
            y = bodies[row](x, n)
            x = y - x if attends else y
    return n


def outcome(run, x, module, *others, **options):
    """The result, and the gradients of x, of other inputs and of what the module learns."""
    out = run(x, *others)
    leaves = [x, *others, *(p for p in module.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum(), leaves, **options)]


def assert_same(got, want, module, inputs, keep=None):
    """Outputs and the gradients of inputs and all parameters."""
    exact = want.dtype == torch.float64
    outputs, gradients = ({} if exact else {"rtol": rtol, "atol": 1e-5} for rtol in (1e-4, 1e-3))
    keep = torch.ones(want.shape[:2]).bool() if keep is None else keep
    assert got[~keep].eq(0).all()
    torch.testing.assert_close(got[keep], want[keep], **outputs)
    weight = torch.randn_like(want[keep])
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    a, b = (
        torch.autograd.grad((out[keep] * weight).sum(), leaves, materialize_grads=True)
        for out in (got, want)
    )
    torch.testing.assert_close(a, b, **gradients)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)
