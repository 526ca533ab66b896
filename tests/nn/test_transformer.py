"""Transformer layers and stacks against the same written out in PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.nn import (
    LayerNorm,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.nn.written_out import DIM, HEADS, PADDING, assert_same, layer, naive, norm_of, shaken

FFN, LAYERS = 20, 4
NORMS = pytest.mark.parametrize("norm", ["pre", "post"])
PADDINGS = pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
KINDS = pytest.mark.parametrize("kind", [TransformerEncoder, TransformerDecoder])
OPTIONS = [
    {"connection": "residual"},
    {"connection": "residual", "norm_type": "rms"},
    {"connection": "residual", "num_kv_heads": 1, "window": 1, "activation": "swiglu"},
    {"connection": "latent", "latent": {"languages": 3, "evaluation": "mean"}},
    {"connection": "latent", "latent": {"hard": True}},
    {"dlcl": {"window": 3}, "norm_type": "rms"},
    {"dlcl": {"norm_type": "layer"}, "norm_type": "rms"},
    {"dlcl": {}, "num_kv_heads": 1, "window": (2, 1), "activation": "gelu"},
    {"dlcl": {"weight_type": "vector", "init": "one"}},
    {"dlcl": {"weight_type": "group", "groups": 4, "window": 3, "normalize_embedding": True}},
    {"dlcl": {"softmax": True, "learnable": False}},
    {"dlcl": {"norm": None, "init": "identity", "learnable": False}},
    {"connection": "denseformer", "dlcl": {"dilation": 2}},
]
PRE_NORM = [
    {"connection": "attnres"},
    {"connection": "attnres", "reads": 1},
    {"connection": "block_attnres", "block": 2},
    {"connection": "block_attnres", "block": 2, "reads": 1},
    {"connection": "latent", "norm_type": "none"},
]
STACKS = [({"norm": norm} | options) for options in OPTIONS for norm in ("pre", "post")] + PRE_NORM


def operands(kind, padding, dtype=torch.float32):
    """Those of an encoder or a decoder: x, what a decoder attends to, and both masks."""
    x, encoded = (torch.randn(3, n, DIM, dtype=dtype, requires_grad=True) for n in (5, 7))
    if kind in (TransformerEncoder, TransformerEncoderLayer):
        return (x,), (padding,), (x, None, padding)
    masks = padding, None if padding is None else F.pad(padding, (2, 0))
    return (x, encoded), masks, (x, encoded, *masks)


@NORMS
@PADDINGS
@pytest.mark.parametrize("gate", [None, 0.7, 0.0])
@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerDecoderLayer])
def test_a_layer_alone(backend, kind, gate, norm, padding):
    """A gate of 0 leaves the layer its residual."""
    m = shaken(kind(DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend))
    inputs, masks, (x, *given) = operands(kind, padding)
    n = norm_of(m.attention_norm, x) if norm == "pre" else x
    given += [None] * (3 - len(given)) + [1.0 if gate is None else gate]
    keep = None if padding is None else ~padding
    assert_same(m(*inputs, *masks, gate=gate), layer(m, x, n, *given), m, inputs, keep)


# Each stack with and without padding, by both backends.
FORMS = [
    (TransformerEncoder, "cpu", PADDING),
    (TransformerEncoder, "reference", None),
    (TransformerDecoder, "cpu", None),
    (TransformerDecoder, "reference", PADDING),
]


@pytest.mark.parametrize(
    ("kind", "exact_backend", "padding"), FORMS, ids=str, indirect=["exact_backend"]
)
@pytest.mark.parametrize("options", STACKS, ids=str)
def test_a_stack_equals_the_naive_loop(exact_backend, kind, options, padding):
    """In fp64: without norms values grow. Gates are drawn, and in evaluation chosen."""
    m = kind(LAYERS, DIM, HEADS, FFN, dropout=0.0, backend=exact_backend, **options)
    shaken(m).double()
    for module in m.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-3
    language = {}
    if m.latent is not None:
        torch.nn.init.normal_(m.latent.logits)
        language = {"language": m.latent.languages - 1}
    inputs, masks, given = operands(kind, padding, torch.float64)
    keep = None if padding is None else ~padding
    for training in [True] if m.latent is None else [True, False]:
        m.train(training)
        gates = None if m.latent is None else copy.copy(m.latent)(**language)
        want = naive(m, *given, gates=gates)
        assert_same(m(*inputs, *masks, **language), want, m, inputs, keep)


def test_which_backend_runs(backend):
    m = TransformerEncoder(2, DIM, HEADS, FFN, backend=backend)
    with backends.record() as seen:
        m(torch.randn(2, 3, DIM)).sum().backward()
    assert set(seen) == {
        (op, backend) for op in ("layer_norm", "activation", "boundary", "attention")
    }


@NORMS
def test_dropout_of_branches_is_where_it_should_be(norm):
    """With every branch dropped a pre-norm layer is the identity on its residual stream."""
    m = TransformerEncoder(LAYERS, DIM, HEADS, FFN, norm=norm, connection="residual", dropout=1.0)
    x = torch.randn(2, 5, DIM)
    want = F.layer_norm(x, (DIM,))
    torch.testing.assert_close(m(x), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["attention_dropout", "activation_dropout"])
def test_activation_and_attention_dropout_follow_the_mode(name):
    m = TransformerEncoder(2, DIM, HEADS, FFN, dropout=0.0, **{name: 0.5})
    x = torch.randn(2, 5, DIM)
    assert not torch.equal(m(x), m(x))
    m.eval()
    assert torch.equal(m(x), m(x))


def test_policy_ffn_keeps_no_hidden_tensor_of_swiglu():
    """They have F channels."""
    layer = TransformerEncoderLayer(8, 2, 20, activation="swiglu", dropout=0.0)
    x, kept = torch.randn(2, 3, 8, requires_grad=True), {}
    for policy in ("none", "ffn"):
        layer.recompute, sizes = policy, []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            layer(x)
        kept[policy] = sizes.count(6 * 20)
    # g, u, silu(g) and what the last product reads.
    assert kept == {"none": 4, "ffn": 0}


def test_states_are_in_16_bits_under_autocast(monkeypatch):
    from deepfast.nn.connections import dlcl as module

    made, plain = [], module.DepthHistory
    monkeypatch.setattr(module, "DepthHistory", lambda: made.append(plain()) or made[-1])
    with torch.autocast("cpu", torch.bfloat16):
        TransformerEncoder(LAYERS, DIM, HEADS, FFN)(torch.randn(2, 5, DIM))
    assert made[0].depth_pass.states.dtype == torch.bfloat16


def test_one_encoder_output_for_each_layer():
    torch.manual_seed(2)
    decoder = TransformerDecoder(3, DIM, HEADS, FFN).eval()
    x, encoded, packing = torch.randn(8, DIM), torch.randn(8, DIM), Packing(2, 4)
    same = decoder.forward_packed(x, packing, encoded, packing)
    one_each = decoder.forward_packed(x, packing, [encoded] * 3, packing)
    torch.testing.assert_close(same, one_each, rtol=0, atol=0)
    other = decoder.forward_packed(x, packing, [encoded, encoded, encoded + 1], packing)
    assert not torch.equal(same, other)


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


class Doubled(LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def by_hook(norm):
    norm.register_forward_hook(lambda _m, _x, y: 2 * y)
    return norm


def by_subclass(norm):
    norm.__class__ = Doubled
    return norm


def by_torch(norm):
    return by_hook(torch.nn.LayerNorm(DIM).double().requires_grad_(False))


# Every policy with every change.
NORMED = [{}, {"norm": "post"}, {"connection": "residual"}, *PRE_NORM[:2]]
NORMED = [
    (options, policy, change)
    for i, policy in enumerate(["none", "ffn", "layer", "layer+input"])
    for j, change in enumerate([by_hook, by_subclass, by_torch])
    for options in (NORMED[(i + j) % 5], NORMED[(i + 2 * j + 2) % 5])
]


@pytest.mark.parametrize(
    ("options", "policy", "change"),
    NORMED,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@KINDS
def test_norms_that_are_not_plain_run_as_modules(kind, options, policy, change):
    """Twice the norm is the norm with weights of 2."""
    if policy == "layer+input" and options.get("connection") == "residual":
        policy = "layer"
    inputs, masks, _ = operands(kind, PADDING, torch.float64)
    found = []
    for plain in (True, False):
        torch.manual_seed(3)
        m = kind(LAYERS, DIM, HEADS, FFN, dropout=0.2, recompute=policy, **options).double()
        for module in [*m.modules()]:
            for name, norm in module.named_children():
                if type(norm) is not LayerNorm:
                    continue
                norm.requires_grad_(False)
                if plain:
                    norm.weight.fill_(2)
                else:
                    setattr(module, name, change(norm))
        learned = [*inputs, *(p for p in m.parameters() if p.requires_grad)]
        out = m(*inputs, *masks)
        found.append([out, *torch.autograd.grad(out.square().sum(), learned)])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
