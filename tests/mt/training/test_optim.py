"""The schedule and the optimizer's groups."""

import pytest
import torch

from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.mt.training import OptimSection
from deepfast.mt.training.optim import build_optimizer, learning_rate

SIZES = {"dim": 8, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 2, "decoder_layers": 1}


def test_schedule_rises_linearly_and_falls_with_the_root():
    section = OptimSection(lr=2e-3, warmup=100)
    rates = [learning_rate(step, section) for step in (1, 50, 100, 400)]
    assert rates == pytest.approx([2e-5, 1e-3, 2e-3, 1e-3])


def test_schedule_stays_and_restarts():
    section = OptimSection(
        lr=2e-3, warmup=10, schedule="constant", restart_step=20, restart_lr=5e-5
    )
    rates = [learning_rate(step, section) for step in (5, 10, 20, 21, 900)]
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3, 5e-5, 5e-5])


def test_l2_is_in_the_gradient():
    model = Transformer(TransformerConfig(vocab_size=11, **SIZES))
    optimizer = build_optimizer(model, OptimSection(l2=0.5))
    assert type(optimizer) is torch.optim.Adam
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]


def test_a_model_says_how_its_parameters_learn():
    model = torch.nn.Linear(3, 2)
    model.parameter_groups = lambda: [
        {"params": [model.weight], "lr_scale": 0.1, "decays": True},
        {"params": [model.bias]},
    ]
    groups = build_optimizer(model, OptimSection(weight_decay=0.2)).param_groups
    assert [(g["lr_scale"], g["weight_decay"]) for g in groups] == [(0.1, 0.2), (1.0, 0.0)]


def test_only_matrices_of_linear_layers_decay():
    model = Transformer(TransformerConfig(vocab_size=11, **SIZES))
    optimizer = build_optimizer(model, OptimSection(weight_decay=0.1))
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "encoder.layers.0.feed_forward.up.weight" in names
    assert not any("norm" in n or "dlcl" in n or "bias" in n or "embedding" in n for n in names)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


def test_fewer_micro_batches_after_the_restart(make_trainer):
    trainer = make_trainer({
        "optim.accumulate": 3, "optim.restart_step": 2, "optim.restart_lr": 1e-4,
        "optim.restart_accumulate": 1, "data.max_tokens": 60,
    })  # fmt: skip
    taken = []
    for _ in range(4):
        trainer.train_step()
        taken.append(trainer.corpus.batches.state_dict()["position"])
    assert taken == [3, 6, 7, 8]


def test_adam_begins_anew_at_the_restart(make_trainer):
    changes = {"optim.restart_step": 2, "optim.restart_lr": 1e-4, "optim.betas": [0.9, 0.98]}
    trainer = make_trainer(changes)
    for count in (1, 2, 1, 2):
        trainer.train_step()
        states = trainer.optimizer.state
        assert {int(state["step"]) for state in states.values()} == {count}
        if count == 1:
            # Averages of this step's gradient alone.
            for p, state in states.items():
                torch.testing.assert_close(state["exp_avg"], 0.1 * p.grad)
                torch.testing.assert_close(state["exp_avg_sq"], 0.02 * p.grad**2)
