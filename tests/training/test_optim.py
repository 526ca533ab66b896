"""The schedule, the optimizer's groups and the loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.models import Transformer, TransformerConfig
from deepfast.training import OptimSection
from deepfast.training.loss import smoothed_loss
from deepfast.training.optim import build_optimizer, learning_rate


def test_schedule_rises_linearly_and_falls_with_the_root():
    rates = [learning_rate(step, peak=2e-3, warmup=100) for step in (1, 50, 100, 400)]
    assert rates == pytest.approx([2e-5, 1e-3, 2e-3, 1e-3])


def test_only_matrices_of_linear_layers_decay():
    model = Transformer(
        TransformerConfig(
            vocab_size=11, dim=8, heads=2, ffn_dim=16, encoder_layers=2, decoder_layers=1
        )
    )
    optimizer = build_optimizer(model, OptimSection(weight_decay=0.1))
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "encoder.layers.0.feed_forward.up.weight" in names
    assert not any("norm" in n or "dlcl" in n or "bias" in n or "embedding" in n for n in names)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_torchs(smoothing, dtype):
    logits = (4 * torch.randn(7, 13)).to(dtype).requires_grad_()
    labels = torch.randint(13, (7,))
    loss, nll = smoothed_loss(logits, labels, smoothing)
    twin = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(twin, labels, label_smoothing=smoothing, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert nll.item() == pytest.approx(F.cross_entropy(twin, labels, reduction="sum").item())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, twin.grad.to(dtype), rtol=1e-2, atol=1e-5)
    assert not nll.requires_grad


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    loss, nll = smoothed_loss(torch.zeros(3, 50), torch.tensor([0, 1, 49]), 0.1)
    assert loss.item() == pytest.approx(3 * math.log(50))
    assert nll.item() == pytest.approx(3 * math.log(50))
