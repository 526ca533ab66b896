"""What is run again in backward uses what forward used, or backward raises one clear error.

The stack changes between forward and backward. The gradients must be those of an unchanged stack
under the policy "keep".
"""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from deepfast.memory import POLICIES
from deepfast.memory.policies import RERUN
from deepfast.nn import Packing
from tests.nn.policies import (
    BATCH,
    CASES,
    DIM,
    LENGTH,
    assert_same,
    forward,
    stack,
)

REFUSED = "memory policy|modified by an inplace operation"
LAYER = 2
"""The layer that changes."""

STACKS = {
    name: CASES[name] for name in ("dlcl", "residual", "residual, post, gelu", "decoder", "latent")
}
READ = [f"{part}.weight" for part in (
    "attention.query_key_value", "attention.out", "feed_forward.up", "feed_forward.down",
    "feed_forward_norm",
)]  # fmt: skip
"""What backward of a layer reads under every policy."""


def gradients(module, inputs, y):
    y.float().mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def unchanged(**options):
    module = stack("keep", **options)
    return gradients(module, *forward(module))


def serves(policy, options):
    return policy != "history" or options.get("connection", "dlcl") == "dlcl"


def equal_or_refused(module, inputs, y, expected, among=None):
    """Whether backward raised; where it did not, the gradients must be the expected ones."""
    found, error = None, None
    try:
        found = gradients(module, inputs, y)
    except RuntimeError as raised:
        error = str(raised)
    if found is None:
        assert re.search(REFUSED, error), error
        return True
    names = among or expected.keys() & found.keys()
    assert_same({n: found[n] for n in names}, {n: expected[n] for n in names})
    return False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", STACKS)
def test_a_parameter_modified_in_place(case, policy):
    """Every parameter of a layer, one at a time, biases among them."""
    options = STACKS[case]
    if not serves(policy, options):
        pytest.skip("there are no states to mix from")
    expected = unchanged(**options)
    names = [name for name, _ in stack("keep", **options).layers[LAYER].named_parameters()]
    names = [f"layers.{LAYER}.{name}" for name in names]
    names += [n for n, _ in stack("keep", **options).connection.named_parameters("connection")]
    for name in names:
        module = stack(policy, **options)
        inputs, y = forward(module)
        with torch.no_grad():
            module.get_parameter(name).add_(0.5)
        refused = equal_or_refused(module, inputs, y, expected)
        own = name.removeprefix(f"layers.{LAYER}.")
        if own in READ or (policy in RERUN and own != name):
            assert refused, name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [case for case in STACKS if case != "latent"])
def test_the_data_of_a_bias_replaced(case, policy):
    """A plain stack reads no bias in backward. What it reads, torch takes from the new data: the
    weights, and with latent depth the biases, which a gate multiplies."""
    options = STACKS[case]
    if not serves(policy, options):
        pytest.skip("there are no states to mix from")
    expected = unchanged(**options)
    module = stack(policy, **options)
    inputs, y = forward(module)
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            p.data = p.data + 0.5
    equal_or_refused(module, inputs, y, expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [case for case in STACKS if case != "latent"])
def test_on_the_meta_device(case, policy):
    if not serves(policy, STACKS[case]):
        return
    module = stack(policy, **STACKS[case]).to("meta")
    with torch.device("meta"):
        inputs, y = forward(module)
    y.sum().backward()
    assert all(x.grad.is_meta and x.grad.shape == x.shape for x in inputs)


def replace_parameter(layer):
    for linear in (layer.attention.query_key_value, layer.feed_forward.up):
        linear.weight = nn.Parameter(linear.weight.detach() + 1)
        linear.bias = nn.Parameter(linear.bias.detach() + 1)


def replace_data(layer):
    for p in layer.attention.query_key_value.parameters():
        p.data = p.data + 1


def replace_module(layer):
    layer.feed_forward.up = nn.Linear(layer.feed_forward.up.in_features, 40)


def change_dropout(layer):
    layer.dropout = layer.feed_forward.dropout = layer.attention.dropout = 0.7


def add_hook(layer):
    layer.feed_forward_norm.register_forward_hook(lambda *_: None)
    layer.attention.query_key_value.register_forward_hook(lambda _m, _x, y: 2 * y)
    layer.register_forward_pre_hook(lambda _m, args: (args[0] + 1, *args[1:]))


def add_parametrization(layer):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    parametrize.register_parametrization(layer.feed_forward.up, "weight", Doubled(), unsafe=True)


