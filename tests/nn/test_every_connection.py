"""What holds for stacks with every connection."""

import math

import pytest
import torch

from deepfast.connections import CONNECTIONS
from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS
from tests.nn.written_out import DIM, HEADS, PADDING, leaf, naive, shaken

STACKS = TransformerEncoder, TransformerDecoder
SIZES = (4, DIM, HEADS, 20)
OPTIONS = [
    *({"connection": name, "norm": "pre"} for name in CONNECTIONS),
    *({"connection": name, "norm": "post"} for name, c in CONNECTIONS.items() if not c.pre_norm),
    *({"connection": n, "norm": "pre", "reads": 1} for n, c in CONNECTIONS.items() if c.attends),
    {"connection": "latent", "norm": "post", "latent": {"evaluation": "mean"}},
    {"connection": "residual", "norm": "deepnorm"},
]
EVERY = pytest.mark.parametrize("options", OPTIONS, ids=str)


def shaken_stack(kind, options, dropout=0.0):
    """Parameters away from their start; latent depth uses all layers."""
    module = shaken(kind(*SIZES, dropout=dropout, **options))
    if module.latent is not None:
        torch.nn.init.constant_(module.latent.logits, 1.5)
    return module


@EVERY
def test_decoding_step_by_step_equals_the_whole(options):
    """With hypotheses that change their places."""
    decoder = shaken_stack(TransformerDecoder, options).eval()
    if decoder.latent is not None:
        # The second layer is left out, or its weight is small.
        decoder.latent.logits.data[0, 1] = -1
    x, encoded = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    packing, order = Packing.of(3, 5, PADDING), torch.tensor([2, 0, 0])
    want = decoder(x, encoded, None, PADDING)
    with torch.no_grad():
        cache = decoder.start(packing.pack(encoded), packing)
        for t in range(3):
            got = decoder.step(x[:, t], cache)
            torch.testing.assert_close(got, want[:, t], rtol=1e-4, atol=1e-5)
        cache.reorder(order)
        x = torch.cat((x[order, :3], x[:, 3:]), 1)
        want = decoder(x, encoded[order], None, PADDING[order])
        for t in (3, 4):
            got = decoder.step(x[:, t], cache)
            torch.testing.assert_close(got, want[:, t], rtol=1e-4, atol=1e-5)


@EVERY
def test_states_are_the_inputs_of_the_layers_and_the_last_output(options):
    encoder, states, seen = shaken_stack(TransformerEncoder, options).eval(), [], []
    x, packing = torch.randn(8, DIM), Packing(2, 4)

    def see(_, args):
        seen.append(args[0])

    for layer in encoder.layers:
        layer.register_forward_pre_hook(see)
    y = encoder.forward_packed(x, packing, states=states)
    assert torch.equal(y, encoder.forward_packed(x, packing))
    assert len(states) == 5
    norm = encoder.connection.norms[-1] if options["norm"] == "pre" else lambda x: x
    torch.testing.assert_close(y, norm(states[-1]))
    if encoder.connection.parts:
        seen = []
        naive(encoder, packing.unpack(x), inputs=seen)
        seen = [packing.pack(one) for one in seen[:: encoder.connection.reads]]
        torch.testing.assert_close(states, seen, rtol=1e-4, atol=1e-5)
    else:
        assert all(map(torch.equal, states[:-1], seen[:4]))


@EVERY
def test_gradients_flow_from_every_state(options):
    """Finite differences along one direction."""
    encoder = shaken_stack(TransformerEncoder, options).double().eval()
    packing, weights = Packing(2, 4), torch.randn(5, 8, DIM, dtype=torch.float64)
    x = torch.randn(8, DIM, dtype=torch.float64, requires_grad=True)

    def total(x):
        states = []
        encoder.forward_packed(x, packing, states=states)
        return sum((w * s).sum() for w, s in zip(weights, states, strict=True))

    (gradient,) = torch.autograd.grad(total(x), x)
    direction, step = torch.randn_like(x), 1e-6
    with torch.no_grad():
        slope = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)


