"""Recompute policies: the same bits as `none` in every kind of step; the bytes they keep, the
products they recompute, and no leaks."""

import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.memory import POLICIES, LiveBytes
from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS, policies_of
from tests.nn.written_out import Seen

LAYERS, DIM, HEADS, FFN, BATCH, LENGTH = 4, 16, 2, 40, 3, 7

CASES = {
    "dlcl": {},
    "dlcl, swiglu": {"activation": "swiglu", "activation_dropout": 0.2, "padding": True},
    "dlcl, gelu": {"activation": "gelu", "activation_dropout": 0.2, "attention_dropout": 0.1},
    "dlcl, window": {"dlcl": {"window": 3, "weight_type": "vector"}, "norm_type": "rms"},
    "dlcl, post": {"norm": "post"},
    "dlcl, no norm": {"dlcl": {"norm": None}, "num_kv_heads": 1, "window": (2, 1)},
    "dlcl, no norm, post": {"dlcl": {"norm": None}, "norm": "post", "norm_type": "rms"},
    "denseformer": {"connection": "denseformer", "dlcl": {"dilation": 2}},
    "deepnorm": {"connection": "residual", "norm": "deepnorm"},
    "residual, post, gelu": {"connection": "residual", "norm": "post", "activation": "gelu"},
    "no norms": {"norm_type": "none", "connection": "residual"},
    "decoder": {"decoder": True, "attention_dropout": 0.1},
    "decoder, residual": {"decoder": True, "connection": "residual", "padding": True},
    "decoder, post": {"decoder": True, "norm": "post"},
    "latent": {"connection": "latent", "padding": True},
    "decoder, latent, hard": {
        "decoder": True, "connection": "latent", "norm": "post", "latent": {"hard": True}
    },
    "attnres, gelu": {
        "connection": "attnres", "activation": "gelu", "attention_dropout": 0.1, "padding": True
    },
    "attnres, one read": {"connection": "attnres", "reads": 1},
    "block_attnres": {"connection": "block_attnres", "block": 2, "activation_dropout": 0.2},
    "decoder, attnres": {"decoder": True, "connection": "attnres", "attention_dropout": 0.1},
}  # fmt: skip


def stack(recompute, *, layers=LAYERS, decoder=False, padding=False, **options):
    torch.manual_seed(1)
    kind = TransformerDecoder if decoder else TransformerEncoder
    return kind(layers, DIM, HEADS, FFN, dropout=0.1, recompute=recompute, **options)


def allowed(case):
    return policies_of(CASES[case].get("connection", "dlcl"))


def forward(module, *, padding=False):
    """Inputs, which need gradients, and the output, from one and the same seed."""
    torch.manual_seed(2)
    x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    inputs, mask = [x], None
    if padding:
        mask = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3], [5]])
    if isinstance(module, TransformerDecoder):
        inputs.append(torch.randn(BATCH, LENGTH + 1, DIM, requires_grad=True))
    return inputs, module(*inputs, mask)


def gradients(module, inputs, y):
    """Of the inputs and of the parameters, by name."""
    y.float().mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: p.grad for name, p in module.named_parameters()}


