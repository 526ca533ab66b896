"""Latent depth: draws and losses against the specification, stacks against ones written out."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.memory import LiveBytes
from deepfast.nn import LatentDepth, Packing, TransformerDecoder, TransformerEncoder
from deepfast.reference import latent_depth as spec

from .written_out import DIM, HEADS, assert_same, leaf, naive_decoder, naive_encoder, shaken

LAYERS, FFN, LANGUAGES = 5, 20, 3
NORMS = pytest.mark.parametrize("norm", ["pre", "post"])
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
LATENT = {"languages": LANGUAGES, "seed": 7}


def latent(**options):
    """With logits away from zero."""
    module = LatentDepth(LAYERS, LANGUAGES, **options)
    with torch.no_grad():
        module.logits.copy_(torch.randn_like(module.logits) * 2)
    return module


def encoder(norm="pre", **options):
    options = LATENT | options
    module = TransformerEncoder(
        LAYERS, DIM, HEADS, FFN, connection="latent", norm=norm, dropout=0.0, latent=options
    )
    return chosen(shaken(module))


def decoder(norm="pre", **options):
    options = LATENT | options
    module = TransformerDecoder(
        LAYERS, DIM, HEADS, FFN, connection="latent", norm=norm, dropout=0.0, latent=options
    )
    return chosen(shaken(module))


def chosen(module):
    """Language 0 leaves out layers 1 and 4, language 1 the lowest, language 2 none."""
    with torch.no_grad():
        module.latent.logits.copy_(
            torch.tensor([[2, -1, 1, 3, -2], [-1, 1, 1, 1, 1], [1, 1, 2, 0, 1]])
        )
    return module


# ---- the module alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_draws_are_the_specification_s(hard):
    module = latent(tau=1.7, hard=hard)
    u = torch.rand(2, LANGUAGES, LAYERS, dtype=torch.float64)
    g1, g2 = -torch.log(-torch.log(u))
    module._noise = lambda: g1 - g2
    exact = spec.sample(module.logits.detach().double(), u, 1.7, hard)
    torch.testing.assert_close(module.draw().detach().double(), exact, rtol=1e-5, atol=1e-6)


def test_the_noise_is_a_difference_of_gumbels():
    """Logistic: its distribution function at some points, within four standard errors."""
    module = LatentDepth(50, 200)
    noise = module._noise().flatten()
    for point in (-3.0, -0.5, 0.0, 2.0):
        p = torch.sigmoid(torch.tensor(point, dtype=torch.float64))
        error = (noise <= point).double().mean() - p
        assert error.abs() < 4 * (p * (1 - p) / noise.numel()).sqrt()


def test_each_forward_draws_anew_and_a_step_draws_again():
    """Whatever torch's generator did meanwhile, and whatever other stacks drew."""
    module = latent()
    module.set_step(5)
    first = [module.draw(), module.draw()]
    torch.rand(3)
    assert not torch.equal(*first)
    twin = copy.deepcopy(module)
    for again in (module, twin):
        again.set_step(5)
        assert torch.equal(again.draw(), first[0])
        assert torch.equal(again.draw(), first[1])
    module.set_step(6)
    assert not torch.equal(module.draw(), first[0])
    other = latent(seed=1)
    other.load_state_dict(module.state_dict())
    other.set_step(5)
    assert not torch.equal(other.draw(), first[0])


def test_hard_begins_after_the_soft_steps():
    module = latent(hard=True, soft_steps=4)
    for step, hard in ((3, False), (4, True)):
        module.set_step(step)
        values = set(module.draw().flatten().tolist())
        assert (values <= {0.0, 1.0}) == hard
        assert module.draw().requires_grad


def test_evaluation_is_deterministic():
    module = latent(threshold=0.3).eval()
    p = module.logits.detach().sigmoid()
    for language in range(LANGUAGES):
        expected = (p[language] >= 0.3).double().tolist()
        assert module(language) == module(language) == expected
    assert LatentDepth(4).eval()(0) == [1.0] * 4


