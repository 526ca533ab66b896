"""Latent depth: whether a layer is used is a random variable whose distribution is learned.

    x_{l+1} = x_l + z_l F_l(x_l)
    z_l     = sigma((a_l + g_1 - g_2) / tau),    g = -log(-log u), u uniform on (0, 1)

a are logits (N, L) of N languages and L layers. Without the temperature's smoothing z_l is 1 with
probability ``p_l = sigma(a_l)``, whatever tau is, since a difference of two Gumbels is logistic.

Li et al., Deep Transformers with Latent Depth, 2020; Jang et al., Categorical Reparameterization
with Gumbel-Softmax, 2017; Bengio et al., Estimating or Propagating Gradients Through Stochastic
Neurons, 2013, for the straight-through estimator.
"""

import torch
from torch import Tensor


def sample(logits: Tensor, u: Tensor, tau: float, hard: bool = False) -> Tensor:
    """z of the logits' shape from uniforms ``u`` (2, *shape); with ``hard`` 0 or 1 in forward and
    the gradient of the soft z in backward."""
    g1, g2 = -torch.log(-torch.log(u))
    soft = torch.sigmoid((logits + g1 - g2) / tau)
    if not hard:
        return soft
    return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())


def kl(p: Tensor, prior: Tensor) -> Tensor:
    """``KL(Bernoulli(p) || Bernoulli(prior))``, both of its terms, summed over layers, mean over
    languages; p (N, L) strictly between 0 and 1."""
    on = p * torch.log(p / prior)
    off = (1 - p) * torch.log((1 - p) / (1 - prior))
    return (on + off).sum(1).mean()


def entropy(p: Tensor) -> Tensor:
    """``-sum_l u_l log u_l`` with u_l the mean of p (N, L) over languages: low where languages
    share a layer, or all leave it."""
    u = p.mean(0)
    return -(u * torch.log(u)).sum()


def target(p: Tensor, layers: float) -> Tensor:
    """``(sum_l u_l - K)^2`` with u_l the mean of p (N, L) over languages, K the layers wanted."""
    return (p.mean(0).sum() - layers) ** 2