@EVERY
def test_a_padded_batch_equals_each_sentence_alone(options):
    """And what stands at padding does not matter, in forward and in backward."""
    encoder, decoder = (shaken_stack(kind, options).eval() for kind in STACKS)
    # The last sentence is empty.
    padding = torch.cat((PADDING, torch.ones(1, 5).bool()))
    x, y = torch.randn(4, 5, DIM), torch.randn(4, 5, DIM)
    bad = x.masked_fill(padding.unsqueeze(-1), math.nan).requires_grad_()
    encoded = encoder(bad, padding)
    out = decoder(y, encoded, padding, padding)
    for i, length in enumerate((~padding).sum(1).tolist()):
        alone = encoder(x[i : i + 1, :length])
        torch.testing.assert_close(encoded[i : i + 1, :length], alone, rtol=1e-4, atol=1e-5)
        alone = decoder(y[i : i + 1, :length], alone)
        torch.testing.assert_close(out[i : i + 1, :length], alone, rtol=1e-4, atol=1e-5)
    assert encoded[padding].eq(0).all()
    assert out[padding].eq(0).all()
    out.square().sum().backward()
    for t in (bad, *encoder.parameters(), *decoder.parameters()):
        assert t.grad is None or t.grad.isfinite().all()


@EVERY
def test_dropout_follows_mode_and_seed(options):
    m, x = shaken_stack(TransformerEncoder, options, dropout=0.5), torch.randn(2, 5, DIM)

    def seeded():
        torch.manual_seed(1)
        if m.latent is not None:
            m.latent.set_step(1)
        return m(x)

    assert torch.equal(seeded(), seeded())
    assert not torch.equal(seeded(), m(x))
    m.eval()
    assert torch.equal(m(x), m(x))


@EVERY
def test_autocast(options):
    m, x = shaken_stack(TransformerEncoder, options).eval(), leaf(2, 5, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), m(x), rtol=0.1, atol=0.2)
    out.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in m.parameters())


@EVERY
def test_no_tokens_and_padding_alone(options):
    m = shaken_stack(TransformerEncoder, options)
    for shape, padding in (((0, 5), None), ((3, 0), None), ((2, 3), torch.ones(2, 3).bool())):
        x = leaf(*shape, DIM)
        out = m(x, padding)
        assert out.shape == x.shape
        assert out.eq(0).all()
        out.sum().backward()
        assert x.grad.eq(0).all()


# ---- attention residuals and DLCL ----------------------------------------------------------------


@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
@pytest.mark.parametrize("reads", [1, 2])
def test_what_a_layer_or_sublayer_returns_is_dropped(connection, reads):
    """By the push, but not the embedding."""
    m, dropped = TransformerEncoder(*SIZES, connection=connection, reads=reads, dropout=0.5), []
    m.connection.residuals.register_forward_pre_hook(
        lambda _, args, given: dropped.append(given["dropout_p"]), with_kwargs=True
    )
    m(torch.randn(2, 4, DIM))
    assert dropped == [0, *[0.5] * (reads * 4)]


def test_which_parts_of_a_layer_read():
    """Each sublayer by default; blocks are an eighth of the layers."""
    m = TransformerEncoder(9, DIM, HEADS, 16, connection="block_attnres")
    assert m.connection.residuals.block == 2
    for kind, rows in ((TransformerEncoder, 2), (TransformerDecoder, 3)):
        m, once = (kind(*SIZES, connection="attnres", reads=reads) for reads in (None, 1))
        assert m.connection.residuals.rows == len(m.connection.norms) == 4 * rows + 1
        with pytest.raises(RuntimeError, match=r"size mismatch for connection\.residuals\.query"):
            m.load_state_dict(once.state_dict())


@pytest.mark.parametrize(
    ("connection", "given", "expected"),
    [
        ("dlcl", {}, ("average", "pre", True)),
        ("dlcl", {"norm": None}, ("average", None, True)),
        ("dlcl", {"init": "one", "learnable": False}, ("one", "pre", False)),
        ("denseformer", {}, ("identity", None, True)),
        ("denseformer", {"init": "average", "norm": "pre"}, ("average", "pre", True)),
    ],
)
def test_the_users_options_of_dlcl_stand_above_a_presets(connection, given, expected):
    made = TransformerEncoder(*SIZES, connection=connection, dlcl=given)
    dlcl = made.connection.dlcl
    assert (dlcl.init, dlcl.norm, dlcl.weight.requires_grad) == expected
    assert ("connection.dlcl.norm_weight" in made.state_dict()) == (dlcl.norm is not None)