@pytest.mark.parametrize("options", [{"hard": True}, {"tau": 0.8}, {"tau": 3.0}])
def test_the_mean_is_that_of_the_draws(options):
    """Of the layers that are used, over many draws, within four standard errors."""
    module = latent(evaluation="mean", threshold=0.1, **options)
    with torch.no_grad():
        draws = torch.stack([module.draw() for _ in range(4000)]).double()
        p = module.logits.sigmoid()
    error = 4 * draws.std(0) / 4000**0.5
    for language in range(LANGUAGES):
        got = torch.tensor(module.eval()(language), dtype=torch.float64)
        used = p[language] >= 0.1
        assert used.any()
        assert (got[~used] == 0).all()
        assert ((got - draws.mean(0)[language]).abs() <= error[language])[used].all()


@pytest.mark.parametrize(
    ("options", "prior"),
    [
        ({}, lambda p: torch.full_like(p[0], 0.5)),
        ({"prior": "beta", "beta": (1.0, 3.0)}, lambda p: torch.full_like(p[0], 0.25)),
        ({"prior": "mean"}, lambda p: p.mean(0)),
    ],
)
def test_losses_are_the_specification_s(options, prior):
    module = latent(**options).double()
    p = module.logits.sigmoid()
    for got, exact in (
        (module.kl(), spec.kl(p, prior(p))),
        (module.entropy(), spec.entropy(p)),
        (module.depth(), p.mean(0).sum()),
    ):
        torch.testing.assert_close(got, exact)
        a, b = (torch.autograd.grad(x, module.logits, retain_graph=True)[0] for x in (got, exact))
        torch.testing.assert_close(a, b)
        # No term is a constant: each reaches the logits.
        assert a.abs().max() > 1e-3


def test_losses_stay_finite_where_a_choice_is_certain():
    for prior in ("uniform", "mean"):
        module = LatentDepth(2, 2, prior=prior, kl_weight=1.0, entropy_weight=1.0)
        with torch.no_grad():
            module.logits.copy_(torch.tensor([[200.0, -200.0], [200.0, -200.0]]))
        module.penalty().backward()
        assert module.penalty().isfinite()
        assert module.logits.grad.isfinite().all()


