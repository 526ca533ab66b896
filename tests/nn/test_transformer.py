"""Transformer layers and stacks against the same written out in PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.nn import (
    DecoderCache,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.nn.written_out import (
    DIM,
    HEADS,
    assert_same,
    decoder_layer,
    encoder_layer,
    leaf,
    naive_decoder,
    naive_encoder,
    norm_of,
    shaken,
)

FFN, LAYERS = 20, 4
NORMS = pytest.mark.parametrize("norm", ["pre", "post"])
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()

OPTIONS = [
    {"connection": "residual"},
    {"connection": "residual", "norm_kind": "rms"},
    {"dlcl": {"window": 3}, "norm_kind": "rms"},
    {"dlcl": {"norm_kind": "layer"}, "norm_kind": "rms"},
    {"dlcl": {}},
    {"dlcl": {"weight": "vector", "init": "one"}},
    {"dlcl": {"weight": "group", "groups": 5, "window": 3, "normalize_embedding": True}},
    {"dlcl": {"softmax": True, "learnable": False}},
]


# ---- one layer alone -----------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("padding", [None, PADDING])
def test_encoder_layer_alone(backend, norm, padding):
    m = shaken(TransformerEncoderLayer(DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend))
    x = leaf(3, 5, DIM)
    n = norm_of(m.attention_norm, x) if norm == "pre" else x
    keep = None if padding is None else ~padding
    assert_same(m(x, padding), encoder_layer(m, x, n, padding), m, [x], keep)


@NORMS
@pytest.mark.parametrize("padding", [None, PADDING])
def test_decoder_layer_alone(backend, norm, padding):
    m = shaken(TransformerDecoderLayer(DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend))
    x, encoded = leaf(3, 5, DIM), leaf(3, 7, DIM)
    encoded_padding = None if padding is None else F.pad(padding, (2, 0))
    n = norm_of(m.attention_norm, x) if norm == "pre" else x
    want = decoder_layer(m, x, n, encoded, padding, encoded_padding)
    keep = None if padding is None else ~padding
    assert_same(m(x, encoded, padding, encoded_padding), want, m, [x, encoded], keep)


# ---- stacks --------------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("padding", [None, PADDING])
def test_encoder_equals_the_naive_loop(backend, norm, options, padding):
    m = TransformerEncoder(
        LAYERS, DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend, **options
    )
    shaken(m)
    x = leaf(3, 5, DIM)
    keep = None if padding is None else ~padding
    assert_same(m(x, padding), naive_encoder(m, x, padding), m, [x], keep)


@NORMS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoder_equals_the_naive_loop(backend, norm, options):
    m = TransformerDecoder(
        LAYERS, DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend, **options
    )
    shaken(m)
    x, encoded = leaf(3, 5, DIM), leaf(3, 7, DIM)
    encoded_padding = F.pad(PADDING, (2, 0))
    want = naive_decoder(m, x, encoded, PADDING, encoded_padding)
    got = m(x, encoded, PADDING, encoded_padding)
    assert_same(got, want, m, [x, encoded], ~PADDING)


def test_which_backend_runs(ran, backend):
    m = TransformerEncoder(2, DIM, HEADS, FFN, backend=backend)
    with backends.record() as seen:
        m(torch.randn(2, 3, DIM)).sum().backward()
    assert set(seen) == {
        (op, backend) for op in ("layer_norm", "activation", "boundary", "attention")
    }


def test_identity_weights_equal_the_plain_stack(backend):
    """Where the mathematics allows: post-norm's W = I is LN of each layer's own output, so with
    norms of index l taken over; pre-norm mixes normalised states, so without its norms."""
    frozen = {"init": "identity", "learnable": False}
    plain = TransformerEncoder(
        LAYERS, DIM, HEADS, FFN, connection="residual", dropout=0.0, backend=backend
    )
    shaken(plain)
    mixed = TransformerEncoder(LAYERS, DIM, HEADS, FFN, dropout=0.0, dlcl=frozen, backend=backend)
    mixed.load_state_dict(plain.state_dict(), strict=False)
    x = leaf(2, 5, DIM)
    # The mixed stack normalises every state: it equals the plain one whose layers see LN(y).
    states = [x]
    for f, norm in zip(plain.layers, plain.connection.norms, strict=False):
        inner = states[-1] if len(states) == 1 else F.layer_norm(states[-1], (DIM,))
        states.append(encoder_layer(f, inner, norm_of(norm, inner)))
    want = norm_of(plain.connection.norms[-1], F.layer_norm(states[-1], (DIM,)))
    torch.testing.assert_close(mixed(x), want, rtol=1e-4, atol=1e-5)
    # Without DLCL's own norms it is the plain stack itself.
    mixed.connection.dlcl = type(mixed.connection.dlcl)(
        LAYERS, DIM, norm=None, backend=backend, **frozen
    )
    torch.testing.assert_close(mixed(x), plain(x), rtol=1e-4, atol=1e-5)


@NORMS
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_a_padded_batch_equals_each_sentence_alone(backend, norm, connection):
    encoder, decoder = (
        shaken(kind(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection, backend=backend))
        for kind in (TransformerEncoder, TransformerDecoder)
    )
    encoder.eval()
    decoder.eval()
    x, y = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    encoded = encoder(x, PADDING)
    out = decoder(y, encoded, PADDING, PADDING)
    for i, length in enumerate((~PADDING).sum(1).tolist()):
        alone = encoder(x[i : i + 1, :length])
        torch.testing.assert_close(encoded[i : i + 1, :length], alone, rtol=1e-4, atol=1e-5)
        alone = decoder(y[i : i + 1, :length], alone)
        torch.testing.assert_close(out[i : i + 1, :length], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("connection", ["dlcl", "residual"])
@NORMS
def test_what_stands_at_padding_does_not_matter(norm, connection):
    m = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection).eval()
    x = torch.randn(3, 5, DIM)
    bad = x.masked_fill(PADDING.unsqueeze(-1), math.nan).requires_grad_()
    out = m(bad, PADDING)
    assert torch.equal(out, m(x, PADDING))
    out.square().sum().backward()
    assert torch.isfinite(bad.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters() if p.grad is not None)


def test_an_empty_sentence_in_the_batch():
    encoder = TransformerEncoder(2, DIM, HEADS, FFN).eval()
    padding = torch.tensor([[0, 0, 0], [1, 1, 1]]).bool()
    x = leaf(2, 3, DIM)
    out = encoder(x, padding)
    assert torch.equal(out[1], torch.zeros(3, DIM))
    torch.testing.assert_close(out[:1], encoder(x[:1]), rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in encoder.parameters())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@NORMS
def test_no_tokens(backend, norm, shape):
    m = TransformerEncoder(2, DIM, HEADS, FFN, norm=norm, backend=backend)
    x = leaf(*shape, DIM)
    out = m(x)
    assert out.shape == x.shape
    out.sum().backward()


def test_all_padding(backend):
    m = TransformerEncoder(2, DIM, HEADS, FFN, backend=backend)
    x = leaf(2, 3, DIM)
    out = m(x, torch.ones(2, 3).bool())
    assert out.eq(0).all()
    out.sum().backward()
    assert x.grad.eq(0).all()


# ---- training ------------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_every_parameter_gets_a_gradient(norm, connection):
    encoder = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection)
    decoder = TransformerDecoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection)
    encoded = encoder(torch.randn(3, 5, DIM))
    decoder(torch.randn(3, 4, DIM), encoded).square().sum().backward()
    for module in (encoder, decoder):
        for name, p in module.named_parameters():
            assert p.grad is not None, name
            assert torch.isfinite(p.grad).all(), name
            # Index 0 has no norm by default, and keys' biases cancel in the softmax.
            if "dlcl" not in name and "query_key_value.bias" not in name:
                assert p.grad.abs().sum() > 0, name


@NORMS
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_dropout_follows_mode_and_seed(norm, connection):
    m = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection, dropout=0.5)
    x = torch.randn(2, 5, DIM)

    def seeded():
        torch.manual_seed(1)
        return m(x)

    assert torch.equal(seeded(), seeded())
    assert not torch.equal(seeded(), m(x))
    m.eval()
    assert torch.equal(m(x), m(x))


@NORMS
def test_dropout_of_branches_is_where_it_should_be(norm):
    """With every branch dropped a pre-norm layer is the identity on its residual stream."""
    m = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection="residual", dropout=1.0)
    x = torch.randn(2, 5, DIM)
    want = F.layer_norm(x, (DIM,))
    torch.testing.assert_close(m(x), want, rtol=1e-3, atol=1e-4)


def test_activation_and_attention_dropout_follow_the_mode():
    for name in ("attention_dropout", "activation_dropout"):
        m = TransformerEncoder(2, DIM, HEADS, FFN, dropout=0.0, **{name: 0.5})
        x = torch.randn(2, 5, DIM)
        assert not torch.equal(m(x), m(x)), name
        m.eval()
        assert torch.equal(m(x), m(x)), name


@NORMS
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_autocast(monkeypatch, norm, connection):
    from deepfast.nn.connections import dlcl as module

    made = []
    plain = module.DepthHistory
    monkeypatch.setattr(module, "DepthHistory", lambda: made.append(plain()) or made[-1])
    m = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection, dropout=0.0)
    x = leaf(2, 5, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x)
    assert out.dtype == torch.bfloat16
    if connection == "dlcl":
        assert made[0].state.states.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), m(x), rtol=0.1, atol=0.1)
    out.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in m.parameters())


def test_a_step_learns():
    m = TransformerEncoder(6, DIM, HEADS, FFN)
    optimizer = torch.optim.Adam(m.parameters(), 1e-2)
    x, target = torch.randn(2, 4, 5, DIM).unbind()
    losses = []
    for _ in range(15):
        loss = F.mse_loss(m(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ---- decoding ------------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_decoding_step_by_step_equals_the_whole(norm, connection):
    decoder = TransformerDecoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection=connection)
    shaken(decoder).eval()
    x, encoded = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    want = decoder(x, encoded, None, PADDING)
    packing = Packing.of(3, 5, PADDING)
    with torch.no_grad():
        cache = decoder.start(packing.pack(encoded), packing)
        assert isinstance(cache, DecoderCache)
        for t in range(5):
            got = decoder.step(x[:, t], cache)
            torch.testing.assert_close(got, want[:, t], rtol=1e-4, atol=1e-5)


def test_reordering_hypotheses():
    decoder = shaken(TransformerDecoder(2, DIM, HEADS, FFN)).eval()
    x, encoded = torch.randn(3, 3, DIM), torch.randn(3, 5, DIM)
    packing, index = Packing.of(3, 5, PADDING), torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache = decoder.start(packing.pack(encoded), packing)
        decoder.step(x[:, 0], cache)
        cache.reorder(index)
        got = decoder.step(x[index, 1], cache)
        want = decoder(x[index, :2], encoded[index], None, PADDING[index])[:, 1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_later_positions_are_not_seen():
    decoder = TransformerDecoder(2, DIM, HEADS, FFN).eval()
    x, encoded = torch.randn(2, 5, DIM), torch.randn(2, 4, DIM)
    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.equal(decoder(x, encoded)[:, :3], decoder(changed, encoded)[:, :3])


# ---- misuse --------------------------------------------------------------------------------------


def test_replaced_and_hooked_layers_are_called():
    """Norm and linear run as one op only if nothing observes the tensor between them."""
    m = TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.0)
    x, seen = torch.randn(2, 3, DIM), []
    plain = m(x)
    up = m.layers[0].feed_forward.up
    handle = up.register_forward_hook(lambda *_: seen.append("up"))
    torch.testing.assert_close(m(x), plain)
    handle.remove()
    handle = m.layers[0].feed_forward_norm.register_forward_pre_hook(lambda *_: seen.append("norm"))
    torch.testing.assert_close(m(x), plain)
    handle.remove()

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            seen.append("doubled")
            return 2 * super().forward(x)

    up.forward = lambda x, forward=up.forward: seen.append("patched") or forward(x)
    torch.testing.assert_close(m(x), plain)
    del up.forward
    m.layers[0].feed_forward.up = Doubled(DIM, FFN)
    m.layers[0].feed_forward.up.load_state_dict(up.state_dict())
    assert not torch.allclose(m(x), plain)
    assert seen == ["up", "norm", "patched", "doubled"]
