"""Transformer layers and stacks against the same written out in PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.nn import (
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


# ---- training ------------------------------------------------------------------------------------


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


def test_states_are_in_16_bits_under_autocast(monkeypatch):
    from deepfast.nn.connections import dlcl as module

    made, plain = [], module.DepthHistory
    monkeypatch.setattr(module, "DepthHistory", lambda: made.append(plain()) or made[-1])
    with torch.autocast("cpu", torch.bfloat16):
        TransformerEncoder(LAYERS, DIM, HEADS, FFN)(torch.randn(2, 5, DIM))
    assert made[0].state.states.dtype == torch.bfloat16


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


def test_one_encoder_output_for_each_layer():
    torch.manual_seed(2)
    decoder = TransformerDecoder(3, DIM, HEADS, FFN).eval()
    x, encoded, packing = torch.randn(8, DIM), torch.randn(8, DIM), Packing(2, 4)
    same = decoder.forward_packed(x, packing, encoded, packing)
    one_each = decoder.forward_packed(x, packing, [encoded] * 3, packing)
    torch.testing.assert_close(same, one_each, rtol=0, atol=0)
    other = decoder.forward_packed(x, packing, [encoded, encoded, encoded + 1], packing)
    assert not torch.equal(same, other)


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
