"""Transformer layers and stacks against the same written out in PyTorch, and what holds for stacks
with every connection."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from deepfast import backend as backends
from deepfast.connections import CONNECTIONS
from deepfast.memory import POLICIES
from deepfast.nn import (
    LayerNorm,
    MultiheadAttention,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from deepfast.nn.connections.latent import is_chosen
from tests.nn.written_out import (
    DIM,
    HEADS,
    PADDING,
    assert_same,
    layer,
    leaf,
    naive,
    norm_of,
    shaken,
)

FFN, LAYERS = 20, 3
SIZES = LAYERS, DIM, HEADS, FFN
KINDS = TransformerEncoder, TransformerDecoder
BOTH_NORMS = [
    {"connection": "residual", "norm_type": "rms"},
    {"connection": "residual", "num_kv_heads": 1, "window": 1, "activation": "swiglu"},
    {"connection": "latent", "latent": {"languages": 3, "evaluation": "mean"}},
    {"connection": "latent", "latent": {"hard": True}},
    {"dlcl": {"window": 3}, "norm_type": "rms"},
    {"dlcl": {}, "num_kv_heads": 1, "window": (2, 1), "activation": "gelu"},
    {"dlcl": {"weight_type": "group", "groups": 4, "window": 3, "normalize_embedding": True}},
]
ONE_NORM = [
    {"dlcl": {"norm_type": "layer"}, "norm_type": "rms"},
    {"dlcl": {"norm": None, "init": "identity", "learnable": False}},
    {"dlcl": {"weight_type": "vector", "softmax": True}, "norm": "post"},
    {"connection": "denseformer", "dlcl": {"dilation": 2}},
    {"connection": "attnres"},
    {"connection": "attnres", "reads": 1},
    {"connection": "block_attnres", "block": 2},
    {"connection": "block_attnres", "block": 2, "reads": 1},
    {"connection": "latent", "norm_type": "none"},
    {"connection": "residual", "norm": "deepnorm"},
]
STACKS = [({"norm": norm} | options) for options in BOTH_NORMS for norm in ("pre", "post")]
STACKS += ONE_NORM


def operands(kind, padding, dtype=torch.float32):
    """Those of an encoder or a decoder: leaves, the same with NaN at padding, the masks, and what
    `naive` takes."""
    leaves = [torch.randn(4, n, DIM, dtype=dtype, requires_grad=True) for n in (5, 7)]
    # The encoder's output may be padded anywhere.
    masks = padding, None if padding is None else F.pad(padding, (2, 0)).flip(1)
    if kind in (TransformerEncoder, TransformerEncoderLayer):
        leaves, masks = leaves[:1], masks[:1]
    hidden = leaves
    if padding is not None:
        pairs = zip(leaves, masks, strict=True)
        hidden = [x.masked_fill(mask.unsqueeze(-1), math.nan) for x, mask in pairs]
    given = (*leaves, *masks) if len(leaves) == 2 else (*leaves, None, *masks, None)
    return leaves, (*hidden, *masks), given


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("gate", [None, 0.7, 0.0])
@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerDecoderLayer])
def test_a_layer_alone(backend, kind, gate, norm, padding):
    """A gate of 0 leaves the layer its residual."""
    m = shaken(kind(DIM, HEADS, FFN, norm=norm, dropout=0.0, backend=backend))
    leaves, called, (x, *given) = operands(kind, padding)
    n = norm_of(m.attention_norm, x) if norm == "pre" else x
    want = layer(m, x, n, *given, 1.0 if gate is None else gate)
    keep = None if padding is None else ~padding
    assert_same(m(*called, gate=gate), want, m, leaves, keep)


def states_and_output(m, x, encoded=None, **language):
    """Of packed tokens; ``encoded`` is a list with an output of the encoder for each layer."""
    states, packing, more = [], Packing(*x.shape[:2]), ()
    if encoded is not None:
        more = [one.flatten(0, 1) for one in encoded], Packing(*encoded[0].shape[:2])
    y = m.forward_packed(packing.pack(x), packing, *more, states=states, **language)
    return torch.stack([packing.unpack(t) for t in (*states, y)])


FORMS = [
    (TransformerEncoder, "cpu", PADDING),
    (TransformerEncoder, "reference", None),
    (TransformerDecoder, "reference", PADDING),
    (TransformerDecoder, "cpu", None),
]
# Each stack as an encoder and as a decoder, by both backends; each connection with padding and
# without it.
CELLS = [
    (options, *form) for i, options in enumerate(STACKS) for form in FORMS[(i + i // 2) % 2 :: 2]
]


@pytest.mark.parametrize(
    ("options", "kind", "exact_backend", "padding"), CELLS, ids=str, indirect=["exact_backend"]
)
def test_a_stack_equals_the_naive_loop(exact_backend, kind, options, padding):
    """In fp64: without norms values grow. Gates are drawn, and in evaluation chosen. States are the
    inputs of the layers that run, and that of the last norm. What stands at padding is not read."""
    m = kind(*SIZES, dropout=0.0, backend=exact_backend, **options)
    shaken(m).double()
    for module in m.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-3
    language = {}
    if m.latent is not None:
        torch.nn.init.normal_(m.latent.logits)
        language = {"language": m.latent.languages - 1}
    leaves, called, given = operands(kind, padding, torch.float64)
    if padding is None and len(leaves) == 2:
        # An output of the encoder for each layer.
        called = given = leaves[0], [leaves[1] * (k + 1) for k in range(LAYERS)]
    for training in [True] if m.latent is None else [True, False]:
        m.train(training)
        gates = [1.0] * LAYERS if m.latent is None else copy.copy(m.latent)(**language)
        read = []
        want, keep = naive(m, *given, gates=gates, inputs=read), None
        with backends.record() as seen:
            if padding is not None:
                got, keep = m(*called, **language), ~padding
            else:
                # FSDP2 copies the arguments in some versions of torch.
                m.connection.register_forward_pre_hook(lambda _, args: tree_map(lambda t: t, args))
                got = states_and_output(m, *called[: len(leaves)], **language)
                read = read[:: m.connection.reads]
                if m.connection.norm == "pre":
                    used = (not is_chosen(z, 0.0) for z in (*gates, 1.0))
                    read = [x for x, runs in zip(read, used, strict=True) if runs]
                want = torch.stack([*read, want])
        assert {name for _, name in seen} == {exact_backend}
        assert_same(got, want, m, leaves, keep)


# ---- every connection ----------------------------------------------------------------------------

EVERY = [
    *({"connection": name, "norm": "pre"} for name in CONNECTIONS),
    *({"connection": name, "norm": "post"} for name, c in CONNECTIONS.items() if not c.pre_norm),
    *({"connection": n, "norm": "pre", "reads": 1} for n, c in CONNECTIONS.items() if c.attends),
    {"connection": "latent", "norm": "post", "latent": {"evaluation": "mean"}},
    {"connection": "residual", "norm": "deepnorm"},
]
EVERY = pytest.mark.parametrize("options", EVERY, ids=str)


def shaken_stack(kind, options, **rates):
    """Parameters away from their start; latent depth leaves out the second layer, or its weight is
    small."""
    module = shaken(kind(*SIZES, **{"dropout": 0.0} | rates | options))
    if module.latent is not None:
        module.latent.logits.data.copy_(torch.tensor([1.5, -1, 1.5]))
    return module


@EVERY
def test_dropout_of_1_leaves_the_embedding_alone(options):
    """Every branch is dropped, in training only."""
    rates = {"dropout": 1.0, "attention_dropout": 0.5, "activation_dropout": 0.5}
    m, x = shaken_stack(TransformerEncoder, options, **rates), torch.randn(2, 5, DIM)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(m(x), naive(m, x, gates=[0.0] * LAYERS))
    close(m.eval()(x), naive(m, x, gates=[1.0 if z is None else z for z in m.gates()]))


@EVERY
def test_autocast(options):
    m, x, states = shaken_stack(TransformerEncoder, options).eval(), leaf(8, DIM), []
    with torch.autocast("cpu", torch.bfloat16):
        out = m.forward_packed(x, Packing(2, 4), states=states)
    assert {t.dtype for t in (out, *states)} == {torch.bfloat16}
    torch.testing.assert_close(out.float(), m.forward_packed(x, Packing(2, 4)), rtol=0.1, atol=0.2)
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


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_masks_differ_from_call_to_call(rate):
    m = TransformerEncoder(2, DIM, HEADS, FFN, **{"dropout": 0.0, rate: 0.5})
    x = torch.randn(2, 5, DIM)
    assert not torch.equal(m(x), m(x))


def test_defaults_of_connections():
    """A DenseFormer is a DLCL with other defaults. Each sublayer reads attention residuals, and
    blocks are an eighth of the layers."""
    for connection, given, expected in (
        ("denseformer", {}, {"init": "identity", "norm": None}),
        ("denseformer", {"dlcl": {"init": "average", "norm": "pre"}},
         {"init": "average", "norm": "pre"}),
        ("block_attnres", {}, {"rows": 28, "block": 2}),
        ("block_attnres", {"reads": 1}, {"rows": 10}),
    ):  # fmt: skip
        stack = TransformerDecoder(9, *SIZES[1:], connection=connection, **given)
        assert expected.items() <= vars(stack.connection.depth).items()


@pytest.mark.parametrize(("kind", "parts"), [(TransformerEncoder, 2), (TransformerDecoder, 3)])
def test_depth_init(kind, parts):
    """Only the output projections begin smaller."""
    states = []
    for depth_init in (False, True):
        torch.manual_seed(0)
        states.append(kind(*SIZES, depth_init=depth_init).state_dict())
    for name, value in states[0].items():
        smaller = name.endswith(("attention.out.weight", "down.weight"))
        factor = (parts * LAYERS) ** -0.5 if smaller else 1
        torch.testing.assert_close(states[1][name], value * factor)


@pytest.mark.parametrize(("kind", "options", "alpha", "beta"), [
    (TransformerEncoder, {}, 16**0.25, 64**-0.25),
    (TransformerEncoder, {"decoder_layers": 3}, 0.81 * (8**4 * 3) ** (1 / 16),
     0.87 * (8**4 * 3) ** (-1 / 16)),
    (TransformerDecoder, {}, 24**0.25, 96**-0.25),
], ids=str)  # fmt: skip
def test_the_start_of_deepnorm(kind, options, alpha, beta):
    """Xavier with gain beta, but gain 1 for queries and keys. ``LN(alpha x + f)`` is the layer's
    ``LN(x + f / alpha)`` with another eps."""
    dim = 128
    stack = kind(8, dim, 4, 4 * dim, connection="residual", norm="deepnorm", **options)
    assert stack.alpha == pytest.approx(alpha)
    square, wide = math.sqrt(6 / (2 * dim)), math.sqrt(6 / (5 * dim))
    for m in stack.layers:
        q, k, v = m.attention.query_key_value.weight.chunk(3)
        bounds = [(q, square), (k, square), (v, beta * square)]
        bounds += [(m.attention.out.weight, beta * square)]
        bounds += [(linear.weight, beta * wide) for linear in m.feed_forward.children()]
        if kind is TransformerDecoder:
            k, v = m.cross_attention.key_value.weight.chunk(2)
            bounds += [(m.cross_attention.query.weight, square), (k, square), (v, beta * square)]
        for weight, bound in bounds:
            assert 0.99 * bound < weight.abs().max() <= bound
        norms = [part for part in m.modules() if isinstance(part, LayerNorm)]
        assert [norm.eps for norm in norms] == pytest.approx([1e-5 / alpha**2] * len(norms))


# ---- modules in whose place no fused op may stand ------------------------------------------------


def scaled(module):
    for p in module.parameters():
        p.data.mul_(2)


def by_hook(module):
    module.register_forward_hook(lambda _m, _x, y: 2 * y)


def by_subclass(module):
    kind = type(module)
    module.__class__ = type("Twice", (kind,), {"forward": lambda m, x: 2 * kind.forward(m, x)})


def by_another_forward(module):
    module.forward = lambda x, forward=module.forward: 2 * forward(x)


def by_torch(norm):
    theirs = nn.LayerNorm(DIM).double().requires_grad_(False)
    by_hook(theirs)
    return theirs


def without_parameters(norm):
    norm.weight = norm.bias = None


def scaled_projection(attention):
    (attention.query if attention.cross else attention.query_key_value).weight.data.mul_(2)


# Type of the modules, what is done to them in the plain stack, and what instead in the other one.
CHANGES = [
    (LayerNorm, scaled, by_hook),
    (LayerNorm, scaled, by_subclass),
    (LayerNorm, scaled, by_torch),
    (LayerNorm, lambda norm: None, without_parameters),
    (nn.Linear, scaled, by_hook),
    (nn.Linear, scaled, by_subclass),
    (nn.Linear, scaled, by_another_forward),
    (nn.Linear, lambda m: m.bias.data.zero_(), lambda m: setattr(m, "bias", None)),
    # What a hook changes is not recomputed as LN(x).
    (MultiheadAttention, scaled_projection, lambda m: m.register_forward_pre_hook(
        lambda _, args: (2 * args[0], *args[1:]))),
]  # fmt: skip
UNDER = [
    {}, {"norm": "post"}, {"connection": "residual"}, {"connection": "attnres"},
    {"connection": "attnres", "reads": 1},
]  # fmt: skip
# Every policy with every change, each in one of the stacks.
CASES = [
    (KINDS[(i + j) % 2], UNDER[(i + 2 * j) % 5] | {"recompute": policy}, j)
    for i, policy in enumerate(POLICIES)
    for j in range(len(CHANGES))
]


@pytest.mark.parametrize(("kind", "options", "change"), CASES, ids=str)
def test_modules_that_are_not_plain_run_as_modules(kind, options, change):
    """Twice a norm is the norm with parameters of 2."""
    if options["recompute"] == "layer+input" and options.get("connection") == "residual":
        options = options | {"recompute": "layer"}
    changed, in_plain, instead = CHANGES[change]
    found = []
    for alter in (in_plain, instead):
        torch.manual_seed(3)
        leaves, called, _ = operands(kind, PADDING, torch.float64)
        m = kind(*SIZES, **{"dropout": 0.2} | options).double()
        for module in [*m.modules()]:
            for name, child in module.named_children():
                if type(child) is changed:
                    child.requires_grad_(False)
                    other = alter(child)
                    setattr(module, name, other if isinstance(other, nn.Module) else child)
        learned = [*leaves, *(p for p in m.parameters() if p.requires_grad)]
        out = m(*called)
        found.append([out, *torch.autograd.grad(out.square().sum(), learned)])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
