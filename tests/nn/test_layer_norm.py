"""deepfast.nn.LayerNorm."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.nn import LayerNorm


def test_equals_pytorchs_module(backend, ran):
    ours, theirs = LayerNorm(9, backend=backend), torch.nn.LayerNorm(9)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9)
    with ran("layer_norm", backend):
        torch.testing.assert_close(ours(x), theirs(x))


def test_dropout_follows_the_mode(backend):
    norm, x = LayerNorm(9, backend=backend), torch.randn(40, 9)
    assert not torch.equal(norm(x, dropout_p=0.5), norm(x))
    norm.eval()
    assert torch.equal(norm(x, dropout_p=0.5), norm(x))


def test_residual_returns_the_sum(backend):
    norm, (x, r) = LayerNorm(9, backend=backend), torch.randn(2, 4, 9)
    y, s = norm(x, residual=r)
    torch.testing.assert_close(s, x + r)
    torch.testing.assert_close(y, F.layer_norm(x + r, (9,)))


def test_as_output():
    norm = LayerNorm(9, eps=1e-3)
    assert norm.as_output() == (norm.weight, norm.bias, 1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1,), "dim must be a whole number of at least 1, got -1"),
        ((4, math.nan), "eps must be a number of at least 0, got nan"),
        ((4, -1e-5), "eps must be a number of at least 0, got -1e-05"),
    ],
)
def test_refuses(args, message):
    with pytest.raises(ValueError, match=f"LayerNorm: {message}"):
        LayerNorm(*args)
