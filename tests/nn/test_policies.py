"""Recompute policies: the same bits as `none` in every kind of step, with hooks on layers too; the
bytes they keep, the products they recompute, and no leaks."""

import gc
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from deepfast.memory import POLICIES, LiveBytes
from deepfast.nn import LayerNorm, Packing, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS, RERUN
from tests.nn.policies import (
    CASES,
    DIM,
    FFN,
    LAYERS,
    LENGTH,
    OTHERS,
    allowed,
    assert_same,
    forward,
    gradients,
    stack,
    step,
)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_keep(case):
    """Also in inference mode."""
    padding = CASES[case].get("padding", False)
    expected = step(stack("none", **CASES[case]), padding=padding)
    with torch.no_grad():
        output = forward(stack("none", **CASES[case]).eval())[1]
    for policy in allowed(case, OTHERS):
        module = stack(policy, **CASES[case])
        assert module.policies == (policy,) * LAYERS
        assert_same(step(module, padding=padding), expected)
        with torch.inference_mode():
            assert torch.equal(forward(module.eval())[1], output)


@pytest.mark.parametrize("case", ["dlcl", "residual", "decoder", "dlcl, post", "decoder, latent",
                                  "attnres", "attnres, one read", "decoder, attnres"])  # fmt: skip
def test_the_same_bits_under_autocast(case):
    expected = step(stack("none", **CASES[case]), autocast=True)
    for policy in allowed(case, OTHERS):
        got = step(stack(policy, **CASES[case]), autocast=True)
        if policy == "layer" and case in ("dlcl", "decoder", "attnres, one read"):
            # Recomputation rounds x to bf16 before its layer-norm, forward rounds after it.
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=0.05, atol=0.05)
        else:
            assert_same(got, expected)


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


def evaluation(module):
    with torch.no_grad():
        out = forward(module.eval())[1]
    return step(module) | {"without gradient": out}


def hooks_and_modules_of_others(module):
    """They take the place of fused ops; a projection without bias, norms without parameters."""

    class Halved(nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x)

    seen, layer = [], module.layers[1]
    layer.feed_forward.down.register_forward_hook(lambda *_: seen.append(1))
    if layer.feed_forward_norm is not None:
        layer.feed_forward_norm.register_forward_hook(lambda *_: None)
    for k, kind in ((2, Halved), (3, nn.Linear)):
        attention = module.layers[k].attention
        weight = attention.query_key_value.weight
        attention.query_key_value = kind(DIM, 3 * DIM, bias=kind is Halved)
        attention.query_key_value.weight = weight
    # A post-norm stack has no norms outside its layers.
    for k in range(4 if module.connection.norms else 0):
        module.connection.norms[k] = LayerNorm(DIM, elementwise_affine=k % 2 == 0, bias=False)
    for layer in module.layers[2:]:
        layer.feed_forward_norm = LayerNorm(DIM, elementwise_affine=False)
    result = step(module)
    assert seen
    return result


def inside_torch_checkpointing(module):
    class Wrapped(nn.Module):
        def forward(self, x, mask):
            return checkpoint(module, x, mask, use_reentrant=False)

    wrapped = Wrapped()
    wrapped.inner = module
    return step(wrapped)


def functional_call(module):
    """Backward uses the parameters that were passed, not the module's own."""
    torch.manual_seed(4)
    given = {
        name: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_()
        for name, p in module.named_parameters()
    }

    class Called(nn.Module):
        def forward(self, *inputs):
            return torch.func.functional_call(module, given, inputs)

    (x,), y = forward(Called())
    y.square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    return {name: p.grad for name, p in given.items()} | {"x": x.grad}


def one_part_learns(learning):
    def run(module):
        for name, p in module.named_parameters():
            p.requires_grad_(name.startswith(learning))
        inputs, y = forward(module)
        return gradients(module, [x.detach() for x in inputs], y)

    return run


def frozen_before_backward(learned):
    """A parameter that does not learn in backward gets no gradient; all others get theirs."""

    def run(module):
        layer = module.layers[2].requires_grad_(learned)
        inputs, y = forward(module)
        layer.requires_grad_(not learned)
        found = gradients(module, inputs, y)
        assert all(p.requires_grad != learned for p in layer.parameters())
        return found

    return run


