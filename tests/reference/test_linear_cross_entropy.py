"""The reference of linear_cross_entropy is torch's cross entropy of torch's linear."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend
from deepfast.reference.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 9).double()], ids=["no bias", "bias"])
def test_is_torchs(smoothing, reduction, ignore_index, bias):
    hidden, weight = torch.randn(2, 5, 6).double(), torch.randn(9, 6).double()
    target = torch.randint(9, (2, 5))
    target[0, 1] = target[1, 4] = ignore_index
    options = {"ignore_index": ignore_index, "reduction": reduction}
    loss, nll = linear_cross_entropy(
        hidden, weight, target, bias=bias, label_smoothing=smoothing, **options
    )
    logits = F.linear(hidden, weight, bias).mT
    expected = F.cross_entropy(logits, target, label_smoothing=smoothing, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, F.cross_entropy(logits, target, **options))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_gradient_of_the_launcher_is_autograds(smoothing):
    logits = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    target = torch.randint(9, (7,))
    target[3] = -1
    loss = F.cross_entropy(
        logits, target, label_smoothing=smoothing, ignore_index=-1, reduction="none"
    )
    (expected,) = torch.autograd.grad(loss.sum(), logits)
    _, launch = backend.choose("linear_cross_entropy", "reference", "cpu", logits.dtype)
    got, (losses, nll) = logits.detach().clone(), torch.empty(2, 7, dtype=torch.float64)
    launch.cross_entropy(
        logits=got, target=target, label_smoothing=smoothing, ignore_index=-1, write_grad=True,
        loss=losses, nll=nll,
    )  # fmt: skip
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(losses, loss.detach())
    untouched = logits.detach().clone()
    launch.cross_entropy(
        logits=untouched, target=target, label_smoothing=smoothing, ignore_index=-1,
        write_grad=False, loss=losses, nll=nll,
    )  # fmt: skip
    assert torch.equal(untouched, logits)