def test_weights_of_the_losses_never_fall_below_zero():
    terms = {"kl_weight": 2.0, "entropy_weight": 3.0, "target_weight": 0.5, "target_layers": 2.0}
    module = latent(soft_steps=10, anneal_steps=4, **terms)
    kl, entropy = module.kl().item(), module.entropy().item()
    target = spec.target(module.logits.detach().sigmoid(), 2.0).item()
    for step, first, second in ((0, 0, 0), (10, 0, 0), (11, 0.25, 0), (14, 1, 0), (15, 1, 0.25),
                                (18, 1, 1), (500, 1, 1)):  # fmt: skip
        module.set_step(step)
        expected = first * 2 * kl + second * (3 * entropy + 0.5 * target)
        assert module.penalty().item() == pytest.approx(expected, rel=1e-5)
    assert latent().penalty().item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, "tau: expected a number above 0, got 0"),
        ({"tau": math.inf}, "tau: expected a number above 0, got inf"),
        ({"kl_weight": math.inf}, "kl_weight: expected a number of at least 0, got inf"),
        ({"prior": "beta", "beta": (2, math.inf)}, "beta: expected two numbers above 0"),
        ({"prior": "flat"}, "prior: expected one of uniform, beta, mean, got 'flat'"),
        ({"beta": (2, 1)}, r"beta: expected \(1, 1\) for the prior uniform, got \(2, 1\)"),
        ({"prior": "beta", "beta": (2, 0)}, "beta: expected two numbers above 0"),
        ({"kl_weight": -1}, "kl_weight: expected a number of at least 0, got -1"),
        ({"target_weight": 1}, "target_layers: expected a number where target_weight is set"),
        ({"target_layers": 6}, "target_layers: expected above 0 and at most the 5 layers"),
        ({"evaluation": "sample"}, "evaluation: expected one of threshold, mean, got 'sample'"),
        ({"threshold": 1}, "threshold: expected a number between 0 and 1, got 1"),
        ({"soft_steps": -1}, "soft_steps: expected at least 0 steps, got -1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        LatentDepth(LAYERS, **options)


def test_an_unknown_language():
    with pytest.raises(ValueError, match="expected a language from 0 to 2, got 3"):
        latent()(3)


# ---- in a stack ----------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_training_encoder_equals_one_written_out(norm, hard, padding):
    """Gradients too, that of the logits among them."""
    m = encoder(norm, hard=hard)
    x = leaf(3, 5, DIM)
    twin = copy.copy(m.latent)
    got, want = m(x, padding, language=1), naive_encoder(m, x, padding, gates=twin(1))
    assert_same(got, want, m, [x], None if padding is None else ~padding)
    loss = m(x, padding, language=1).square().sum()
    (grad,) = torch.autograd.grad(loss, m.latent.logits)
    assert grad[1].abs().min() > 0
    assert grad[[0, 2]].eq(0).all()


@NORMS
def test_a_training_decoder_equals_one_written_out(norm):
    m = decoder(norm)
    x, memory = leaf(3, 5, DIM), leaf(3, 4, DIM)
    twin = copy.copy(m.latent)
    got, want = m(x, memory, language=2), naive_decoder(m, x, memory, gates=twin(2))
    assert_same(got, want, m, [x, memory])


@NORMS
def test_evaluation_equals_the_same_gates_written_out(norm):
    for language in range(LANGUAGES):
        m = encoder(norm).eval()
        x = leaf(3, 5, DIM)
        want = naive_encoder(m, x, PADDING, gates=m.latent.choose(language))
        assert_same(m(x, PADDING, language=language), want, m, [x], ~PADDING)
        m = decoder(norm, evaluation="mean").eval()
        memory = leaf(3, 4, DIM)
        want = naive_decoder(m, x, memory, gates=m.latent.choose(language))
        assert_same(m(x, memory, language=language), want, m, [x, memory])


def called(module, run):
    """Indices of the layers that are called while ``run`` runs, in order."""
    seen = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: seen.append(index))
        for index, layer in enumerate(module.layers)
    ]
    result = run()
    for hook in hooks:
        hook.remove()
    return seen, result


@NORMS
def test_a_layer_that_is_not_used_is_not_run(norm):
    x, memory = torch.randn(2, 4, DIM), torch.randn(2, 3, DIM)
    m = encoder(norm)
    assert called(m, lambda: m(x))[0] == list(range(LAYERS))
    m.eval()
    assert called(m, lambda: m(x))[0] == [0, 2, 3]
    assert called(m, lambda: m(x, language=1))[0] == [1, 2, 3, 4]
    assert called(m, lambda: m(x, language=2))[0] == list(range(LAYERS))
    m = decoder(norm).eval()
    assert called(m, lambda: m(x, memory))[0] == [0, 2, 3]


@NORMS
@pytest.mark.parametrize("evaluation", ["threshold", "mean"])
def test_decoding_step_by_step(norm, evaluation):
    """As the whole forward; of layers that are not used neither keys nor values are kept."""
    m = decoder(norm, evaluation=evaluation).eval()
    x, memory = torch.randn(2, 4, DIM), torch.randn(2, 3, DIM)
    with torch.no_grad():
        want = m(x, memory)
        cache = m.start(memory.flatten(0, 1), Packing(2, 3))
        for position in range(4):
            seen, y = called(m, lambda at=position: m.step(x[:, at], cache))
            assert seen == [0, 2, 3]
            torch.testing.assert_close(y, want[:, position], rtol=1e-4, atol=1e-5)
    assert [kv is None for kv in cache.memory] == [False, True, False, False, True]
    assert [kv.key is None for kv in cache.layers] == [False, True, False, False, True]
    cache.reorder(torch.tensor([1, 0, 0]))
    assert cache.memory[0][0].shape[0] == cache.layers[3].value.shape[0] == 3


