"""Transformer layers and stacks written out in PyTorch, and what tests compare with them."""

import math

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast.nn.layer_norm import NoNorm
from tests.specifications.connections import PlainHistory

DIM, HEADS = 12, 3
# The last sentence is empty.
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [1], [0]])
HIDDEN = -1e30
"""The score of a token that is not seen. A finite one gives empty sentences no NaN."""


def shaken(module):
    """Norms, biases and depth weights away from their init, where mistakes cancel."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def norm_of(m, x, scale=1.0):
    """scale: of its eps."""
    if isinstance(m, NoNorm):
        return x
    if m.bias is None:
        return F.rms_norm(x, m.weight.shape, m.weight, m.eps * scale)
    return F.layer_norm(x, m.weight.shape, m.weight, m.bias, m.eps * scale)


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
        score = score.masked_fill(padding[:, None, None, :], HIDDEN)
    if causal:
        later = torch.ones(score.shape[-2:]).triu(1).bool()
        score = score.masked_fill(later, -math.inf)
    left, right = (math.inf if side < 0 else side for side in m.window)
    if not m.cross:
        # Padding takes no place.
        real = torch.ones(k.shape[0], k.shape[2]) if padding is None else ~padding
        place = real.cumsum(1)
        before = place[:, :, None] - place[:, None]
        score = score.masked_fill(((before > left) | (-before > right))[:, None], HIDDEN)
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


def layer(m, x, n, *given, alpha=1):
    """The layer from its input x, with n = LN(x) where the layer's first LN is the stack's.

    ``given`` is what `sublayers` takes. alpha: of DeepNorm, whose norms have eps / alpha^2.
    """
    for part, (norm, branch) in enumerate(sublayers(m, *given)):
        if m.norm == "post":
            x = norm_of(norm, alpha * x + branch(x), alpha**2)
        else:
            x = x + branch(n if part == 0 else norm_of(norm, x))
    return x


def naive(m, x, encoded=None, padding=None, encoded_padding=None, gates=None, inputs=None):
    """An encoder, or with ``encoded`` a decoder: every state kept, and summed at every layer.

    ``encoded`` may be a list with one output for each layer. ``inputs`` is a list to append to what
    the layers, or the sublayers that read, have read.
    """
    c, count = m.connection, len(m.layers)
    each = encoded if isinstance(encoded, list) else [encoded] * count
    gates = [1.0] * count if gates is None else gates
    given = [(one, padding, encoded_padding, z) for one, z in zip(each, gates, strict=True)]
    bodies = [
        lambda x, n, f=f, own=own: layer(f, x, n, *own, alpha=m.alpha)
        for f, own in zip(m.layers, given, strict=True)
    ]
    attends = "attnres" in c.kind
    if attends and c.reads > 1:
        parts = [
            part for f, own in zip(m.layers, given, strict=True) for part in sublayers(f, *own)
        ]
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
    # The inputs may be results that both forms read.
    options = {"materialize_grads": True, "retain_graph": True}
    a, b = (torch.autograd.grad((y[keep] * weight).sum(), leaves, **options) for y in (got, want))
    torch.testing.assert_close(a, b, **gradients)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


class Seen(TorchDispatchMode):
    """Collects the names of operations."""

    # Eager code calls the ops inside deepfast's own.
    sees_through = True

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))
