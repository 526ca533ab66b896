"""What is run again in backward uses what forward used, or backward raises one clear error.

The stack changes between forward and backward. The gradients must be those of an unchanged stack
under the policy "none".
"""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from deepfast.memory import POLICIES
from deepfast.nn import Packing
from deepfast.policies import RERUN
from tests.nn.policies import BATCH, CASES, DIM, LENGTH, assert_same, forward, gradients, pairs
from tests.nn.policies import stack as any_stack

REFUSED = "recompute policy|modified by an inplace operation"
LAYER = 1
"""The layer that changes."""

stack = functools.partial(any_stack, layers=3)

STACKS = ["dlcl", "residual", "residual, post, gelu", "decoder"]
READ = [f"{part}.weight" for part in (
    "attention.query_key_value", "attention.out", "feed_forward.up", "feed_forward.down",
    "feed_forward_norm",
)]  # fmt: skip
"""What backward of a layer reads under every policy."""


def unchanged(case="dlcl"):
    module = stack("none", **CASES[case])
    return gradients(module, *forward(module))


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


@pytest.mark.parametrize(("case", "policy"), pairs([*STACKS, "latent"]))
def test_a_parameter_modified_in_place(case, policy):
    """Every parameter of a layer, one at a time, biases among them."""
    expected = unchanged(case)
    plain = stack("none", **CASES[case])
    names = [f"layers.{LAYER}.{name}" for name, _ in plain.layers[LAYER].named_parameters()]
    names += [name for name, _ in plain.connection.named_parameters("connection")]
    for name in names:
        module = stack(policy, **CASES[case])
        inputs, y = forward(module)
        with torch.no_grad():
            module.get_parameter(name).add_(0.5)
        refused = equal_or_refused(module, inputs, y, expected)
        own = name.removeprefix(f"layers.{LAYER}.")
        if own in READ or (policy in RERUN and own != name):
            assert refused, name


@pytest.mark.parametrize(("case", "policy"), pairs(["dlcl"]))
def test_on_the_meta_device(case, policy):
    module = stack(policy, **CASES[case]).to("meta")
    with torch.device("meta"):
        inputs, y = forward(module)
    y.sum().backward()
    assert all(x.grad.is_meta and x.grad.shape == x.shape for x in inputs)


