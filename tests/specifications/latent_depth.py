"""Latent depth: a random variable decides whether a layer is used; its distribution is learned.

    x_{l+1} = x_l + z_l F_l(x_l)
    z_l     = sigma((a_l + g_1 - g_2) / tau),    g = -log(-log u), u uniform on (0, 1)

a are logits (N, L) for N languages and L layers. z_l is above 1/2 with probability
``p_l = sigma(a_l)`` for any temperature tau, because a difference of two Gumbels is logistic.

Li et al., Deep Transformers with Latent Depth, 2020; Jang et al., Categorical Reparameterization
with Gumbel-Softmax, 2017; Bengio et al., Estimating or Propagating Gradients Through Stochastic
Neurons, 2013, for the straight-through estimator.
"""

import torch
from torch import Tensor


def sample(logits: Tensor, u: Tensor, tau: float, hard: bool = False) -> Tensor:
    """z in the logits' shape, from uniform ``u`` (2, *shape).

    With ``hard``, z is 0 or 1 in the forward pass and has the soft z's gradient in the backward
    pass.
    """
    g1, g2 = -torch.log(-torch.log(u))
    soft = torch.sigmoid((logits + g1 - g2) / tau)
    if not hard:
        return soft
    return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())


def kl(p: Tensor, prior: Tensor) -> Tensor:
    """``KL(Bernoulli(p) || Bernoulli(prior))``, the sum over layers and the mean over languages.

    p: (N, L), strictly between 0 and 1.
    """
    on = p * torch.log(p / prior)
    off = (1 - p) * torch.log((1 - p) / (1 - prior))
    return (on + off).sum(1).mean()


def entropy(p: Tensor) -> Tensor:
    """``-sum_l u_l log u_l`` with u_l the mean of p (N, L) over languages.

    Low where all languages use a layer, or none does.
    """
    u = p.mean(0)
    return -(u * torch.log(u)).sum()


def target(p: Tensor, layers: float) -> Tensor:
    """``(sum_l u_l - K)^2`` with u_l the mean of p (N, L) over languages, K = ``layers``."""
    return (p.mean(0).sum() - layers) ** 2
