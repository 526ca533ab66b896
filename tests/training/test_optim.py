"""The schedule and the optimizer's groups."""

import pytest

from deepfast.models import Transformer, TransformerConfig
from deepfast.training import OptimSection
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
