"""The dropout in front of deepfast.ops.layer_norm, on every backend."""

import pytest
import torch

from deepfast import backend as backends
from deepfast.ops import layer_norm
from deepfast.reference.dropout import dropout_mask

DTYPES = list(backends.DTYPES)


def dropped(x, p, backend, seed=None):
    return layer_norm(
        x, None, None, residual=torch.zeros_like(x), dropout_p=p, training=True, seed=seed,
        backend=backend,
    )[1]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 8, 9, 127, 128, 129, 300])
@pytest.mark.parametrize("seed", [0, 7, 2**33 + 5, 2**63 - 1, -3])
def test_dropout_mask_agrees_with_the_reference(backend, dtype, dim, seed):
    mask = dropout_mask(seed, 70, dim, 0.3).to(torch.promote_types(dtype, torch.float32))
    x = torch.randn(70, dim).to(dtype)
    assert torch.equal(dropped(x, 0.3, backend, seed), (x.to(mask.dtype) * mask).to(dtype))


@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.999, 1 - 1e-6])
def test_dropout_rounds_its_probability_as_the_reference(backend, p):
    expected = dropout_mask(5, 40, 300, p).float()
    assert torch.equal(dropped(torch.ones(40, 300), p, backend, 5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_dropped_is_zero_whatever_it_was(backend, dtype):
    """Infinities and NaNs of the input, and of its gradient."""
    gone = dropout_mask(5, 4, 150, 0.5) == 0
    x = torch.ones(4, 150, dtype=dtype).masked_fill(gone, torch.inf)
    x[gone & (torch.rand(4, 150) < 0.5)] = torch.nan
    x.requires_grad_()
    s = dropped(x, 0.5, backend, 5)
    assert torch.equal(s, (~gone * 2).to(dtype))
    s.backward(x.detach())
    assert torch.equal(x.grad, s)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (None, "dropout_p is 0.5 and the seed is missing"),
        (torch.tensor([3]), r"seed: expected \(\) in int64 on cpu, .* got \(1\) in int64"),
        (torch.tensor(3.0), r"seed: expected \(\) in int64 on cpu, .* got \(\) in float32"),
    ],
)
def test_a_launch_with_dropout_needs_a_seed(seed, message):
    if (reason := backends.refusal("layer_norm", "cpu", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    _, launch = backends.choose("layer_norm", "cpu", "cpu", torch.float32)
    x, y, s = torch.randn(3, 4, 8)
    mean, rstd = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=message):
        launch.layer_norm_forward(
            x=x, eps=1e-5, rms=False, dropout_p=0.5, seed=seed, sum=s, y=y, mean=mean, rstd=rstd,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        launch.layer_norm_backward(
            sum=s, dy=y, rms=False, mean=mean, rstd=rstd, dropout_p=0.5, seed=seed, dx=x,
        )  # fmt: skip


def test_dropout_seeds(backend):
    x = torch.ones(20, 50)
    assert not torch.equal(dropped(x, 0.5, backend, 1), dropped(x, 0.5, backend, 2))
    torch.manual_seed(3)
    a, b = dropped(x, 0.5, backend), dropped(x, 0.5, backend)
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(dropped(x, 0.5, backend), a)
    assert torch.equal(dropped(x, 0.5, backend), b)


def test_dropout_of_nothing_and_of_everything(backend):
    x = torch.randn(6, 70)
    state = torch.get_rng_state()
    assert torch.equal(dropped(x, 0.0, backend), x)
    assert torch.equal(torch.get_rng_state(), state), "no dropout, yet a seed was drawn"
    assert dropped(x, 1.0, backend).eq(0).all()
    a = x.clone().requires_grad_()
    dropped(a, 1.0, backend).sum().backward()
    assert a.grad.eq(0).all()