def test_a_stack_without_any_layer_left_is_its_last_norm():
    m = encoder().eval()
    with torch.no_grad():
        m.latent.logits.fill_(-1)
    x = torch.randn(2, 4, DIM)
    torch.testing.assert_close(m(x), m.connection.norms[-1](x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_draws_the_same_again(reentrant, dropout):
    """Two forwards in front of their backwards, of which the first comes last."""
    inputs = torch.randn(2, 5, DIM)

    def run(wrap):
        torch.manual_seed(9)
        x = inputs.clone().requires_grad_()
        m = TransformerEncoder(
            LAYERS, DIM, HEADS, FFN, connection="latent", dropout=dropout, latent=LATENT
        )
        shaken(m).latent.set_step(3)
        outputs = [wrap(m, x), wrap(m, x)]
        for y in reversed(outputs):
            y.square().sum().backward()
        return [*outputs, x.grad, *(p.grad for p in m.parameters())]

    want = run(lambda m, x: m(x))
    assert not torch.equal(*want[:2])
    got = run(lambda m, x: checkpointed(m, x, reentrant))
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def checkpointed(m, x, reentrant=False, **options):
    return checkpoint(m, x, use_reentrant=reentrant, **options)


def test_a_draw_that_backward_cannot_make_again_is_an_error():
    m, x = encoder(), leaf(2, 5, DIM)
    loss = checkpointed(m, x, preserve_rng_state=False).sum()
    with pytest.raises(RuntimeError, match="checkpointing needs preserve_rng_state=True"):
        loss.backward()
    loss = checkpointed(m, x).sum()
    m.latent.set_step(4)
    with pytest.raises(RuntimeError, match="backward comes before the next set_step"):
        loss.backward()


def test_draws_are_remembered_for_so_many_forwards(monkeypatch):
    monkeypatch.setattr("deepfast.nn.latent_depth.FORWARDS", 3)
    module = latent()
    draws = []
    for _ in range(5):
        state = torch.get_rng_state()
        draws.append((state, module.draw()))
    for number, (state, z) in enumerate(draws):
        torch.set_rng_state(state)
        if number >= 2:
            assert torch.equal(module.draw(), z)
    assert (len(module._numbers), module.draws) == (3, 5)


def test_states_of_the_layers_that_run():
    m = encoder().eval()
    states = []
    m.forward_packed(torch.randn(4, DIM), Packing(1, 4), states=states, language=0)
    assert len(states) == 4


def test_an_attention_of_another_make_is_scaled_too():
    class Other(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs, **options):
            assert "gate" not in options
            return self.inner(*inputs, **options)

    m, x = encoder(), torch.randn(2, 4, DIM)
    want = m(x)
    for layer in m.layers:
        layer.attention = Other(layer.attention)
        layer.feed_forward.down.register_forward_hook(lambda *_: None)
    m.latent.set_step(0)
    torch.testing.assert_close(m(x), want)


def test_a_gate_keeps_no_state_for_backward():
    """Beside what the plain stack keeps only scaled weights, however many tokens there are."""

    def kept(connection, tokens):
        torch.manual_seed(0)
        m = TransformerEncoder(3, 16, 2, 32, connection=connection, dropout=0.1)
        with LiveBytes(torch.device("cpu")) as live:
            y = m(torch.randn(1, tokens, 16))
            alive = live.current
        # The graph lives as long as its result.
        assert y.requires_grad
        return alive

    more = [kept("latent", n) - kept("residual", n) for n in (64, 512)]
    assert more[0] == more[1] > 0


def test_options_belong_to_the_connection():
    with pytest.raises(ValueError, match="latent options need connection='latent', got 'dlcl'"):
        TransformerEncoder(2, DIM, HEADS, FFN, connection="dlcl", latent={"tau": 2.0})
    with pytest.raises(ValueError, match="dlcl options need connection='dlcl', got 'latent'"):
        TransformerEncoder(2, DIM, HEADS, FFN, connection="latent", dlcl={"window": 2})