def step(module, *, padding=False, autocast=False):
    """Everything one step gives, and the generator's next number."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inputs, y = forward(module, padding=padding)
    result = gradients(module, inputs, y)
    module.zero_grad()
    return result | {"y": y.detach(), "next": torch.rand(2)}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        same = got[name] is None if value is None else torch.equal(got[name], value)
        assert same, name


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_keep(case):
    """Also in inference mode, and under autocast."""
    options, (keep, *others) = CASES[case] | {"layers": 3}, allowed(case)
    padding = options.get("padding", False)
    expected = step(stack(keep, **options), padding=padding)
    in_16_bits = step(stack(keep, **options), padding=padding, autocast=True)
    with torch.no_grad():
        output = forward(stack(keep, **options).eval())[1]
    for policy in others:
        module = stack(policy, **options)
        assert module.policies == (policy,) * 3
        assert_same(step(module, padding=padding), expected)
        got = step(module, padding=padding, autocast=True)
        c = module.connection
        if policy == "layer" and c.depth is not None and c.norm == "pre" and not c.parts:
            # Recomputation rounds x to bf16 before its layer-norm, a boundary rounds after it.
            for name, value in in_16_bits.items():
                assert (got[name] - value).norm() <= 0.15 * value.norm(), name
        else:
            assert_same(got, in_16_bits)
        with torch.inference_mode():
            assert torch.equal(forward(module.eval())[1], output)


def two_passes_at_once(module):
    """Two forwards, then both backwards, the older one last."""
    (inputs, y), (_, z) = forward(module), forward(module)
    z.square().sum().backward()
    return gradients(module, inputs, y)


def a_part_of_the_gradients(module):
    """torch.autograd.grad of the input and one weight; the rest frozen or not asked for."""
    module.layers[2].requires_grad_(False)
    (x,), y = forward(module)
    w = module.layers[3].feed_forward.up.weight
    return dict(enumerate(torch.autograd.grad(y.sum(), [x, w])))


def inside_torch_checkpointing(module):
    inputs, y = forward(lambda x, mask: checkpoint(module, x, mask, use_reentrant=False))
    return gradients(module, inputs, y)


def one_part_learns(module, learning):
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith(learning))
    inputs, y = forward(module)
    return gradients(module, [x.detach() for x in inputs], y)


WAYS = [two_passes_at_once, a_part_of_the_gradients, inside_torch_checkpointing]
for part in ("layers.0.", "layers.3.feed_forward"):
    WAYS.append(functools.partial(one_part_learns, learning=part))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["dlcl", "dlcl, post", "attnres, gelu"])
def test_the_same_bits_whatever_the_step(case, way):
    keep, *others = allowed(case)
    expected = way(stack(keep, **CASES[case]))
    for policy in others:
        assert_same(way(stack(policy, **CASES[case])), expected)


def test_every_layer_its_own_policy():
    expected = step(stack("none"))
    assert_same(step(stack(POLICIES)), expected)
    plan = SimpleNamespace(recompute=POLICIES[::-1], decoder_recompute=("ffn",) * LAYERS)
    module = stack("none")
    # A layer may be inside a wrapper.
    module.layers[1] = nn.Sequential(module.layers[1])
    module.set_recompute(plan)
    assert module.policies == plan.recompute
    module.layers[1] = module.layers[1][0]
    assert module.layers[1].recompute == "layer"
    assert_same(step(module), expected)
    assert stack(plan, decoder=True).policies == plan.decoder_recompute


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_graph(policy):
    """Residual layers can run again a second time; DLCL's states are gone."""
    if policy != "layer+input":
        module = stack(policy, connection="residual")
        (x,), y = forward(module)
        first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2))
        assert torch.equal(*first, *second)
    _, y = forward(stack(policy))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through one forward pass"):
        y.sum().backward()


# ---- bytes and products --------------------------------------------------------------------------


def kept(policy, layers, **options):
    """Bytes alive after forward, in states (T, D), without gradients' own. Nothing is left behind,
    without the collector: nothing refers to itself in a circle."""
    module = stack(policy, layers=layers, **options)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(16, LENGTH, DIM)
    # Tensors that are made once, such as masks, exist before.
    module(x)
    with LiveBytes() as live:
        y = module(x)
        forward = live.current
        y.sum().backward()
        del y
        # A forward whose backward never comes.
        module(x)
        assert live.current <= 0
    return forward / (4 * 16 * LENGTH * DIM)


H = FFN / DIM
# What a layer keeps, in states (T, D).
WIDTHS = [
    # A state y; n, q k v, o and s; h. In post-norm the sum before the last layer-norm beside.
    ({}, {"none": 7 + H, "ffn": 7, "layer": 2, "layer+input": 1}),
    ({"connection": "residual"}, {"none": 6 + H, "ffn": 6, "layer": 1}),
    ({"norm": "post"}, {"none": 8 + H, "ffn": 8, "layer": 2, "layer+input": 1}),
    # The second n too, and of h: g, u, silu(g) and what the last product reads.
    ({"activation": "swiglu"}, {"none": 8 + 4 * H, "ffn": 8}),
    # Scaled weights, but nothing for each token.
    ({"connection": "latent"}, {"none": 6 + H}),
    # A state for each read; where each sublayer reads, neither n nor s.
    (
        {"connection": "attnres", "reads": 1},
        {"none": 7 + H, "ffn": 7, "layer": 2, "layer+input": 1},
    ),
    ({"connection": "block_attnres"}, {"none": 6 + H, "ffn": 6, "layer": 2, "layer+input": 2}),
]


@pytest.fixture
def no_gc():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(("options", "widths"), WIDTHS, ids=str)
def test_bytes_of_a_layer(options, widths):
    """Statistics, (T,) each, come to less than one state here."""
    attends = options.get("connection") in ATTENTION_RESIDUALS
    # Six numbers for each row and token of attention over depth.
    statistics = 6 * options.get("reads", 2) / DIM if attends else 0
    for policy, width in widths.items():
        few, more = (kept(policy, n, **options) for n in (1, 3))
        more_than = (more - few) / 2 - statistics - width
        assert -0.01 <= more_than < (0.7 if attends else 0.9), policy


@pytest.mark.parametrize(("policy", "again"), [("ffn", 1), ("layer", 3)])
def test_products_made_again(policy, again):
    """Of the four of a layer's forward; never the last."""

    def count(recompute):
        module = TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.1, recompute=recompute)
        x = torch.randn(24, DIM, requires_grad=True)
        with Seen() as seen:
            module.forward_packed(x, Packing(3, 8)).sum().backward()
        products = sum(name in ("aten::mm", "aten::addmm") for name in seen.names)
        return products, seen.names.count("deepfast::attention_forward")

    attention = 2 if policy == "layer" else 1
    assert (count("none"), count(policy)) == ((12, 1), (12 + again, attention))
