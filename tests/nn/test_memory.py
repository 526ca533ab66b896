"""Memory policies: the same bits as `keep`, the bytes they promise, and nothing left behind."""

import gc
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from deepfast.memory import POLICIES, LiveBytes
from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder

LAYERS, DIM, HEADS, FFN, BATCH, LENGTH = 5, 16, 2, 40, 3, 7
OTHERS = POLICIES[1:]

CASES = {
    "dlcl": {},
    "dlcl, padding": {"padding": True, "activation_dropout": 0.2},
    "dlcl, gelu": {"activation": "gelu", "activation_dropout": 0.2, "attention_dropout": 0.1},
    "dlcl, window": {"dlcl": {"window": 3, "weight": "vector"}},
    "dlcl, post": {"norm": "post"},
    "residual": {"connection": "residual"},
    "residual, post, gelu": {"connection": "residual", "norm": "post", "activation": "gelu"},
    "decoder": {"decoder": True, "attention_dropout": 0.1},
    "decoder, residual": {"decoder": True, "connection": "residual", "padding": True},
    "decoder, post": {"decoder": True, "norm": "post"},
    "latent": {"connection": "latent", "padding": True},
    "latent, post, hard": {"connection": "latent", "norm": "post", "latent": {"hard": True}},
    "decoder, latent": {"decoder": True, "connection": "latent"},
}


def stack(memory, *, layers=LAYERS, decoder=False, padding=False, **options):
    torch.manual_seed(1)
    kind = TransformerDecoder if decoder else TransformerEncoder
    return kind(layers, DIM, HEADS, FFN, dropout=0.1, memory=memory, **options)


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


def step(module, *, padding=False, autocast=False):
    """Everything one step gives, and the generator's next number."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inputs, y = forward(module, padding=padding)
    y.float().mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    result = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    result |= {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return result | {"y": y.detach(), "next": torch.rand(2)}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        same = got[name] is None if value is None else torch.equal(got[name], value)
        assert same, name


def allowed(case):
    return OTHERS if CASES[case].get("connection", "dlcl") == "dlcl" else OTHERS[:-1]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_keep(case):
    padding = CASES[case].get("padding", False)
    expected = step(stack("keep", **CASES[case]), padding=padding)
    for policy in allowed(case):
        module = stack(policy, **CASES[case])
        assert module.policies == (policy,) * LAYERS
        assert_same(step(module, padding=padding), expected)


@pytest.mark.parametrize("case", ["dlcl", "residual", "decoder", "dlcl, post", "decoder, latent"])
def test_the_same_bits_under_autocast(case):
    expected = step(stack("keep", **CASES[case]), autocast=True)
    for policy in allowed(case):
        got = step(stack(policy, **CASES[case]), autocast=True)
        if policy == "states" and case in ("dlcl", "decoder"):
            # x is rounded to bf16 before its layer-norm is made again, in forward after it.
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


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"expected one of keep, lean, .*, got 'less'"):
        stack("less")
    with pytest.raises(ValueError, match="one policy for each of 5 layers, got 2"):
        stack(["keep", "lean"])
    with pytest.raises(ValueError, match="'history' mixes inputs again from DLCL's states"):
        stack("history", connection="residual")
    with pytest.raises(ValueError, match="expected a policy, one for each layer, or a plan"):
        stack(3)
    module = stack("lean")
    with pytest.raises(ValueError, match="got 'most'"):
        module.set_memory("most")
    assert module.policies == ("lean",) * LAYERS


def kept(connection, policy, layers, norm):
    """Bytes alive after forward, and at the highest in the whole step, without gradients' own."""
    module = stack(policy, layers=layers, connection=connection, norm=norm)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    tokens = 16 * LENGTH
    x = torch.randn(16, LENGTH, DIM)
    # What is made once, such as masks, is there before.
    module(x)
    with LiveBytes() as live:
        y = module(x)
        forward = live.current
        y.sum().backward()
        del y
    assert live.current <= 0
    return forward / (4 * tokens * DIM), live.peak / (4 * tokens * DIM)


@pytest.mark.parametrize(
    ("connection", "norm", "widths"),
    [
        # A state y; n, q k v, o, s and h.
        ("dlcl", "pre", {"keep": 6, "lean": 6, "leaner": 3, "states": 2, "history": 1}),
        ("residual", "pre", {"keep": 5, "lean": 5, "leaner": 2, "states": 1}),
        # The sum before the last layer-norm beside.
        ("dlcl", "post", {"keep": 7, "lean": 7, "leaner": 4, "states": 2, "history": 1}),
        ("residual", "post", {"keep": 6, "lean": 6, "leaner": 3, "states": 1}),
    ],
)
def test_bytes_of_a_layer(connection, norm, widths):
    """In states (T, D); statistics, (T,) each, come to less than one here."""
    widths = widths | {"lean": widths["lean"] + 1, "leaner": widths["leaner"] + 1}
    widths["keep"] += 1 + FFN / DIM
    for policy, width in widths.items():
        (few, _), (more, _) = (kept(connection, policy, n, norm) for n in (4, 12))
        assert width - 0.01 <= (more - few) / 8 < width + 0.9, policy


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_grows_with_the_square_of_the_depth(policy):
    depths = (36, 48, 60)
    peaks = [kept("dlcl", policy, depth, "pre")[1] for depth in depths]
    first, second = (b - a for a, b in pairwise(peaks))
    # Statistics and the weights, (L + 1)^2 numbers, are far below one state.
    assert 0 < second <= 1.05 * first + 2


