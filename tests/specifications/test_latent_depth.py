"""The specification of latent depth: gradients, distribution, closed forms."""

import pytest
import torch

from tests.specifications import latent_depth as spec

LOGITS = torch.tensor([[-2.0, 0.3, 1.5], [0.7, -0.4, 3.0]], dtype=torch.float64)


def uniforms(*shape):
    return torch.rand(2, *shape, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)


@pytest.mark.parametrize("tau", [0.7, 3.0])
def test_hard_samples_are_bernoulli_with_the_gradient_of_the_soft_ones(tau):
    """Frequencies within four standard errors of sigma(a), and the gradients of each draw equal."""
    draws = 20_000
    u = uniforms(draws, 3)
    leaf = LOGITS[0].clone().requires_grad_()
    hard = spec.sample(leaf.expand(draws, 3), u, tau, hard=True)
    assert set(hard.unique().tolist()) == {0.0, 1.0}
    p = LOGITS[0].sigmoid()
    assert ((hard.mean(0) - p).abs() < 4 * (p * (1 - p) / draws).sqrt()).all()
    soft = spec.sample(leaf.expand(draws, 3), u, tau)
    assert torch.equal(hard > 0.5, soft > 0.5)
    weight = torch.randn(draws, 3, dtype=torch.float64)
    (got,), (want,) = (torch.autograd.grad((z * weight).sum(), leaf) for z in (hard, soft))
    torch.testing.assert_close(got, want)


def test_straight_through_estimates_a_gradient_of_the_right_sign():
    """Monte Carlo: the mean estimate for f(z) = c z against the exact slope c p (1 - p)."""
    draws, c = 200_000, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    u = uniforms(draws, 3)
    leaf = LOGITS[0].clone().requires_grad_()
    z = spec.sample(leaf.expand(draws, 3), u, 0.05, hard=True)
    (got,) = torch.autograd.grad((z * c).sum() / draws, leaf)
    p = LOGITS[0].sigmoid()
    # The temperature adds a bias, and sampling noise: at a low one within a tenth.
    torch.testing.assert_close(got, c * p * (1 - p), rtol=0.1, atol=0)


def test_kl_is_that_of_bernoullis():
    p, prior = LOGITS.sigmoid(), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    bernoulli = torch.distributions.Bernoulli
    exact = torch.distributions.kl_divergence(bernoulli(p), bernoulli(prior.expand(2, 3)))
    torch.testing.assert_close(spec.kl(p, prior), exact.sum(1).mean())
    assert spec.kl(prior.expand(2, 3), prior) == 0
