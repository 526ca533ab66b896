"""A seed that the caller changes in place after forward: backward uses the mask of forward."""

import pytest
import torch

from deepfast import ops
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory

T, D = 6, 16
P = {"dropout_p": 0.5, "training": True}


def norm():
    return torch.ones(D), torch.zeros(D)


def attention(x, seed):
    # torch's attention, the default on a CPU, has no seed.
    q = x.view(T, 2, D // 2)
    lengths = torch.tensor([0, T], dtype=torch.int32)
    o = ops.attention(
        q, q, q, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=T, max_seqlen_k=T,
        dropout_p=0.5, seed=seed, backend="reference",
    )  # fmt: skip
    return o.reshape(T, D)


def pushed(connection):
    def run(x, seed):
        torch.manual_seed(0)
        module, history = connection(2, D), DepthHistory()
        for k in range(3):
            x = module(x, history, dropout_p=0.5 if k else 0.0, seed=seed if k else None)
            seed += 1
        return x

    return run


OPS = {
    "layer_norm": lambda x, seed: ops.layer_norm(x, *norm(), residual=x, seed=seed, **P)[0],
    "rms_norm": lambda x, seed: ops.rms_norm(x, norm()[0], residual=x, seed=seed, **P)[0],
    "activation": lambda x, seed: ops.activation(x, "relu", seed=seed, **P),
    "attention": attention,
    "norm_linear": lambda x, seed: ops.norm_linear(
        x, *norm(), torch.eye(D), residual=x, seed=seed, **P
    )[0],
    "feed_forward": lambda x, seed: ops.feed_forward(
        x, *norm(), torch.eye(D), torch.zeros(D), torch.eye(D), torch.zeros(D), residual=x,
        seed=seed, activation_dropout_p=0.5, activation_seed=seed, **P,
    )[0],
    "DLCL": pushed(DLCL),
    "AttentionResiduals": pushed(AttentionResiduals),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_the_mask_is_that_of_forward(name):
    found = []
    for after in (0, 1):
        x, seed = torch.randn(T, D, generator=torch.Generator().manual_seed(1)), torch.tensor(7)
        x.requires_grad_(True)
        y = OPS[name](x, seed)
        seed += after
        (y * torch.arange(D)).sum().backward()
        found.append((y, x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["DLCL", "AttentionResiduals"])
def test_a_seed_that_counts_pushes_is_the_seed_of_each_push(name):
    """In place as with a new tensor for every push."""
    found = []
    for counted in (True, False):
        module, history = (DLCL if name == "DLCL" else AttentionResiduals)(2, D), DepthHistory()
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
        seed, y = torch.tensor(7), x
        for k in range(3):
            y = module(y, history, dropout_p=0.5, seed=seed if counted else torch.tensor(7 + k))
            seed += 1
        (y * torch.arange(D)).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
