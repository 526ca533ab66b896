"""What is run again in backward uses what forward used, or backward raises one clear error.

The stack changes between forward and backward. The gradients must be those of an unchanged stack
under the policy "none".
"""

import functools
import re

import pytest
import torch
from torch import nn

from deepfast.memory import POLICIES
from deepfast.policies import RERUN
from tests.nn import test_policies
from tests.nn.test_policies import BATCH, CASES, DIM, FFN, LENGTH, assert_same, forward, gradients

REFUSED = "recompute policy|modified by an inplace operation"
LAYER = 1
"""The layer that changes."""

stack = functools.partial(test_policies.stack, layers=3)

READ = [f"{part}.weight" for part in (
    "attention.query_key_value", "attention.out", "feed_forward.up", "feed_forward.down",
    "feed_forward_norm",
)]  # fmt: skip
"""What backward of a layer reads under every policy."""


def equal_or_refused(module, inputs, y, expected, among=None):
    """Whether backward raised; where it did not, the gradients must be the expected ones."""
    try:
        found = gradients(module, inputs, y)
    except RuntimeError as error:
        if not re.search(REFUSED, str(error)):
            raise
        return True
    names = among or expected.keys() & found.keys()
    assert_same({n: found[n] for n in names}, {n: expected[n] for n in names})
    return False


IN_PLACE = [("dlcl", policy) for policy in POLICIES]
IN_PLACE += [("residual, post, gelu", "ffn"), ("decoder", "ffn"), ("latent", "layer")]


@pytest.mark.parametrize(("case", "policy"), IN_PLACE)
def test_a_parameter_modified_in_place(case, policy):
    """Every parameter of a layer, one at a time, biases among them."""
    options = CASES[case] | {"layers": 2}
    plain = stack("none", **options)
    expected = gradients(plain, *forward(plain))
    names = [f"layers.{LAYER}.{name}" for name, _ in plain.layers[LAYER].named_parameters()]
    names += [name for name, _ in plain.connection.named_parameters("connection")]
    for name in names:
        module = stack(policy, **options)
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
    "frozen": (nothing, lambda m: m.requires_grad_(False), RERUN),
    "no longer frozen": (lambda m: m.requires_grad_(False), nn.Module.requires_grad_, RERUN),
    "other options": (nothing, change_options, RERUN),
    "hooks": (nothing, add_hooks, RERUN),
    "a hook before": (nothing, lambda m: m.register_forward_pre_hook(
        lambda _, args: (args[0] + 1, *args[1:])), RERUN),
    "a buffer is replaced": (up_becomes(Up), set_up(scale=THREE), RERUN),
    "a buffer, in place": (up_becomes(Up), lambda m: m.feed_forward.up.scale.mul_(3), POLICIES),
    "an attribute is replaced": (up_becomes(Up), set_up(factor=THREE), RERUN),
    "an attribute, in place": (up_becomes(Up), lambda m: m.feed_forward.up.factor.mul_(3),
                               POLICIES),
    "an attribute that was None": (up_becomes(Up), set_up(gate=0.5), RERUN),
    "the class of a module": (up_becomes(Up), set_up(__class__=Counting), RERUN),
    "results that a layer stores": (up_becomes(Up), nothing, ()),
    "what a layer counts": (up_becomes(Counting), nothing, ()),
    "what a layer modifies and replaces": (up_becomes(Spoiling), nothing, RERUN),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["ffn", "layer+input"])
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
    if "replaced" in change or change == "frozen":
        # The gradients of what has been replaced go to what was there in forward.
        among = {name for name in expected if not name.startswith(f"layers.{LAYER}.")}
    assert equal_or_refused(module, inputs, y, expected, among) == (policy in refused)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_surrounds_a_layer_changes(policy):
    """The stack's norms have the eps of forward. A mask may be written to after forward."""

    def run(policy, changes):
        module, mask = stack(policy), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[1, 3:] = True
        torch.manual_seed(2)
        x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
        y = module(x, mask)
        if changes:
            mask.zero_()
            for part in module.connection.modules():
                part.eps = 0.5
        return gradients(module, [x], y)

    assert_same(run(policy, True), run("none", False))


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


def broken(_):
    raise ArithmeticError("no")


@pytest.mark.parametrize("policy", RERUN)
@pytest.mark.parametrize(
    ("first", "again", "words"),
    [
        (lambda x: x[0].sin(), lambda x: x, "must do the same when it runs again"),
        (lambda x: x, broken, "no"),
    ],
)
def test_a_rerun_that_does_something_else(policy, first, again, words):
    """Its errors reach the user, and the generator is as before."""
    module, calls = stack(policy), []

    def hook(_module, x):
        calls.append(1)
        return first(x) if len(calls) == 1 else again(x)

    module.layers[LAYER].feed_forward.down.register_forward_pre_hook(hook)
    _, y = forward(module)
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, ArithmeticError), match=words):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_history_after_its_states_are_gone_is_an_error():
    module, seen = stack("layer+input"), []
    module.layers[2].register_forward_hook(lambda _m, _a, out: seen.append(out))
    _, y = forward(module)
    weight = module.layers[0].feed_forward.up.weight
    torch.autograd.grad(y.square().sum(), [weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients have overwritten them"):
        seen[0][1].square().sum().backward()
