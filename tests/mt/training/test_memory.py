"""Training within a memory budget: plans, trials, messages and errors."""

import platform
import re

import pytest
import torch

from deepfast.memory import parse_bytes
from deepfast.mt.models.checkpoint import load_checkpoint
from deepfast.mt.training import TrainingError, train
from deepfast.mt.training.memory import fit_memory, plan_run
from deepfast.mt.training.trainer import Trainer
from tests.mt.training.runs import rows

WIDE = {"data.max_tokens": 600, "train.max_steps": 2, "train.validate_every": 2,
        "model.encoder_layers": 6, "model.dim": 32, "model.ffn_dim": 128}  # fmt: skip


@pytest.fixture
def limits(make_trainer):
    """Bytes of a step that keeps everything, and of one that keeps the least."""
    trainer = make_trainer(WIDE)
    return plan_run(trainer, 2**50).peak, plan_run(trainer, 1).what_fits.budget


@pytest.mark.parametrize(
    ("changes", "policies"),
    [({}, ("none", "ffn", "layer+input")),
     ({"model.encoder_connection": "attnres", "model.share_embeddings": "none"}, ("ffn",))],
    ids=["planned", "nothing planned"],
)  # fmt: skip
def test_a_policy_changes_memory_and_nothing_else(make_recipe, tmp_path, changes, policies):
    """The losses are the same to the bit under every policy, also with a plan and a trial."""
    seen = {}
    saving = [{"recompute": policy} for policy in policies]
    saving += [] if changes else [{"memory_budget": "1GiB"}]
    for number, saves in enumerate(({}, *saving)):
        output = {"output": str(tmp_path / str(number))}
        result = train(make_recipe(WIDE | changes | output | saves), quiet=True)
        seen[number] = [(row["step"], row["loss"]) for row in rows(result.output, "train")]
        assert len(rows(result.output, "memory")) == ("memory_budget" in saves)
        # The checkpoint's model and config do not name the policies.
        assert "recompute" not in load_checkpoint(result.checkpoint)["config"]
        assert seen[number] == seen[0]


def test_a_size_is_planned_tried_and_told(make_recipe, limits, capsys):
    recipe = make_recipe(WIDE | {"memory_budget": f"{sum(limits) // 2}B"})
    train(recipe)
    text = capsys.readouterr().out
    (row,) = rows(recipe.output, "memory")
    assert row["step"] == 0
    assert row["measured_bytes"] <= row["predicted_bytes"] <= parse_bytes(recipe.memory_budget)
    assert "none" not in row["policies"].split(";")[0]
    assert f"recompute policies: {row['policies']}\n" in text
    assert "\nit fits\n" in text
    assert " predicted, " in text


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_prediction_holds_for_full_batches(make_trainer, limits, share):
    """The largest micro-batch has fewer tokens than max_tokens; with its tokens the plan holds."""
    most, least = limits
    budget = int(least + share * (most - least))
    trainer = make_trainer(WIDE | {"memory_budget": f"{budget}B"})
    batch = trainer.corpus.batches.largest()
    row = fit_memory(trainer, lambda _: None)
    filled = (batch.source_tokens + batch.target_tokens) / 1200
    assert 0.6 < filled <= 1
    assert 0.9 * filled < row["measured_bytes"] / row["predicted_bytes"] < 1.05


def test_accumulation_holds_gradients_beside_activations(make_trainer):
    once, twice = (make_trainer(WIDE | {"optim.accumulate": n}).measure() for n in (1, 3))
    assert twice > once


def test_what_no_plan_fits_is_refused_before_it_runs(make_recipe, monkeypatch):
    monkeypatch.setattr(Trainer, "measure", None)
    told = r"^memory_budget: expected a step within 1\.00 MiB, got one of .* for data\.max_tokens="
    with pytest.raises(TrainingError, match=told + "600: .*") as error:
        train(make_recipe(WIDE | {"memory_budget": "1MiB"}), quiet=True)
    assert "\n" not in str(error.value)


def test_after_a_plan_that_was_too_low_another_one_is_made(make_trainer, monkeypatch, limits):
    budget, said = int(1.3 * limits[0]), []
    trainer = make_trainer(WIDE | {"memory_budget": f"{budget}B"})
    trials = iter([1.5 * budget, 0.9 * budget])
    monkeypatch.setattr(trainer, "measure", lambda: next(trials))
    row = fit_memory(trainer, said.append)
    assert row["measured_bytes"] == int(0.9 * budget)
    assert row["policies"] != "none; decoder none"
    told = [line for line in said if line.startswith("a trial took ")]
    assert [line.rpartition(" with ")[2] for line in told] == [
        "recompute policies none; decoder none"
    ]
    # The lowest layer's comes first, after the number of layers where they differ.
    assert re.match(rf"(\d+ )?{re.escape(trainer.model.encoder.policies[0])}\b", row["policies"])


def test_what_does_not_fit_when_tried_names_what_would(make_recipe, monkeypatch, limits):
    # What trials would measure if every plan promised too little memory.
    budget = int(1.02 * limits[1])
    monkeypatch.setattr(Trainer, "measure", lambda trainer: 1.5 * budget)
    with pytest.raises(TrainingError) as error:
        train(make_recipe(WIDE | {"memory_budget": f"{budget}B"}), quiet=True)
    told = "memory_budget: expected a step within .* with recompute .*: what fits is .* or .* wide"
    assert re.fullmatch(told, str(error.value))
    assert "it needs" not in str(error.value)


def test_a_gpu_without_so_much_and_a_rank_without_so_much(make_trainer, monkeypatch):
    """All ranks stop together."""

    def exhausted(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    trainer = make_trainer(WIDE | {"memory_budget": "1TiB"})
    rows = trainer.ranks.rows
    with monkeypatch.context() as patch:
        patch.setattr(trainer.ranks, "rows", lambda value: [*rows(value), [2.0**60]])
        with pytest.raises(TrainingError, match="got 1048576 TiB with recompute policies none"):
            fit_memory(trainer, lambda _: None)
    monkeypatch.setattr(trainer, "batch_loss", exhausted)
    with pytest.raises(TrainingError, match="got more than the GPU has with recompute policies "):
        fit_memory(trainer, lambda _: None)


FREED = """
import os, sys, torch
from deepfast.mt.training.environment import give_back_large_blocks
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
give_back_large_blocks()
before, kept = resident(), []
for index in range(20):
    # Each is freed between two that stay, and the next never fits into its hole.
    passing = [torch.ones(2**18 * (2 + (index + k) % 7)) for k in range(4)]
    kept.append(torch.ones(2**17))
    del passing
print(resident() - before - sum(t.nbytes for t in kept))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory so")
def test_large_freed_tensors_leave_the_process(python):
    assert int(python("-c", FREED).stdout) < 16 * 2**20