class Scaled(nn.Linear):
    """A foreign linear map with a buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def add_buffer(layer):
    up = layer.feed_forward.up
    layer.feed_forward.up = Scaled(up.in_features, up.out_features)
    layer.feed_forward.up.load_state_dict(up.state_dict(), strict=False)


def add_attribute(layer):
    """A tensor that is neither a parameter nor a buffer."""
    up = layer.feed_forward.up
    up.scale = torch.full((), 1.5)
    up.forward = lambda x: nn.functional.linear(x, up.weight, up.bias) * up.scale


def add_spectral_norm(layer):
    """It changes its buffers in each forward of training, so a rerun would differ."""
    torch.manual_seed(5)
    parametrizations.spectral_norm(layer.feed_forward.down)


def as_it_is(_layer):
    pass


def replace_parameters(layer):
    for linear in (layer.attention.query_key_value, layer.feed_forward.up):
        linear.weight = nn.Parameter(linear.weight.detach() + 1)
        linear.bias = nn.Parameter(linear.bias.detach() + 1)


def replace_data(layer):
    for p in layer.attention.query_key_value.parameters():
        p.data = p.data + 1


def replace_module(layer):
    layer.feed_forward.up = nn.Linear(layer.feed_forward.up.in_features, 40)


def replace_scale(layer):
    layer.feed_forward.up.scale = torch.full((), 3.0)


def scale_in_place(layer):
    layer.feed_forward.up.scale.mul_(3)


def change_options(layer):
    layer.dropout = layer.feed_forward.dropout = layer.attention.dropout = 0.7
    layer.recompute, layer.feed_forward.activation = "ffn", "gelu"


def add_hooks(layer):
    layer.feed_forward_norm.register_forward_hook(lambda *_: None)
    layer.attention.query_key_value.register_forward_hook(lambda _m, _x, y: 2 * y)


def add_hook_before(layer):
    layer.register_forward_pre_hook(lambda _m, args: (args[0] + 1, *args[1:]))


def add_parametrization(layer):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    parametrize.register_parametrization(layer.feed_forward.up, "weight", Doubled(), unsafe=True)


def add_result(layer):
    """Each forward stores a result, which it does not read."""
    up = layer.feed_forward.up
    up.mean = torch.zeros(())
    forward = up.forward

    def storing(x):
        up.mean = x.detach().mean()
        return forward(x)

    up.forward = storing


def add_gate(layer):
    """An attribute that is None in forward."""
    up = layer.feed_forward.up
    up.gate = None
    up.forward = lambda x: nn.Linear.forward(up, x) * (1 if up.gate is None else up.gate)


def set_gate(layer):
    layer.feed_forward.up.gate = 0.5


class Tripled(nn.LayerNorm):
    def forward(self, x):
        return 3 * super().forward(x)


def add_norm(layer):
    layer.feed_forward.up = nn.Sequential(nn.LayerNorm(DIM), layer.feed_forward.up)


def change_class(layer):
    layer.feed_forward.up[0].__class__ = Tripled


def add_counters(layer):
    """A number and a buffer that each forward replaces, and reads."""
    up = layer.feed_forward.up
    up.calls = 0
    up.register_buffer("table", torch.ones(0))

    def counting(x):
        up.calls += 1
        up.table = torch.cat([up.table, torch.ones(1)])
        return nn.Linear.forward(up, x) * up.calls * len(up.table)

    up.forward = counting


def add_spoiled_buffer(layer):
    """A buffer that each forward reads, modifies in place and replaces."""
    up = layer.feed_forward.up
    up.register_buffer("scale", torch.ones(()))

    def spoiling(x):
        y = nn.Linear.forward(up, x) * up.scale.clone()
        up.scale = up.scale.add_(1).clone()
        return y

    up.forward = spoiling


# What a layer gets before forward, how it changes after it, and the policies that refuse it.
CHANGES = {
    "parameters are replaced": (as_it_is, replace_parameters, RERUN),
    "data is replaced": (as_it_is, replace_data, RERUN),
    "a module is replaced": (as_it_is, replace_module, RERUN),
    "evaluation": (as_it_is, nn.Module.eval, RERUN),
    "other options": (as_it_is, change_options, RERUN),
    "hooks": (as_it_is, add_hooks, RERUN),
    "a hook before": (as_it_is, add_hook_before, RERUN),
    "a parametrization": (as_it_is, add_parametrization, POLICIES),
    "a buffer is replaced": (add_buffer, replace_scale, RERUN),
    "a buffer, in place": (add_buffer, scale_in_place, POLICIES),
    "an attribute is replaced": (add_attribute, replace_scale, RERUN),
    "an attribute, in place": (add_attribute, scale_in_place, POLICIES),
    "buffers that a layer changes itself": (add_spectral_norm, as_it_is, RERUN),
    "results that a layer stores": (add_result, as_it_is, ()),
    "an attribute that was None": (add_gate, set_gate, RERUN),
    "the class of a module": (add_norm, change_class, RERUN),
    "what a layer counts": (add_counters, as_it_is, ()),
    "what a layer modifies and replaces": (add_spoiled_buffer, as_it_is, RERUN),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_changed_before_backward(change, policy):
    prepare, alter, refused = CHANGES[change]

    def run(policy):
        module = stack(policy)
        prepare(module.layers[LAYER])
        return module, *forward(module)

    module, inputs, y = run("none")
    expected = gradients(module, inputs, y)
    module, inputs, y = run(policy)
    alter(module.layers[LAYER])
    among = None
    if "replaced" in change:
        # The gradients of what has been replaced go to what was there in forward.
        among = {name for name in expected if not name.startswith(f"layers.{LAYER}.")}
    assert equal_or_refused(module, inputs, y, expected, among) == (policy in refused)


@pytest.mark.parametrize("policy", POLICIES)
def test_norms_that_get_another_eps(policy):
    """Those of the stack and of its connection have the eps of forward, those of a layer too or it
    is refused."""
    for changed in ("connection", "layers"):
        module = stack(policy)
        inputs, y = forward(module)
        for part in getattr(module, changed).modules():
            if hasattr(part, "eps"):
                part.eps = 0.5
        refused = equal_or_refused(module, inputs, y, unchanged())
        assert refused == (changed == "layers" and policy in RERUN)


@pytest.mark.parametrize("policy", POLICIES[:-1])
@pytest.mark.parametrize("case", ["decoder", "decoder, residual"])
def test_the_encoder_output_modified_in_place(case, policy):
    options = {name: value for name, value in CASES[case].items() if name != "padding"}

    def run(policy):
        module = stack(policy, **options)
        torch.manual_seed(2)
        x, source = (torch.randn(BATCH * LENGTH, DIM, requires_grad=True) for _ in range(2))
        encoded, packing = source * 1, Packing(BATCH, LENGTH)
        return module, [x, source], module.forward_packed(x, packing, encoded, packing), encoded

    expected = gradients(*run("none")[:3])
    *ran, encoded = run(policy)
    with torch.no_grad():
        encoded.add_(1)
    equal_or_refused(*ran, expected)


@pytest.mark.parametrize("policy", RERUN)
def test_a_mask_may_be_written_to_after_forward(policy):
    results = []
    for written in (False, True):
        module, mask = stack(policy), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[1, 3:] = True
        torch.manual_seed(2)
        y = module(torch.randn(BATCH, LENGTH, DIM), mask)
        if written:
            mask.zero_()
        results.append(gradients(module, [], y))
    assert_same(*results)


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


def test_a_layer_must_do_the_same_both_times():
    module, calls = stack("layer"), []

    def fickle(_module, inputs):
        calls.append(1)
        return inputs[0].sin() if len(calls) == 1 else inputs[0]

    module.layers[LAYER].feed_forward.down.register_forward_pre_hook(fickle)
    _, y = forward(module)
    with pytest.raises(RuntimeError, match="must do the same when it runs again"):
        y.sum().backward()


def test_an_exception_in_a_rerun_reaches_the_user():
    module, calls = stack("layer+input"), []

    def broken(*_):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("no")

    module.layers[LAYER].attention.out.register_forward_hook(broken)
    _, y = forward(module)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="no"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("case", "policy"), pairs(["residual", "decoder", "decoder, residual"]))
def test_an_attention_may_be_given_something_else(case, policy):
    """If a hook has changed LN(x), LN(x) is not recomputed."""

    def run(policy, plain):
        module = stack(policy, **CASES[case]).double().eval()
        for layer in module.layers:
            part = layer.cross_attention if "decoder" in case else layer.attention
            part.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
            if plain:
                # Makes the layer take the plain path.
                layer.register_forward_pre_hook(lambda *_: None)
                linear = part.query if part.cross else part.query_key_value
                linear.register_forward_hook(lambda *_: None)
        torch.manual_seed(2)
        x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
        inputs = [x, x.detach() * 0.5] if "decoder" in case else [x]
        return gradients(module, [], module(*inputs).pow(3))

    torch.testing.assert_close(run(policy, False), run("none", True))


def test_history_after_its_states_are_gone_is_an_error():
    module, seen = stack("layer+input"), []
    module.layers[2].register_forward_hook(lambda _m, _a, out: seen.append(out))
    _, y = forward(module)
    weight = module.layers[0].feed_forward.up.weight
    torch.autograd.grad(y.square().sum(), [weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients have overwritten them"):
        seen[0][1].square().sum().backward()
