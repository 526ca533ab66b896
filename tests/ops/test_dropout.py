"""Dropout inside an op: its mask, its seed, and what is dropped."""

import pytest
import torch

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from deepfast.ops import activation, add_layer_norm
from deepfast.ops.add_dropout import add_dropout
from deepfast.reference.dropout import dropout_mask
from tests.ops.cases import HERE, LOW, D, T, equal


def summed(x, p, backend, seed=None, training=True):
    residual, options = torch.zeros_like(x), {"training": training, "seed": seed}
    return add_layer_norm(x, residual, None, None, dropout_p=p, backend=backend, **options)[1]


def added(x, p, backend, seed=None, training=True):
    return add_dropout("add_dropout", x, None, p if training else 0.0, seed, backend)


def activated(kind):
    """Of positive numbers beyond 10 an activation is the number itself."""
    return lambda x, p, backend, seed=None, training=True: activation(
        x, kind, dropout_p=p, training=training, seed=seed, backend=backend
    )


FORMS = {"add_layer_norm": summed, "add_dropout": added}
FORMS |= {kind: activated(kind) for kind in ("relu", "gelu")}


@pytest.fixture(params=FORMS)
def dropped(request):
    """An op that returns its operand after dropout."""
    return FORMS[request.param]


MASKS = [(1, 0, 0.3), (8, 7, 1e-6), (127, 2**33 + 5, 0.5), (128, 2**63 - 1, 0.999)]
MASKS += [(129, -3, 1e-3), (300, 5, 1 - 1e-6), (300, 5, 1.0)]
CALLS = [(by, dtype) for by in HERE for dtype in (LOW if by == "cpu" else LOW[1:2])]


@pytest.mark.parametrize(("by", "dtype"), CALLS, ids=str)
def test_the_mask_is_the_references(dropped, by, dtype):
    """Its probability is rounded in the same way. What is dropped is zero whatever it was:
    infinities and NaNs of the input, and of its gradient."""
    rows = 2 if by == "triton" else 9
    for dim, seed, p in MASKS:
        mask = dropout_mask(seed, rows, dim, p).float()
        kept = (30 + 10 * torch.rand(rows, dim)).to(dtype)
        bad = torch.tensor([torch.inf, torch.nan])[torch.randint(2, (rows, dim))]
        x = torch.where(mask > 0, kept, bad.to(dtype)).requires_grad_()
        s = dropped(x, p, by, seed)
        expected = (kept * mask).to(dtype)
        assert torch.equal(s, expected), (dim, seed, p)
        s.backward(x.detach())
        assert torch.equal(x.grad, expected), (dim, seed, p)


def test_seeds(backend, dropped):
    x = torch.full((20, 50), 32.0)
    first = dropped(x, 0.5, backend, 1)
    assert torch.equal(first, dropped(x, 0.5, backend, torch.tensor(1)))
    assert not torch.equal(first, dropped(x, 0.5, backend, 2))
    torch.manual_seed(3)
    a, b = dropped(x, 0.5, backend), dropped(x, 0.5, backend)
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(dropped(x, 0.5, backend), a)
    assert torch.equal(dropped(x, 0.5, backend), b)
    state = torch.get_rng_state()
    assert torch.equal(dropped(x, 0.0, backend), x)
    assert torch.equal(dropped(x, 0.5, backend, training=False), x)
    assert torch.equal(torch.get_rng_state(), state), "no dropout, yet a seed was drawn"


def pushed(connection):
    module, history = connection(2, D), DepthHistory()
    return lambda x, p, _, seed: module(x, history, dropout_p=p, seed=seed)


@pytest.mark.parametrize("kind", [*FORMS, DLCL, AttentionResiduals])
def test_a_seed_may_change_after_the_call(kind):
    """Backward has the mask of forward, also where a tensor counts the pushes to a connection."""
    found = []
    for counted in (True, False):
        run = FORMS.get(kind) or pushed(kind)
        x = torch.linspace(30, 40, T * D).view(T, D).requires_grad_()
        seed, y = torch.tensor(7), x
        for k in range(3):
            y = run(y, 0.5, None, seed if counted else torch.tensor(7 + k))
            seed += 1
        (y * torch.arange(D)).sum().backward()
        found.append((y.detach(), x.grad))
    assert equal(*found)
