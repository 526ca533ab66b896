"""Two runs of one recipe: what the second starts from, and resuming anywhere in either."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from deepfast.mt.models import DepthGrowing
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import (
    CheckpointError,
    RecipeError,
    dump_recipe,
    load_checkpoint,
    load_recipe,
    recipe_from_dict,
    saving,
    train,
)
from deepfast.mt.training.growing import runs, second_run
from deepfast.mt.training.run_folder import checkpoint_to_resume
from tests.mt.training.runs import assert_same_runs, at_step, rows, tensors

GROW = {
    "grow.model.top_encoder_layers": 2,
    "grow.model.top_decoder_layers": 1,
    "grow.model.top_encoder_connection": "dlcl",
    "grow.optim.lr": 8e-3,
    "grow.optim.warmup": 4,
    "grow.train.max_steps": 5,
    "train.max_steps": 6,
    "train.save_every": 2,
    "train.validate_every": 3,
}


def weights(path):
    return load_checkpoint(path)["model"]


def assert_same_folders(whole, two):
    for folder in ("stage1", "stage2"):
        assert_same_runs(whole.output.parent / folder, two / folder)


def test_the_second_run_learns_on_the_best_of_the_first(make_recipe, tmp_path, capsys):
    result = train(make_recipe(GROW | {"grow.train.max_steps": 16, "model.dropout": 0.0}))
    assert result.output == tmp_path / "run" / "stage2"
    assert (result.step, result.stopped) == (16, "max_steps")
    said, best = capsys.readouterr().out, tmp_path / "run" / "stage1" / "best.pt"
    assert f"grows on {best}, of step" in said
    assert "model 3+2 encoder layers (dlcl+dlcl), 1+1 decoder layers" in said
    first, second = said.split(f"output {result.output}\n")
    assert first.startswith(f"output {best.parent}\n")
    # Each header counts the parameters that its run trains, and all parameters.
    counts = [sum(p.numel() for p in load_model(path)[0].parameters())
              for path in (best, result.best)]  # fmt: skip
    assert f", {counts[0]:,} parameters, cpu" in first
    learns = counts[1] - counts[0]
    assert f", {counts[1]:,} parameters, {learns:,} of them trainable, cpu" in second
    names = ("step-00000012", "average.pt", "step-00000016")
    states = [weights(result.output / name) for name in names]
    # No bit of the bottom has changed, also in an average; all of the top has.
    bottom = weights(best)
    for name, tensor in bottom.items():
        assert all(torch.equal(state[f"bottom.{name}"], tensor) for state in states)
    tops = [name for name in states[0] if not name.startswith("bottom.")]
    assert len(tops) + len(bottom) == len(states[0])
    assert all(not torch.equal(states[0][name], states[2][name]) for name in tops)
    losses = [row["loss"] for row in rows(result.output, "train")]
    assert losses[-1] < losses[0] - 0.2
    # The second run has its own counter, schedule and optimizer.
    rates = [row["lr"] for row in rows(result.output, "train")[:5]]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3 * (4 / 5) ** 0.5])
    learned = {n.rpartition(".")[0] for n in tensors(result.checkpoint) if "optimizer" in n}
    assert len(learned) == len(tops)
    assert isinstance(load_model(result.for_translation)[0], DepthGrowing)


@pytest.mark.parametrize("growing", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_an_interrupt_stops_both_and_either_resumes(
    make_recipe, whole_run, tmp_path, monkeypatch, capsys, growing
):
    with monkeypatch.context() as patch:
        model = DepthGrowing if growing else torch.nn.Module
        at_step(patch, 2, lambda trainer: os.kill(os.getpid(), signal.SIGINT), model)
        first = train(make_recipe(GROW), quiet=True)
    assert (first.stopped, first.step) == ("SIGINT", 2)
    assert first.output == tmp_path / "run" / ("stage2" if growing else "stage1")
    assert (tmp_path / "run" / "stage2").exists() == growing
    assert train(make_recipe(GROW | {"resume": True})).output == tmp_path / "run" / "stage2"
    said = capsys.readouterr().out
    assert ("/run/stage1\n" in said, "/run/stage2\n" in said) == (not growing, True)
    assert_same_folders(whole_run(GROW), tmp_path / "run")


def test_a_signal_in_the_last_save_of_the_first_run(make_recipe, tmp_path, monkeypatch):
    save = saving.Saving.step

    def signalled(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self)

    monkeypatch.setattr(saving.Saving, "step", signalled)
    first = train(make_recipe(GROW | {"train.save_every": 6}), quiet=True)
    assert (first.stopped, first.step) == ("SIGTERM", 6)
    assert not (tmp_path / "run" / "stage2").exists()


def test_both_runs_may_move_before_they_go_on(make_recipe, whole_run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(whole_run(GROW).output.parent, moved)
    changes = {"output": str(moved), "resume": True, "grow.train.max_steps": 6}
    assert train(make_recipe(GROW | changes)).step == 6


def test_a_checkpoint_that_was_trained_before(make_recipe, whole_run, tmp_path, capsys):
    first = {"train.max_steps": 2, "train.save_every": 1, "train.validate_every": 2}
    before = train(make_recipe(first | {"output": str(tmp_path / "before")}), quiet=True)
    changes = GROW | {"grow.from": str(before.average)}
    result = train(make_recipe(changes))
    assert f"grows on {before.average}, of step 2\n" in capsys.readouterr().out
    assert result.output == tmp_path / "run" / "stage2"
    assert not (tmp_path / "run" / "stage1").exists()
    for name, tensor in weights(before.average).items():
        assert torch.equal(weights(result.checkpoint)[f"bottom.{name}"], tensor)

    grown = whole_run(GROW).best
    for path, told in (
        (grown, "of the kind transformer, got depth_growing"),
        ("none.pt", "no such"),
    ):
        with pytest.raises(CheckpointError, match=told):
            train(make_recipe(GROW | {"grow.from": str(path), "output": str(tmp_path / "other")}))


def test_what_stops_the_second_run_is_seen_before_the_first_begins(make_recipe, tmp_path):
    for device in ("cuda:99", "tpu"):
        with pytest.raises(RecipeError, match=r"train\.device: expected .*, got '" + device):
            train(make_recipe(GROW | {"grow.train.device": device}), quiet=True)
    (tmp_path / "run" / "stage2").mkdir(parents=True)
    (tmp_path / "run" / "stage2" / "best.pt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"stage2: expected a new folder.*\(best\.pt\)"):
        train(make_recipe(GROW), quiet=True)
    assert not (tmp_path / "run" / "stage1").exists()


def test_a_recipe_of_the_second_run_is_a_recipe(make_recipe, whole_run, tmp_path):
    """The recipe in a run's folder trains the same model again."""
    recipe = make_recipe(GROW | {"grow.optim.betas": [0.8, 0.9]})
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    second = recipe_from_dict(second_run(recipe).to_dict())
    assert second == second_run(recipe)
    assert second.optim.betas == (0.8, 0.9)
    assert (second.model["kind"], second.model["dim"]) == ("depth_growing", 16)
    assert second.grow == {"from": str(tmp_path / "run" / "stage1" / "best.pt")}
    left = whole_run(GROW).output / "recipe.yaml"
    alone = train(load_recipe(left, [f"output={tmp_path / 'alone'}"]), quiet=True)
    assert alone.output == tmp_path / "alone"
    assert rows(alone.output) == rows(whole_run(GROW).output)


def test_a_section_may_be_empty_and_the_second_run_has_its_own_length(make_recipe):
    for changes, length in (({}, 9), ({"grow.train.max_steps": 7}, 7)):
        recipe = make_recipe({"grow": {}, "train.max_steps": 9} | changes)
        assert (recipe.train.max_steps, second_run(recipe).train.max_steps) == (9, length)
    assert make_recipe({"grow": None}).grow is None


@pytest.mark.parametrize("growing", [False, True])
def test_torchrun_starts_a_run_again_in_either_stage(make_recipe, killed_at, monkeypatch, growing):
    changes = GROW | {"train.save_every": 1}
    killed_at(4, changes, model=DepthGrowing if growing else torch.nn.Module)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    left = runs(make_recipe(changes))
    assert [Path(run.output).name for run in left] == ["stage1", "stage2"][growing:]
    assert checkpoint_to_resume(left[0].output, left[0].resume).name == "step-00000003"
