"""Memory policies: the same bits as `keep` in every kind of step, with hooks on layers too."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.memory import POLICIES
from deepfast.memory.policies import MIXING
from tests.nn.policies import (
    BATCH,
    CASES,
    DIM,
    LAYERS,
    LENGTH,
    OTHERS,
    assert_same,
    forward,
    stack,
    step,
)


def allowed(case):
    return OTHERS if CASES[case].get("connection", "dlcl") in MIXING else OTHERS[:-1]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_keep(case):
    padding = CASES[case].get("padding", False)
    expected = step(stack("keep", **CASES[case]), padding=padding)
    for policy in allowed(case):
        module = stack(policy, **CASES[case])
        assert module.policies == (policy,) * LAYERS
        assert_same(step(module, padding=padding), expected)


@pytest.mark.parametrize("case", ["dlcl", "residual", "decoder", "dlcl, post", "decoder, latent",
                                  "attnres", "attnres, one read", "decoder, attnres"])  # fmt: skip
def test_the_same_bits_under_autocast(case):
    expected = step(stack("keep", **CASES[case]), autocast=True)
    for policy in allowed(case):
        got = step(stack(policy, **CASES[case]), autocast=True)
        if policy == "states" and case in ("dlcl", "decoder", "attnres, one read"):
            # Recomputation rounds x to bf16 before its layer-norm, forward rounds after it.
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=0.05, atol=0.05)
        else:
            assert_same(got, expected)


def test_every_layer_its_own_policy():
    expected = step(stack("keep"))
    for policies in (POLICIES, POLICIES[::-1]):
        assert_same(step(stack(policies)), expected)
    plan = SimpleNamespace(policies=("history", "states", "states", "keep", "lean"))
    module = stack("keep")
    module.set_memory(plan)
    assert module.policies == plan.policies
    assert_same(step(module), expected)


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("case", ["dlcl", "attnres"])
def test_open_passes_accumulate(case, policy):
    """Two forwards, then both backwards, the older one last."""
    results = []
    for memory in ("keep", policy):
        module = stack(memory, connection=case)
        (inputs, y), (_, z) = forward(module), forward(module)
        z.square().sum().backward()
        y.sum().backward()
        results.append({n: p.grad for n, p in module.named_parameters()} | {"x": inputs[0].grad})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", OTHERS)
def test_a_part_of_the_gradients(policy):
    """torch.autograd.grad of the input and one weight; the rest frozen or not asked for."""
    results = []
    for memory in ("keep", policy):
        module = stack(memory)
        for p in module.layers[2].parameters():
            p.requires_grad_(False)
        (x,), y = forward(module)
        w = module.layers[3].feed_forward.up.weight
        results.append(dict(enumerate(torch.autograd.grad(y.sum(), [x, w]))))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", OTHERS)
def test_without_gradient_and_in_evaluation(policy):
    keep, module = stack("keep").eval(), stack(policy).eval()
    with torch.no_grad():
        assert torch.equal(forward(module)[1], forward(keep)[1])
    assert_same(step(module), step(keep))


@pytest.mark.parametrize("policy", OTHERS)
def test_a_retained_graph(policy):
    """Residual layers can run again a second time; DLCL's states are gone, as without a policy."""
    if policy != "history":
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


@pytest.mark.parametrize("policy", OTHERS)
def test_what_hangs_on_parts_is_met(policy):
    """Hooks and foreign modules take the place of fused ops, with the same numbers."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x)

    results = []
    for memory in ("keep", policy):
        module = stack(memory)
        seen = []
        layer = module.layers[1]
        layer.feed_forward.down.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        layer.feed_forward_norm.register_forward_hook(lambda *_: None)
        old = module.layers[2].attention.query_key_value
        new = module.layers[2].attention.query_key_value = Scaled(DIM, 3 * DIM)
        new.load_state_dict(old.state_dict())
        results.append(step(module))
        assert seen
    assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["dlcl", "attnres"])
def test_inside_torch_checkpointing(case, policy):
    module = stack(policy, connection=case)
    expected = step(module)

    class Wrapped(nn.Module):
        def forward(self, x, mask):
            return checkpoint(module, x, mask, use_reentrant=False)

    wrapped = Wrapped()
    wrapped.inner = module
    got = {name.removeprefix("inner."): value for name, value in step(wrapped).items()}
    assert_same(got, expected)


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"connection": "attnres"}], ids=str)
@pytest.mark.parametrize("learning", ["layers.2.", "layers.0.", "layers.4.feed_forward"])
def test_history_with_all_but_a_part_frozen(learning, options):
    results = []
    for memory in ("keep", "history"):
        module = stack(memory, **options)
        for name, p in module.named_parameters():
            p.requires_grad_(name.startswith(learning))
        torch.manual_seed(3)
        module(torch.randn(BATCH, LENGTH, DIM)).square().sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(results[1], results[0])


def test_a_plan_has_policies_for_either_side():
    plan = SimpleNamespace(policies=("history",) * LAYERS, decoder_policies=("lean",) * LAYERS)
    assert stack(plan).policies == plan.policies
    assert stack(plan, decoder=True).policies == plan.decoder_policies


def test_wrapped_layers_get_their_policy():
    module = stack("keep")
    module.layers[1] = nn.Sequential(module.layers[1])
    module.set_memory("lean")
    assert module.layers[1][0].memory == "lean"


@pytest.mark.parametrize("case", ["dlcl", "residual", "decoder", "decoder, post"])
@pytest.mark.parametrize("policy", ["keep", "leaner", "states"])
def test_inference_mode(case, policy):
    with torch.no_grad():
        expected = forward(stack("keep", **CASES[case]).eval())[1]
    with torch.inference_mode():
        assert torch.equal(forward(stack(policy, **CASES[case]).eval())[1], expected)


@pytest.mark.parametrize("policy", OTHERS)
def test_a_projection_without_bias(policy):
    results = []
    for memory in ("keep", policy):
        module = stack(memory)
        old = module.layers[2].attention.query_key_value
        new = module.layers[2].attention.query_key_value = nn.Linear(DIM, 3 * DIM, bias=False)
        new.weight = old.weight
        results.append(step(module))
    assert_same(results[1], results[0])
