"""Multi-layer representation fusion against the paper's formulas written out."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import FUSIONS, WITH_ATTENTION
from tests.nn.written_out import assert_same, norm_of, shaken

STATES, DIM, HOPS = 3, 6, 2
SIZES = {"hops": HOPS, "attention_dim": 7, "hidden_dim": 5}


def fusion(kind, **options):
    return shaken(LayerFusion(STATES, DIM, kind, **SIZES | options)).double()


def states():
    return [torch.randn(5, DIM, dtype=torch.float64, requires_grad=True) for _ in range(STATES)]


def written_out(m, z, embedding=None, word_embedding=True, hops=HOPS):
    """The paper's formulas on all states at once; and the weights (L + 1, T, hops or D)."""
    e = m.layer_embedding if embedding is None else embedding[:STATES]
    e = torch.zeros(STATES, DIM).double() if e is None else e
    if not word_embedding:
        z, e = z[1:], e[1:]
    if m.source_norms is not None:
        z = [*(norm_of(n, x) for n, x in zip(m.source_norms, z[:-1], strict=True)), z[-1]]
    tilde, weights = torch.stack(z) + e[:, None], None
    if m.fusion_type in WITH_ATTENTION:
        w1 = torch.stack([w.weight for w in m.w1]).expand(len(z), -1, -1)
        hidden = getattr(torch, m.activation)(torch.einsum("ltd,lad->lta", tilde, w1))
        weights = F.linear(hidden, m.w2.weight).softmax(0)
    if m.fusion_type == "average":
        parts = tilde.mean(0)
    elif m.fusion_type == "feed_forward":
        parts = tilde.transpose(0, 1)
    elif m.fusion_type == "attention":
        parts = torch.einsum("lth,ltd->thd", weights, tilde)
    else:
        parts = (weights.unflatten(-1, (-1, DIM)) * tilde.unsqueeze(2)).sum(0)
    y = parts.flatten(1)
    if m.fusion_type != "average" and hops is not None:
        y = F.linear(F.linear(y, m.up.weight, m.up.bias).relu(), m.down.weight, m.down.bias)
    return norm_of(m.norm, y), weights


# The rows of the paper's table 4, on embeddings of words and of layers, with and without norms.
OPTIONS = [
    (kind, {"word_embedding": word, "layer_embeddings": layer, "source_norm": word == layer})
    for kind in FUSIONS
    for word, layer in itertools.product((False, True), repeat=2)
]
OPTIONS += [
    (kind, options)
    for kind in WITH_ATTENTION
    for options in ({"shared": False}, {"activation": "relu"}, {"hops": 1})
]
# Channels without hops have no feed-forward layer.
OPTIONS += [("channel_attention", {"hops": None})]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_is_the_paper(kind, options, backend):
    m, z = fusion(kind, backend=backend, **options), states()
    has = options.get("layer_embeddings", kind in WITH_ATTENTION)
    assert (m.layer_embedding is not None) == has
    given = {"word_embedding": options.get("word_embedding", True)}
    want, weights = written_out(m, z, hops=options.get("hops", HOPS), **given)
    assert_same(m(z), want, m, z)
    if kind in WITH_ATTENTION:
        y, shares = m(z, return_attention=True)
        assert torch.equal(y, m(z))
        left_out = STATES - len(weights)
        torch.testing.assert_close(shares[..., left_out:], weights.movedim(0, -1))
        assert not shares[..., :left_out].any()
    if not given["word_embedding"]:
        z[0] = torch.full_like(z[0], torch.nan)
        assert m(z).isfinite().all()


@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_an_embedding_of_others(kind):
    """Two stacks share it, and the other stack is deeper."""
    m, z = fusion(kind, own_embedding=False), states()
    assert "layer_embedding" not in dict(m.named_parameters())
    e = torch.randn(STATES + 2, DIM, dtype=torch.float64, requires_grad=True)
    assert_same(m(z, e), written_out(m, z, e)[0], m, [*z, e])


def test_no_stack_of_states_is_made(meter):
    """Attention keeps one state for each hop, and the tensors for its scores. The embeddings of
    layers begin small."""
    m = LayerFusion(30, 64, hops=1, attention_dim=4, hidden_dim=8)
    z = [torch.randn(500, 64) for _ in range(30)]
    with torch.no_grad(), meter() as used:
        m(z)
    assert used.peak < 8 * z[0].nbytes
    assert -0.1 <= m.layer_embedding.min() < -0.099
    assert 0.099 < m.layer_embedding.max() <= 0.1


def test_autocast():
    m, z = LayerFusion(STATES, DIM, **SIZES), [x.detach().float() for x in states()]
    z = [x.requires_grad_() for x in z]
    with torch.autocast("cpu", torch.bfloat16):
        y = m(z)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), m(z), rtol=0.1, atol=0.1)
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in m.parameters())
