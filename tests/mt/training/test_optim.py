"""The schedule, the optimizer's groups, and the restart of Adam."""

import pytest
import torch

from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.mt.training import OptimSection
from deepfast.mt.training.optim import build_optimizer, learning_rate

SIZES = {"dim": 8, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 2, "decoder_layers": 1}


def test_the_rate_rises_falls_or_stays_and_restarts():
    constant = {"schedule": "constant", "restart_step": 20, "restart_lr": 5e-5}
    for changes, expected in (
        ({}, {1: 2e-4, 5: 1e-3, 10: 2e-3, 40: 1e-3}),
        (constant, {5: 1e-3, 10: 2e-3, 20: 2e-3, 21: 5e-5, 900: 5e-5}),
    ):
        section = OptimSection(lr=2e-3, warmup=10, **changes)
        rates = {step: learning_rate(step, section) for step in expected}
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "kind"), [("l2", torch.optim.Adam), ("weight_decay", torch.optim.AdamW)]
)
def test_only_matrices_of_linear_layers_decay_unless_the_model_says_otherwise(name, kind):
    model = Transformer(TransformerConfig(vocab_size=11, **SIZES))
    optimizer = build_optimizer(model, OptimSection(**{name: 0.1}))
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "encoder.layers.0.feed_forward.up.weight" in names
    assert not any("norm" in n or "dlcl" in n or "bias" in n or "embedding" in n for n in names)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "lr_scale": 0.1}
    model.parameter_groups = lambda: [group | {"decays": True}]
    (group,) = build_optimizer(model, OptimSection(**{name: 0.2})).param_groups
    assert (group["lr_scale"], group["weight_decay"]) == (0.1, 0.2)


def test_adam_begins_anew_at_the_restart_with_fewer_micro_batches(make_trainer):
    trainer = make_trainer({
        "optim.accumulate": 3, "optim.restart_step": 2, "optim.restart_lr": 1e-4,
        "optim.restart_accumulate": 1, "data.max_tokens": 60, "optim.betas": [0.9, 0.98],
    })  # fmt: skip
    for count, taken in ((1, 3), (2, 6), (1, 7), (2, 8)):
        trainer.train_step()
        assert trainer.corpus.batches.state_dict()["position"] == taken
        states = trainer.optimizer.state
        assert {int(state["step"]) for state in states.values()} == {count}
        if count == 1:
            # Averages of this step's gradient alone.
            for p, state in states.items():
                torch.testing.assert_close(state["exp_avg"], 0.1 * p.grad)
                torch.testing.assert_close(state["exp_avg_sq"], 0.02 * p.grad**2)
