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
from deepfast.policies import RERUN
from tests.nn.policies import (
    BATCH,
    CASES,
    DIM,
    FFN,
    LENGTH,
    assert_same,
    forward,
    gradients,
    pairs,
)
from tests.nn.policies import stack as any_stack

REFUSED = "recompute policy|modified by an inplace operation"
LAYER = 1
"""The layer that changes."""

stack = functools.partial(any_stack, layers=3)

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


@pytest.mark.parametrize(
    ("case", "policy"),
    [*pairs(["dlcl", "residual, post, gelu"]), *pairs(["decoder", "latent"], ("ffn", "layer"))],
)
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


class Up(nn.Linear):
    """A foreign linear map that also reads a buffer, a tensor that is neither a parameter nor a
    buffer, an attribute that is None, and a number; and stores a result, which it does not read."""

    def __init__(self, up):
        super().__init__(up.in_features, up.out_features)
        self.load_state_dict(up.state_dict())
        self.register_buffer("scale", torch.ones(()))
        self.factor, self.gate, self.calls, self.mean = torch.full((), 1.5), None, 0, None

    def forward(self, x):
        y = super().forward(x) * self.scale * self.factor * (1 if self.gate is None else self.gate)
        self.mean = y.detach().mean()
        return y


class Counting(Up):
    """A number and a buffer that each forward replaces, and reads."""

    def forward(self, x):
        self.calls += 1
        self.scale = self.scale + 1
        return super().forward(x) * self.calls


class Spoiling(Up):
    """A buffer that each forward reads, modifies in place and replaces."""

    def forward(self, x):
        y = nn.Linear.forward(self, x) * self.scale.clone()
        self.scale = self.scale.add_(1).clone()
        return y


class Tripled(Up):
    def forward(self, x):
        return 3 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def spectral_norm(layer):
    """It changes its buffers in each forward of training, so a rerun would differ."""
    torch.manual_seed(5)
    parametrizations.spectral_norm(layer.feed_forward.down)


def replace_parameters(layer):
    for linear in (layer.attention.query_key_value, layer.feed_forward.up):
        linear.weight = nn.Parameter(linear.weight.detach() + 1)
        linear.bias = nn.Parameter(linear.bias.detach() + 1)


def replace_data(layer):
    for p in layer.attention.query_key_value.parameters():
        p.data = p.data + 1


def change_options(layer):
    layer.dropout = layer.feed_forward.dropout = layer.attention.dropout = 0.7
    layer.recompute, layer.feed_forward.activation = "ffn", "gelu"


def add_hooks(layer):
    layer.feed_forward_norm.register_forward_hook(lambda *_: None)
    layer.attention.query_key_value.register_forward_hook(lambda _m, _x, y: 2 * y)


def add_parametrization(layer):
    parametrize.register_parametrization(layer.feed_forward.up, "weight", Doubled(), unsafe=True)


def up_becomes(kind):
    """The layer reads and writes what this kind of linear map does."""

    def prepare(layer):
        layer.feed_forward.up = kind(layer.feed_forward.up)

    return prepare


def set_up(**attributes):
    def alter(layer):
        for name, value in attributes.items():
            setattr(layer.feed_forward.up, name, value)

    return alter


def nothing(_layer):
    pass


THREE = torch.full((), 3.0)
# What a layer gets before forward, how it changes after it, and the policies that refuse it.
CHANGES = {
    "parameters are replaced": (nothing, replace_parameters, RERUN),
    "data is replaced": (nothing, replace_data, RERUN),
    "a module is replaced": (nothing, lambda m: setattr(m.feed_forward, "up", nn.Linear(DIM, FFN)),
                             RERUN),
    "evaluation": (nothing, nn.Module.eval, RERUN),
    "other options": (nothing, change_options, RERUN),
    "hooks": (nothing, add_hooks, RERUN),
    "a hook before": (nothing, lambda m: m.register_forward_pre_hook(
        lambda _, args: (args[0] + 1, *args[1:])), RERUN),
    "a parametrization": (nothing, add_parametrization, POLICIES),
    "a buffer is replaced": (up_becomes(Up), set_up(scale=THREE), RERUN),
    "a buffer, in place": (up_becomes(Up), lambda m: m.feed_forward.up.scale.mul_(3), POLICIES),
    "an attribute is replaced": (up_becomes(Up), set_up(factor=THREE), RERUN),
    "an attribute, in place": (up_becomes(Up), lambda m: m.feed_forward.up.factor.mul_(3),
                               POLICIES),
    "an attribute that was None": (up_becomes(Up), set_up(gate=0.5), RERUN),
    "the class of a module": (up_becomes(Up), set_up(__class__=Tripled), RERUN),
    "buffers that a layer changes itself": (spectral_norm, nothing, RERUN),
    "results that a layer stores": (up_becomes(Up), nothing, ()),
    "what a layer counts": (up_becomes(Counting), nothing, ()),
    "what a layer modifies and replaces": (up_becomes(Spoiling), nothing, RERUN),
}  # fmt: skip


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
def test_what_surrounds_a_layer_changes(policy):
    """The stack's norms have the eps of forward, those of a layer too or it is refused. A mask may
    be written to after forward."""

    def run(policy):
        module, mask = stack(policy), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[1, 3:] = True
        torch.manual_seed(2)
        x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
        return module, [x], module(x, mask), mask

    expected = gradients(*run("none")[:3])
    for changed in ("connection", "layers", "mask"):
        *ran, mask = run(policy)
        for part in getattr(ran[0], changed, nn.Module()).modules():
            if hasattr(part, "eps"):
                part.eps = 0.5
        if changed == "mask":
            mask.zero_()
        refused = equal_or_refused(*ran, expected)
        assert refused == (changed == "layers" and policy in RERUN), changed


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
