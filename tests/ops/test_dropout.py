"""Dropout inside an op, on every backend: its mask, its seed, and what is dropped."""

import pytest
import torch

from deepfast import backend as backends
from deepfast.cases import ops as cases
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from deepfast.ops import activation, add_layer_norm
from deepfast.ops.add_dropout import add_dropout
from deepfast.reference.dropout import dropout_mask
from tests.ops.cases import Call, D, T, equal, results

DTYPES = list(backends.DTYPES)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 8, 9, 127, 128, 129, 300])
@pytest.mark.parametrize("seed", [0, 7, 2**33 + 5, 2**63 - 1, -3])
def test_the_mask_is_the_references(backend, dropped, dtype, dim, seed):
    mask = dropout_mask(seed, 70, dim, 0.3).to(torch.promote_types(dtype, torch.float32))
    x = (30 + 10 * torch.rand(70, dim)).to(dtype)
    assert torch.equal(dropped(x, 0.3, backend, seed), (x.to(mask.dtype) * mask).to(dtype))


@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.999, 1 - 1e-6])
def test_the_probability_is_rounded_as_the_references(backend, dropped, p):
    expected = 32 * dropout_mask(5, 40, 300, p).float()
    assert torch.equal(dropped(torch.full((40, 300), 32.0), p, backend, 5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_dropped_is_zero_whatever_it_was(backend, dropped, dtype):
    """Infinities and NaNs of the input, and of its gradient."""
    gone = dropout_mask(5, 4, 150, 0.5) == 0
    x = torch.full((4, 150), 32, dtype=dtype).masked_fill(gone, torch.inf)
    x[gone & (torch.rand(4, 150) < 0.5)] = torch.nan
    x.requires_grad_()
    s = dropped(x, 0.5, backend, 5)
    assert torch.equal(s, (~gone * 64).to(dtype))
    s.backward(x.detach())
    assert torch.equal(x.grad, s)


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


@pytest.mark.parametrize("p", [1.0, 1 - 1e-6])
def test_everything_is_dropped(backend, dropped, p):
    x = torch.randn(6, 70)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x.requires_grad_()
    s = dropped(x, p, backend, 5)
    s.sum().backward()
    assert s.eq(0).all()
    assert x.grad.eq(0).all()


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
