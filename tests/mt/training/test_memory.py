"""Training within a memory budget: plans, trials, messages and errors."""

import importlib
from unittest.mock import Mock

import pytest

from deepfast.memory import parse_bytes
from deepfast.mt.models.checkpoint import load_checkpoint
from deepfast.mt.training import TrainingError, train
from deepfast.mt.training.memory import fit_memory, plan_run
from deepfast.mt.training.trainer import Trainer
from tests.mt.training.runs import rows

WIDE = {"data.max_tokens": 600, "train.max_steps": 2, "train.validate_every": 2,
        "model.encoder_layers": 4, "model.dim": 32, "model.ffn_dim": 128}  # fmt: skip


@pytest.fixture
def most(make_trainer):
    """Bytes of a step that keeps everything; one that keeps the least takes less than 0.6 of it."""
    return plan_run(make_trainer(WIDE), 2**50).peak


def test_a_size_is_planned_tried_and_told(make_recipe, run, most, capsys, tmp_path):
    """The losses are those of a run that keeps everything, to the bit."""
    recipe = make_recipe(WIDE | {"memory_budget": f"{int(0.65 * most)}B"})
    result = train(recipe)
    text = capsys.readouterr().out
    plain = run(WIDE | {"output": str(tmp_path / "plain")})
    losses, wanted = (rows(folder, "train") for folder in (result.output, plain.output))
    assert [row["loss"] for row in losses] == [row["loss"] for row in wanted]
    # The checkpoint's model and config do not name the policies.
    assert "recompute" not in load_checkpoint(result.checkpoint)["config"]
    (row,) = rows(recipe.output, "memory")
    assert row["step"] == 0
    assert row["measured_bytes"] <= row["predicted_bytes"] <= parse_bytes(recipe.memory_budget)
    assert row["policies"].partition(";")[0] != "none"
    assert f"recompute policies: {row['policies']}\n" in text
    assert "\nit fits\n" in text


def test_the_prediction_holds_for_full_batches(make_trainer, most):
    """The largest micro-batch has fewer tokens than max_tokens; with its tokens the plan holds."""
    for share in (0.6, 0.8, 1.0):
        trainer = make_trainer(WIDE | {"memory_budget": f"{int(share * most)}B"})
        batch = trainer.corpus.batches.largest()
        row = fit_memory(trainer, lambda _: None)
        filled = (batch.source_tokens + batch.target_tokens) / 1200
        assert 0.6 < filled <= 1
        assert 0.9 * filled < row["measured_bytes"] / row["predicted_bytes"] < 1.05
    # Accumulation holds gradients beside activations.
    once, thrice = (make_trainer(WIDE | {"optim.accumulate": n}).measure() for n in (1, 3))
    assert thrice > once


def test_what_does_not_fit_is_refused(run, make_trainer, monkeypatch):
    """By the plan, before it runs; or by a trial on any rank, so that all ranks stop together."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "measure", None)
        # What would fit takes seconds to find; the planner's tests find it.
        module = importlib.import_module("deepfast.memory.plan")
        patch.setattr(module, "_largest", Mock(side_effect=ValueError))
        told = r"^memory_budget: .* within 1\.00 MiB, got one of .* for data\.max_tokens=600: "
        with pytest.raises(TrainingError, match=told):
            run(WIDE | {"memory_budget": "1MiB"})
    trainer = make_trainer(WIDE | {"memory_budget": "1TiB"})
    rows = trainer.ranks.rows
    monkeypatch.setattr(trainer.ranks, "rows", lambda value: [*rows(value), [2.0**60]])
    with pytest.raises(TrainingError) as error:
        fit_memory(trainer, lambda _: None)
    assert str(error.value) == (
        "memory_budget: expected a step within 1.00 TiB, got one of 1048576 TiB, measured with "
        "recompute policies none; decoder none: choose data.max_tokens below 600"
    )
