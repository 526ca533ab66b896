"""Recompute policies: the same bits as `none` in every kind of step, with hooks on layers too."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.memory import POLICIES
from deepfast.nn import LayerNorm
from deepfast.policies import RERUN
from tests.nn.policies import (
    CASES,
    DIM,
    LAYERS,
    OTHERS,
    allowed,
    assert_same,
    forward,
    gradients,
    pairs,
    stack,
    step,
)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_keep(case):
    padding = CASES[case].get("padding", False)
    expected = step(stack("none", **CASES[case]), padding=padding)
    for policy in allowed(case, OTHERS):
        module = stack(policy, **CASES[case])
        assert module.policies == (policy,) * LAYERS
        assert_same(step(module, padding=padding), expected)


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
    """They take the place of fused ops, with the same numbers."""

    class Halved(nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x)

    seen, layer, attention = [], module.layers[1], module.layers[2].attention
    layer.feed_forward.down.register_forward_hook(lambda *_: seen.append(1))
    if layer.feed_forward_norm is not None:
        layer.feed_forward_norm.register_forward_hook(lambda *_: None)
    old = attention.query_key_value
    attention.query_key_value = Halved(DIM, 3 * DIM)
    attention.query_key_value.load_state_dict(old.state_dict())
    result = step(module)
    assert seen
    return result


def a_projection_without_bias(module):
    attention = module.layers[2].attention
    weight = attention.query_key_value.weight
    attention.query_key_value = nn.Linear(DIM, 3 * DIM, bias=False)
    attention.query_key_value.weight = weight
    return step(module)


def norms_without_parameters(module):
    for k in range(4):
        module.connection.norms[k] = LayerNorm(DIM, elementwise_affine=k % 2 == 0, bias=False)
    for layer in module.layers:
        layer.feed_forward_norm = LayerNorm(DIM, elementwise_affine=False)
    return step(module)


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
        a_projection_without_bias, norms_without_parameters, inside_torch_checkpointing,
        functional_call,
    )
}  # fmt: skip
WAYS |= {f"{part} learns": one_part_learns(part) for part in ("layers.2.", "layers.0.")}
WAYS["the top feed-forward learns"] = one_part_learns("layers.4.feed_forward")
WAYS |= {"frozen": frozen_before_backward(True), "unfrozen": frozen_before_backward(False)}
CHANGES = "functional_call", "frozen", "unfrozen"
"""Ways in which a layer is another one in backward."""


# A post-norm stack has no norms outside its layers.
@pytest.mark.only_if(lambda case, way: (case, way) != ("dlcl, post", "norms_without_parameters"))
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


@pytest.mark.parametrize(("case", "policy"), pairs(["dlcl", "residual", "decoder, post"]))
def test_inference_mode(case, policy):
    with torch.no_grad():
        expected = forward(stack("none", **CASES[case]).eval())[1]
    with torch.inference_mode():
        assert torch.equal(forward(stack(policy, **CASES[case]).eval())[1], expected)
