"""A seed that the caller changes in place after forward: backward uses the mask of forward."""

import pytest
import torch

from deepfast.cases import ops as cases
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from tests.ops.cases import Call, D, T, equal, results

DROPPING = ["layer_norm", "rms_norm", "activation", "attention", "norm_linear", "feed_forward"]


@pytest.mark.parametrize("name", DROPPING)
def test_the_mask_is_that_of_forward(name, monkeypatch):
    found = []
    for after in (0, 1):
        torch.manual_seed(0)
        seed = torch.tensor(7)
        monkeypatch.setattr(cases, "SEED", seed)
        # torch's attention, the default on a CPU, has no seed.
        c = Call(name, "reference" if name == "attention" else None)

        def run(*leaves, c=c, seed=seed, after=after):
            out = c.run(*leaves)
            seed += after
            return out

        found.append(results(run, c.leaves))
    assert equal(*found)


@pytest.mark.parametrize("connection", [DLCL, AttentionResiduals])
def test_a_seed_that_counts_pushes_is_the_seed_of_each_push(connection):
    """In place as with a new tensor for every push."""
    found = []
    for counted in (True, False):
        module, history = connection(2, D), DepthHistory()
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
        seed, y = torch.tensor(7), x
        for k in range(3):
            y = module(y, history, dropout_p=0.5, seed=seed if counted else torch.tensor(7 + k))
            seed += 1
        (y * torch.arange(D)).sum().backward()
        found.append((y.detach(), x.grad))
    assert equal(*found)
