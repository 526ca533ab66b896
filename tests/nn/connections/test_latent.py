"""Latent depth: draws and losses against the formulas, and stacks with layers that are not used.

Li et al., Deep Transformers with Latent Depth, 2020; Jang et al., Categorical Reparameterization
with Gumbel-Softmax, 2017; Bengio et al., Estimating or Propagating Gradients Through Stochastic
Neurons, 2013, for hard draws.
"""

import copy

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence
from torch.utils.checkpoint import checkpoint

from deepfast.nn import LatentDepth, Packing, TransformerDecoder, TransformerEncoder
from tests.nn.written_out import DIM, HEADS, leaf, shaken

LAYERS, LANGUAGES, FFN = 5, 3, 20


def latent(**options):
    """With logits away from zero."""
    module = LatentDepth(LAYERS, LANGUAGES, **options)
    with torch.no_grad():
        module.logits.copy_(torch.randn_like(module.logits) * 2)
    return module


@pytest.mark.parametrize(("hard", "step"), [(False, 4), (True, 3), (True, 4)])
def test_draws_are_rounded_sigmoids_with_the_gradient_of_the_sigmoid(hard, step):
    """Those of hard draws from their first step on."""
    module = latent(tau=1.7, hard=hard, soft_steps=4)
    module.set_step(step)
    noise = torch.randn(LANGUAGES, LAYERS, dtype=torch.float64)
    module._noise = lambda: noise
    logits = module.logits.detach().double().requires_grad_()
    soft, got = torch.sigmoid((logits + noise) / 1.7), module.draw()
    rounded = hard and step == 4
    want = soft.round() if rounded else soft
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert set(got.flatten().tolist()) <= {0.0, 1.0} or not rounded
    dz = torch.randn_like(soft)
    (dlogits,) = torch.autograd.grad(got, module.logits, dz.float())
    (expected,) = torch.autograd.grad(soft, logits, dz)
    torch.testing.assert_close(dlogits.double(), expected, rtol=1e-5, atol=1e-6)


def test_each_forward_draws_anew_and_a_step_draws_again():
    """The draws depend neither on torch's generator nor on other stacks."""
    module = latent()

    def two_draws(module, step):
        module.set_step(step)
        return module.draw(), module.draw()

    first, second = two_draws(module, 5)
    assert not torch.equal(first, second)
    torch.rand(3)
    for again in (module, copy.deepcopy(module)):
        assert all(map(torch.equal, two_draws(again, 5), (first, second)))
    assert not torch.equal(two_draws(module, 6)[0], first)
    other = latent(seed=1)
    other.load_state_dict(module.state_dict())
    assert not torch.equal(two_draws(other, 5)[0], first)


@pytest.mark.parametrize("options", [{"hard": True}, {"tau": 0.8}, {"tau": 3.0}])
def test_the_mean_is_that_of_the_draws(options):
    """So the noise is logistic: the mean of many draws, within four standard errors."""
    many, logits = 4000, latent().logits.detach()[:1]
    module = LatentDepth(LAYERS, many, evaluation="mean", **options)
    module.logits.data.copy_(logits.expand(many, -1))
    draws, p = module.draw().detach().double(), logits[0].sigmoid()
    got = torch.tensor(module.eval()(0), dtype=torch.float64)
    assert ((got - draws.mean(0)).abs() <= 4 * draws.std(0) / many**0.5).all()
    assert module.keeps(0) == (p >= 0.5).tolist()
    # Soft weights are used below the threshold too.
    assert (p < 0.5).any()
    module = latent(threshold=0.3, **options).eval()
    used = module.logits.detach().sigmoid() >= 0.3
    assert [module(language) for language in range(LANGUAGES)] == used.double().tolist()


