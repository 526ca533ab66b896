"""Memory policies: a change between forward and backward is refused or has no effect."""

import pytest
import torch

from deepfast.memory import POLICIES
from tests.nn.policies import BATCH, CASES, DIM, LAYERS, LENGTH, assert_same, forward, stack


def test_an_unknown_policy_changes_nothing():
    module = stack("lean")
    with pytest.raises(ValueError, match="got 'most'"):
        module.set_memory("most")
    assert module.policies == ("lean",) * LAYERS


def test_a_layer_must_do_the_same_both_times():
    module, calls = stack("states"), []

    def fickle(_module, inputs):
        calls.append(1)
        return inputs[0].sin() if len(calls) == 1 else inputs[0]

    module.layers[2].feed_forward.down.register_forward_pre_hook(fickle)
    _, y = forward(module)
    with pytest.raises(RuntimeError, match="it must do the same both times"):
        y.sum().backward()


def test_an_exception_in_a_rerun_reaches_the_user():
    module, calls = stack("history"), []

    def broken(*_):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("no")

    module.layers[2].attention.out.register_forward_hook(broken)
    _, y = forward(module)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="no"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["residual", "decoder", "decoder, residual"])
def test_an_attention_may_be_given_something_else(case, policy):
    """If a hook has changed LN(x), LN(x) is not recomputed."""
    if policy == "history" and "connection" in CASES[case]:
        pytest.skip("there are no states to mix from")
    results = []
    for again in (False, True):
        module = stack(policy if again else "keep", **CASES[case]).double().eval()
        for layer in module.layers:
            name = "cross_attention" if "decoder" in CASES[case] else "attention"
            part = getattr(layer, name)
            part.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
            if not again:
                # Makes the layer take the plain path.
                layer.register_forward_pre_hook(lambda *_: None)
                linear = part.query if part.cross else part.query_key_value
                linear.register_forward_hook(lambda *_: None)
        torch.manual_seed(2)
        inputs = [torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, requires_grad=True)]
        if "decoder" in CASES[case]:
            inputs.append(inputs[0].detach() * 0.5)
        module(*inputs).pow(3).sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, msg=lambda m, n=name: f"{n}: {m}")


def test_history_after_its_states_are_gone_is_an_error():
    module, seen = stack("history"), []
    module.layers[3].register_forward_hook(lambda _m, _a, out: seen.append(out))
    _, y = forward(module)
    weight = module.layers[1].feed_forward.up.weight
    torch.autograd.grad(y.square().sum(), [weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients have overwritten them"):
        seen[0][1].square().sum().backward()


def test_a_mask_may_be_written_to_after_forward():
    results = []
    for written in (False, True):
        module, mask = stack("states"), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[1, 3:] = True
        torch.manual_seed(2)
        y = module(torch.randn(BATCH, LENGTH, DIM), mask)
        if written:
            mask.zero_()
        y.square().sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(results[1], results[0])