@pytest.mark.parametrize("policy", OTHERS)
def test_nothing_is_left_behind(policy):
    """Without the collector: nothing refers to itself in a circle."""
    module = stack(policy)
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


@pytest.mark.parametrize("policy", OTHERS)
def test_open_passes_accumulate(policy):
    """Two forwards, then both backwards, the older one last."""
    results = []
    for memory in ("keep", policy):
        module = stack(memory)
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
    """Residual layers run again a second time; DLCL's states are gone, as without a policy."""
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
def test_inside_torch_checkpointing(policy):
    module = stack(policy)
    expected = step(module)

    class Wrapped(nn.Module):
        def forward(self, x, mask):
            return checkpoint(module, x, mask, use_reentrant=False)

    wrapped = Wrapped()
    wrapped.inner = module
    got = {name.removeprefix("inner."): value for name, value in step(wrapped).items()}
    assert_same(got, expected)


def test_a_layer_must_do_the_same_both_times():
    module, calls = stack("states"), []

    def fickle(_module, inputs):
        calls.append(1)
        return inputs[0].sin() if len(calls) == 1 else inputs[0]

    module.layers[2].feed_forward.down.register_forward_pre_hook(fickle)
    _, y = forward(module)
    with pytest.raises(RuntimeError, match="it must do the same both times"):
        y.sum().backward()


def test_an_exception_while_running_again_is_the_users_to_see():
    module = stack("history")
    _, y = forward(module)

    def broken(*_):
        raise ArithmeticError("no")

    before = torch.get_rng_state()
    module.layers[2].attention.out.register_forward_hook(broken)
    with pytest.raises(ArithmeticError, match="no"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


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


@pytest.mark.parametrize(("policy", "again"), [("lean", 4), ("leaner", 7), ("states", 8)])
def test_products_made_again(policy, again):
    """Of the 12 D^2 of a layer's forward with F = 4 D; the last 4 D^2 never."""
    dim, tokens = 32, 24

    def count(memory):
        module = TransformerEncoder(1, dim, 2, 4 * dim, dropout=0.1, memory=memory)
        x = torch.randn(tokens, dim, requires_grad=True)
        with Products() as products:
            module.forward_packed(x, Packing(3, 8)).sum().backward()
        return products.counts

    keep, counts = count("keep"), count(policy)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert counts[attention] == keep[attention] * (2 if policy == "states" else 1)
    del counts[attention], keep[attention]
    extra = sum(counts.values()) - sum(keep.values())
    assert extra == 2 * again * tokens * dim * dim
    assert sum(keep.values()) > 2 * 36 * tokens * dim * dim


@pytest.mark.parametrize("connection", ["dlcl", "residual"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("part", ["attention.query_key_value", "attention.out", "feed_forward.up",
                                  "feed_forward.down", "feed_forward_norm"])  # fmt: skip
def test_a_weight_changed_before_backward_is_an_error(policy, connection, part):
    if policy == "history" and connection == "residual":
        pytest.skip("there are no states to mix from")
    module = stack(policy, connection=connection)
    _, y = forward(module)
    with torch.no_grad():
        module.layers[2].get_submodule(part).weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["residual", "decoder", "decoder, residual"])
def test_an_attention_may_be_given_something_else(case, policy):
    """What makes LN(x) again is not used for what a hook has made of it."""
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
                # Has the plain path serve.
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


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("learning", ["layers.2.", "layers.0.", "layers.4.feed_forward"])
def test_history_with_all_but_a_part_frozen(learning, norm):
    results = []
    for memory in ("keep", "history"):
        module = stack(memory, norm=norm)
        for name, p in module.named_parameters():
            p.requires_grad_(name.startswith(learning))
        torch.manual_seed(3)
        module(torch.randn(BATCH, LENGTH, DIM)).square().sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(results[1], results[0])


def test_history_after_its_states_are_gone_is_an_error():
    module, seen = stack("history"), []
    module.layers[3].register_forward_hook(lambda _m, _a, out: seen.append(out))
    _, y = forward(module)
    weight = module.layers[1].feed_forward.up.weight
    torch.autograd.grad(y.square().sum(), [weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients have taken their slots"):
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