@pytest.mark.parametrize(
    ("options", "prior"),
    [
        ({}, lambda p: torch.full_like(p[0], 0.5)),
        ({"prior": "beta", "beta": (1.0, 3.0)}, lambda p: torch.full_like(p[0], 0.25)),
        ({"prior": "mean"}, lambda p: p.mean(0)),
    ],
)
def test_losses_are_the_formulas(options, prior):
    module = latent(**options).double()
    p = module.logits.sigmoid()
    used, priors = p.mean(0), prior(p).expand_as(p)
    divergence = kl_divergence(Bernoulli(p), Bernoulli(priors))
    for got, exact in (
        (module.kl(), divergence.sum(1).mean()),
        (module.entropy(), -(used * used.log()).sum()),
        (module.depth(), used.sum()),
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
    target = (module.depth().item() - 2) ** 2
    for step, first, second in ((0, 0, 0), (10, 0, 0), (11, 0.25, 0), (14, 1, 0), (15, 1, 0.25),
                                (18, 1, 1), (500, 1, 1)):  # fmt: skip
        module.set_step(step)
        expected = first * 2 * kl + second * (3 * entropy + 0.5 * target)
        assert module.penalty().item() == pytest.approx(expected, rel=1e-5)
    assert latent().penalty().item() == 0


# ---- in a stack ----------------------------------------------------------------------------------


def stack(kind=TransformerEncoder, dropout=0.0, **options):
    """Language 0 leaves out layers 1 and 4, language 1 the lowest, language 2 none."""
    latent = {"languages": LANGUAGES, "seed": 7} | options
    sizes = LAYERS, DIM, HEADS, FFN
    module = shaken(kind(*sizes, connection="latent", dropout=dropout, latent=latent))
    logits = [[2.0, -1, 1, 3, -2], [-1, 1, 1, 1, 1], [1, 1, 2, 0, 1]]
    module.latent.logits.data.copy_(torch.tensor(logits))
    return module


@pytest.mark.parametrize("evaluation", ["threshold", "mean"])
def test_unused_layers_do_not_run_and_keep_neither_keys_nor_values(evaluation):
    m = stack(TransformerDecoder, evaluation=evaluation).eval()
    unused = [evaluation == "threshold" and layer in (1, 4) for layer in range(LAYERS)]
    for layer, never in zip(m.layers, unused, strict=True):
        if never:
            layer.forward = None
    x, encoded = torch.randn(2, 4, DIM), torch.randn(2, 3, DIM)
    m(x, encoded)
    cache = m.start(encoded.flatten(0, 1), Packing(2, 3))
    m.step(x[:, 0], cache)
    assert [kv is None for kv in cache.encoded] == unused
    assert [kv.key_value is None for kv in cache.layers] == unused
    cache.reorder(torch.tensor([1, 1, 1]))
    assert cache.hypotheses.packing.tokens == 3
    assert cache.encoded[0][0].shape[0] == cache.layers[3].key_value.shape[0] == 1


def checkpointed(m, x, **options):
    return checkpoint(m, x, **{"use_reentrant": False} | options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_again(reentrant):
    """Two forwards, then their backwards in reverse order."""
    inputs, found = torch.randn(2, 5, DIM), []
    for again in (False, True):
        torch.manual_seed(9)
        x, m = inputs.clone().requires_grad_(), stack(dropout=0.2)
        m.latent.set_step(3)
        outputs = [checkpointed(m, x, use_reentrant=reentrant) if again else m(x) for _ in range(2)]
        for y in reversed(outputs):
            y.square().sum().backward()
        assert not torch.equal(*outputs)
        found.append([*outputs, x.grad, *(p.grad for p in m.parameters())])
    assert all(map(torch.equal, *found))


def test_a_draw_that_backward_cannot_make_again_is_an_error():
    m, x = stack(), leaf(2, 5, DIM)
    loss = checkpointed(m, x, preserve_rng_state=False).sum()
    with pytest.raises(RuntimeError, match="checkpointing needs preserve_rng_state=True"):
        loss.backward()
    loss = checkpointed(m, x).sum()
    m.latent.set_step(4)
    with pytest.raises(RuntimeError, match="backward must run before the next set_step"):
        loss.backward()