WAYS = {
    way.__name__: way
    for way in (
        two_passes_at_once, a_part_of_the_gradients, evaluation, hooks_and_modules_of_others,
        inside_torch_checkpointing, functional_call,
    )
}  # fmt: skip
WAYS |= {f"{part} learns": one_part_learns(part) for part in ("layers.2.", "layers.0.")}
WAYS["the top feed-forward learns"] = one_part_learns("layers.4.feed_forward")
WAYS |= {"frozen": frozen_before_backward(True), "unfrozen": frozen_before_backward(False)}
CHANGES = "functional_call", "frozen", "unfrozen"
"""Ways in which a layer is another one in backward."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["dlcl", "dlcl, post", "attnres, gelu"])
def test_the_same_bits_whatever_the_step(case, way):
    expected = WAYS[way](stack("none", **CASES[case]))
    for policy in OTHERS:
        module = stack(policy, **CASES[case])
        # Where parts read, the feed-forward block runs again under "ffn" too.
        again = policy in RERUN or "attnres" in case
        if again and way in CHANGES:
            with pytest.raises(RuntimeError, match=r"recompute policy: .* modified since"):
                WAYS[way](module)
        else:
            assert_same(WAYS[way](module), expected)


def test_every_layer_its_own_policy():
    expected = step(stack("none"))
    for policies in (POLICIES, POLICIES[::-1]):
        assert_same(step(stack((*policies, "layer"))), expected)
    plan = SimpleNamespace(
        recompute=("layer+input", "layer", "layer", "none", "ffn"),
        decoder_recompute=("ffn",) * LAYERS,
    )
    module = stack("none")
    # A layer may be inside a wrapper.
    module.layers[1] = nn.Sequential(module.layers[1])
    module.set_recompute(plan)
    assert module.policies == plan.recompute
    assert module.layers[1][0].recompute == "layer"
    module.layers[1] = module.layers[1][0]
    assert_same(step(module), expected)
    assert stack(plan, decoder=True).policies == plan.decoder_recompute
    with pytest.raises(ValueError, match="got 'most'"):
        module.set_recompute("most")
    assert module.policies == plan.recompute


@pytest.mark.parametrize("policy", OTHERS)
def test_a_retained_graph(policy):
    """Residual layers can run again a second time; DLCL's states are gone, as without a policy."""
    if policy != "layer+input":
        module = stack(policy, connection="residual")
        (x,), y = forward(module)
        y.sum().backward(retain_graph=True)
        first, x.grad = x.grad, None
        y.sum().backward()
        assert torch.equal(first, x.grad)
    (x,), y = forward(stack(policy))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through one forward pass"):
        y.sum().backward()


# ---- bytes and products --------------------------------------------------------------------------


def kept(connection, policy, layers, norm, reads=None):
    """Bytes alive after forward, in states (T, D), without gradients' own."""
    module = stack(policy, layers=layers, connection=connection, norm=norm, reads=reads)
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
    assert live.current <= 0
    return forward / (4 * 16 * LENGTH * DIM)


# Connection, norm, reads of a layer, and in states (T, D) what it keeps, under "none" without h.
WIDTHS = [
    # A state y; n, q k v, o and s. In post-norm the sum before the last layer-norm beside.
    ("dlcl", "pre", 1, {"none": 7, "ffn": 7, "layer": 2, "layer+input": 1}),
    ("residual", "pre", 1, {"none": 6, "ffn": 6, "layer": 1}),
    ("dlcl", "post", 1, {"none": 8, "ffn": 8, "layer": 2, "layer+input": 1}),
    # A state for each read; where each sublayer reads, neither n nor s.
    ("attnres", "pre", 1, {"none": 7, "ffn": 7, "layer": 2, "layer+input": 1}),
    ("block_attnres", "pre", 2, {"none": 6, "ffn": 6, "layer": 2, "layer+input": 2}),
]


@pytest.mark.parametrize(("connection", "norm", "reads", "widths"), WIDTHS)
def test_bytes_of_a_layer(connection, norm, reads, widths):
    """ "none" keeps h beside; statistics, (T,) each, come to less than one state here."""
    attends = connection in ATTENTION_RESIDUALS
    # Six numbers for each row and token of attention over depth.
    statistics = 6 * reads / DIM if attends else 0
    for policy, width in widths.items():
        width += FFN / DIM if policy == "none" else 0
        few, more = (kept(connection, policy, n, norm, reads if attends else None) for n in (2, 6))
        more_than = (more - few) / 4 - statistics - width
        assert -0.01 <= more_than < (0.7 if attends else 0.9), policy


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("connection", ["dlcl", "attnres"])
def test_nothing_is_left_behind(connection, policy):
    """Without the collector: nothing refers to itself in a circle."""
    module = stack(policy, connection=connection)
    step(module)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            step(module)
            assert live.current <= 64
            # A forward whose backward never comes.
            forward(module)
            assert live.current <= 64
    finally:
        gc.enable()


class Products(TorchDispatchMode):
    """Floating-point operations of matrix products and attention, by op."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.counts[str(func.overloadpacket)] += count
        return out


@pytest.mark.parametrize(("policy", "again"), [("ffn", 4), ("layer", 8)])
def test_products_made_again(policy, again):
    """Recomputed out of the 12 D^2 of a layer's forward with F = 4 D; never the last 4 D^2."""
    dim, tokens = 32, 24

    def count(recompute):
        module = TransformerEncoder(1, dim, 2, 4 * dim, dropout=0.1, recompute=recompute)
        x = torch.randn(tokens, dim, requires_grad=True)
        with Products() as products:
            module.forward_packed(x, Packing(3, 8)).sum().backward()
        return products.counts

    keep, counts = count("none"), count(policy)
    attention = "deepfast.attention"
    assert counts.pop(attention) == keep.pop(attention) * (2 if policy == "layer" else 1)
    extra = sum(counts.values()) - sum(keep.values())
    assert extra == 2 * again * tokens * dim * dim
    assert sum(keep.values()) > 2 * 36 * tokens * dim * dim
