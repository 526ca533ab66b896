"""Training within a memory budget: plans, trials, messages and errors."""

import platform
import re

import pytest
import torch

from deepfast.memory import POLICIES, parse_bytes
from deepfast.mt.training import TrainingError, train
from deepfast.mt.training.memory import fit_memory, plan_run
from deepfast.mt.training.trainer import Trainer
from tests.mt.training.runs import rows

WIDE = {"data.max_tokens": 600, "train.max_steps": 2, "train.validate_every": 2,
        "model.encoder_layers": 6, "model.dim": 32, "model.ffn_dim": 128}  # fmt: skip


@pytest.fixture
def limits(make_recipe, make_trainer):
    """Bytes of a step that keeps everything, and of one that keeps the least."""
    trainer = make_trainer(WIDE)
    frugal = make_recipe(WIDE | {"recompute": "layer+input"})
    return plan_run(trainer.recipe, trainer, 2**50).peak, plan_run(frugal, trainer).peak


@pytest.mark.parametrize(
    ("changes", "policies"),
    [({}, ("none", "ffn", "layer+input")),
     ({"model.encoder_connection": "attnres", "model.share_embeddings": "none"}, ("ffn",))],
    ids=["planned", "nothing planned"],
)  # fmt: skip
def test_a_policy_changes_memory_and_nothing_else(make_recipe, tmp_path, changes, policies):
    """The losses are the same to the bit under every policy, with a trial before them."""
    seen = {}
    for policy in (None, *policies):
        output = {"recompute": policy, "output": str(tmp_path / str(policy))}
        result = train(make_recipe(WIDE | changes | output), quiet=True)
        seen[policy] = [(row["step"], row["loss"]) for row in rows(result.output, "train")]
        assert len(rows(result.output, "memory")) == (policy is not None and not changes)
        assert result.step == 2
        # The checkpoint's model and config do not name the policies.
        assert "recompute" not in torch.load(result.checkpoint, weights_only=True)["config"]
    for policy in policies:
        assert seen[policy] == seen[None]


def test_a_size_is_planned_tried_and_told(make_recipe, limits, capsys):
    most, least = limits
    recipe = make_recipe(WIDE | {"memory_budget": f"{(most + least) // 2}B"})
    result = train(recipe)
    text = capsys.readouterr().out
    (row,) = rows(recipe.output, "memory")
    assert row["step"] == 0
    assert row["measured_bytes"] <= row["predicted_bytes"] <= parse_bytes(recipe.memory_budget)
    assert "none" not in row["policies"].split(";")[0]
    assert f"recompute policies: {row['policies']}\n" in text
    assert "\nit fits\n" in text
    assert " predicted, " in text
    assert f"stopped by max_steps after {result.seconds:.0f} s, peak of live tensors " in text


def test_the_prediction_holds_for_full_batches(make_trainer):
    """The largest micro-batch has fewer tokens than max_tokens; with its tokens the plan holds."""
    for policy in POLICIES:
        trainer = make_trainer(WIDE | {"recompute": policy})
        batch = trainer.corpus.batches.largest()
        row = fit_memory(trainer, lambda _: None)
        share = (batch.source_tokens + batch.target_tokens) / 1200
        assert 0.6 < share <= 1
        assert 0.9 * share < row["measured_bytes"] / row["predicted_bytes"] < 1.05


def test_accumulation_holds_gradients_beside_activations(make_trainer):
    once, twice = (make_trainer(WIDE | {"optim.accumulate": n}).measure() for n in (1, 3))
    assert twice > once


def test_what_no_plan_fits_is_refused_before_it_runs(make_recipe, monkeypatch):
    monkeypatch.setattr(Trainer, "measure", None)
    with pytest.raises(TrainingError, match=r"^memory_budget: expected a step within 1\.00 "
    r"MiB, got one "
                       r"of .* for data\.max_tokens=600: .*") as error:  # fmt: skip
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
    assert said[-1].startswith("a trial with recompute policies none; decoder none took ")
    # The lowest layer's comes first, after the number of layers where they differ.
    assert re.match(rf"(\d+ )?{re.escape(trainer.model.encoder.policies[0])}\b", row["policies"])


@pytest.mark.parametrize("share", [1.3, 1.02])
def test_what_does_not_fit_when_tried_names_what_would(make_recipe, monkeypatch, limits, share):
    most, least = limits
    # What trials would measure if every plan promised too little memory.
    budget = int(share * (most if share == 1.3 else least))
    monkeypatch.setattr(Trainer, "measure", lambda trainer: 1.5 * budget)
    with pytest.raises(TrainingError) as error:
        train(make_recipe(WIDE | {"memory_budget": f"{budget}B"}), quiet=True)
    text = str(error.value)
    assert text.startswith("memory_budget: expected a step within ")
    assert "\n" not in text
    assert " layers or " in text
    assert "it needs" not in text


def test_a_gpu_without_so_much_gives_the_same_sentence(make_trainer, monkeypatch):
    def exhausted(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    trainer = make_trainer(WIDE | {"memory_budget": "1TiB"})
    monkeypatch.setattr(trainer, "batch_loss", exhausted)
    properties = type("Properties", (), {"total_memory": 10 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    words = r"^memory_budget: expected a step within 10\.0 GiB, got more than the GPU has with "
    with pytest.raises(TrainingError, match=words + "recompute policies none; decoder none: "):
        fit_memory(trainer, lambda _: None)


def test_all_ranks_stop_together(make_trainer, monkeypatch):
    """Where only the second one's step does not fit."""
    trainer = make_trainer(WIDE | {"memory_budget": "1TiB"})
    rows = trainer.ranks.rows
    monkeypatch.setattr(trainer.ranks, "rows", lambda value: [*rows(value), [2.0**60]])
    with pytest.raises(TrainingError, match="got 1048576 TiB with recompute policies none"):
        fit_memory(trainer, lambda _: None)


FREED = """
import sys, torch
from deepfast.mt.training.environment import give_back_large_blocks, memory_bytes
if sys.argv[1] == "give back":
    give_back_large_blocks()
before, kept = memory_bytes(torch.device("cpu")), []
for index in range(20):
    # Each is freed between two that stay, and the next never fits into its hole.
    passing = [torch.ones(2**18 * (2 + (index + k) % 7)) for k in range(4)]
    kept.append(torch.ones(2**17))
    del passing
print(memory_bytes(torch.device("cpu")) - before - sum(t.nbytes for t in kept))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory so")
def test_large_freed_tensors_leave_the_process(python):
    assert int(python("-c", FREED, "give back").stdout) < 16 * 2**20