CHANGES = {
    "a parameter is replaced": replace_parameter,
    "the data of a parameter is replaced": replace_data,
    "a module is replaced": replace_module,
    "evaluation": lambda layer: layer.eval(),
    "another dropout": change_dropout,
    "hooks": add_hook,
    "another policy": lambda layer: setattr(layer, "memory", "leaner"),
    "another activation": lambda layer: setattr(layer.feed_forward, "activation", "gelu"),
    "a parametrization": add_parametrization,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_changed_before_backward(change, policy):
    expected = unchanged()
    module = stack(policy)
    names = dict(module.named_parameters()).keys()
    inputs, y = forward(module)
    CHANGES[change](module.layers[LAYER])
    among = {n for n in names if not n.startswith(f"layers.{LAYER}.")} | {"input 0"}
    equal_or_refused(module, inputs, y, expected, among if "para" in change else None)
    # What was changed stays changed.
    assert change != "evaluation" or not module.layers[LAYER].training


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["dlcl", "residual"])
def test_functional_call(case, policy):
    """Backward uses the parameters that were passed, not the module's own."""
    options = CASES[case]
    if not serves(policy, options):
        pytest.skip("there are no states to mix from")

    results = []
    for memory in ("keep", policy):
        module = stack(memory, **options)
        torch.manual_seed(4)
        given = {
            name: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_()
            for name, p in module.named_parameters()
        }
        torch.manual_seed(2)
        x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
        y = torch.func.functional_call(module, given, (x,))
        y.square().sum().backward()
        assert all(p.grad is None for p in module.parameters())
        results.append({name: p.grad for name, p in given.items()} | {"x": x.grad})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES[:-1])
@pytest.mark.parametrize("case", ["decoder", "decoder, residual"])
def test_the_encoder_output_modified_in_place(case, policy):
    options = {name: value for name, value in CASES[case].items() if name != "padding"}

    def run(policy):
        module = stack(policy, **options)
        torch.manual_seed(2)
        x = torch.randn(BATCH * LENGTH, DIM, requires_grad=True)
        source = torch.randn(BATCH * LENGTH, DIM, requires_grad=True)
        encoded, packing = source * 1, Packing(BATCH, LENGTH)
        y = module.forward_packed(x, packing, encoded, packing)
        return module, [x, source], encoded, y

    module, inputs, _, y = run("keep")
    expected = gradients(module, inputs, y)
    module, inputs, encoded, y = run(policy)
    with torch.no_grad():
        encoded.add_(1)
    equal_or_refused(module, inputs, y, expected)


class Scaled(nn.Linear):
    """A foreign linear map with a buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def add_buffer(module):
    up = module.layers[LAYER].feed_forward.up
    new = module.layers[LAYER].feed_forward.up = Scaled(up.in_features, up.out_features)
    new.load_state_dict(up.state_dict(), strict=False)


def add_tensor_attribute(module):
    """A tensor that is neither a parameter nor a buffer."""
    up = module.layers[LAYER].feed_forward.up
    up.scale = torch.full((), 1.5)
    up.forward = lambda x: nn.functional.linear(x, up.weight, up.bias) * up.scale


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", ["in place", "replaced"])
@pytest.mark.parametrize("add", [add_buffer, add_tensor_attribute])
def test_another_tensor_of_a_layer_changed_before_backward(add, change, policy):
    def run(policy):
        module = stack(policy)
        add(module)
        return module, *forward(module)

    expected = gradients(*run("keep"))
    module, inputs, y = run(policy)
    up = module.layers[LAYER].feed_forward.up
    if change == "in place":
        up.scale.mul_(3)
    else:
        up.scale = torch.full((), 3.0)
    equal_or_refused(module, inputs, y, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_norm_that_gets_another_eps(policy):
    module = stack(policy)
    inputs, y = forward(module)
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 0.5
    assert_same(gradients(module, inputs, y), unchanged())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("learned", [True, False])
def test_a_layer_frozen_or_unfrozen_before_backward(learned, policy):
    """A parameter that no longer learns gets no gradient; all others get theirs."""

    def run(policy):
        module = stack(policy)
        layer = module.layers[LAYER].requires_grad_(learned)
        inputs, y = forward(module)
        layer.requires_grad_(not learned)
        found = gradients(module, inputs, y)
        assert all(p.requires_grad != learned for p in layer.parameters())
        return found

    found, expected = run(policy), run("keep")
    assert_same(found, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_changes_its_own_buffers(policy):
    """Spectral norm takes another step in each forward of training, so a rerun would differ."""

    def run(policy):
        module = stack(policy)
        torch.manual_seed(5)
        parametrizations.spectral_norm(module.layers[LAYER].feed_forward.down)
        return module, *forward(module)

    expected = gradients(*run("keep"))
    assert equal_or_refused(*run(policy), expected) == (policy in RERUN)


@pytest.mark.parametrize("policy", RERUN)
def test_autocast_around_backward_does_not_reach_the_rerun(policy):
    module, seen = stack(policy), []
    module.layers[LAYER].feed_forward.up.register_forward_hook(
        lambda _m, _x, y: seen.append(y.dtype)
    )
    inputs, y = forward(module)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(module, inputs, y)
    assert seen == [torch.float32] * 2
