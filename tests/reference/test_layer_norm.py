"""The specification of layer-norm and RMS norm against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.reference.dropout import dropout_mask
from deepfast.reference.layer_norm import layer_norm, normalise, rms_norm


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_pytorch(weight, bias):
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    w = torch.randn(7, dtype=torch.float64) if weight else None
    b = torch.randn(7, dtype=torch.float64) if bias else None
    y, s = layer_norm(x, w, b, 1e-3)
    torch.testing.assert_close(y, F.layer_norm(x, (7,), w, b, 1e-3))
    assert torch.equal(s, x)


def test_residual_and_dropout_come_before():
    x, r = torch.randn(2, 4, 7, dtype=torch.float64).unbind()
    y, s = layer_norm(x, None, None, residual=r, dropout_p=0.5, seed=3)
    torch.testing.assert_close(s, r + x * dropout_mask(3, 4, 7, 0.5))
    torch.testing.assert_close(y, F.layer_norm(s, (7,)))


@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_equals_pytorch(weight):
    x, r = torch.randn(2, 4, 7, dtype=torch.float64).unbind()
    w = torch.randn(7, dtype=torch.float64) if weight else None
    torch.testing.assert_close(rms_norm(x, w, 1e-3)[0], F.rms_norm(x, (7,), w, 1e-3))
    y, s = rms_norm(x, w, 1e-3, residual=r, dropout_p=0.5, seed=3)
    torch.testing.assert_close(s, r + x * dropout_mask(3, 4, 7, 0.5))
    torch.testing.assert_close(y, F.rms_norm(s, (7,), w, 1e-3))


def test_moments():
    x = torch.randn(5, 9, dtype=torch.float64)
    n, mean, rstd = normalise(x, 1e-5)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(rstd, (x.var(1, correction=0) + 1e-5).rsqrt())
    torch.testing.assert_close(n, (x - mean[:, None]) * rstd[:, None])


def test_dtype_of_the_result_is_that_of_the_input():
    x = torch.randn(3, 5).bfloat16()
    y, s = layer_norm(x, torch.ones(5), None)
    assert y.dtype == s.dtype == torch.bfloat16
