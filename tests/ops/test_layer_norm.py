"""deepfast.ops.layer_norm and rms_norm: overflow, large results, and tensors changed in place."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import add_layer_norm, layer_norm, rms_norm


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_what_overflows_in_torch_overflows(backend, value):
    x = torch.ones(2, 9)
    x[0, 3] = value
    expected = F.rms_norm(x, (9,), None, 1e-6)
    torch.testing.assert_close(rms_norm(x, backend=backend), expected, equal_nan=True)


@pytest.mark.parametrize("dim", [1024, 1021])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_result_has_the_values_of_its_parts(dtype, dim):
    # Results of 8 MiB are stored past the caches. 1021 channels leave most rows without alignment.
    tokens = 8 * 2**20 // (1021 * dtype.itemsize) + 2
    x, dy = torch.randn(2, tokens, dim).to(dtype).unbind()
    weight, bias = torch.randn(2, dim).unbind()

    def both_ways(x, dy):
        x = x.detach().requires_grad_()
        y = layer_norm(x, weight, bias, backend="cpu")
        return y.detach(), *torch.autograd.grad(y, x, dy)

    parts = [both_ways(*part) for part in zip(x.split(600), dy.split(600), strict=True)]
    for large, *small in zip(both_ways(x, dy), *parts, strict=True):
        assert torch.equal(large, torch.cat(small))


def test_gradients_of_two_leaves_share_no_memory(backend):
    x, r = leaves = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    for _ in range(2):
        y, s = add_layer_norm(x, r, None, None, backend=backend)
        (y * torch.arange(6.0) + s).sum().backward()
    assert x.grad.data_ptr() != r.grad.data_ptr()
    once = (F.layer_norm(x + r, (6,)) * torch.arange(6.0) + x + r).sum()
    torch.testing.assert_close([g.grad / 2 for g in leaves], [*torch.autograd.grad(once, leaves)])


def test_what_may_be_changed_in_place(backend):
    """The result, and not the input before backward."""
    x = torch.randn(4, 6, requires_grad=True)
    y = F.relu(layer_norm(x, None, None, backend=backend), inplace=True)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(F.relu(F.layer_norm(x, (6,))).square().sum(), x)
    torch.testing.assert_close(got, want)
    a = x * 1
    y = layer_norm(a, None, None, backend=backend)
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
