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
from tests.mt.training.runs import rows, tensors

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


def test_the_second_run_learns_on_the_best_of_the_first(make_recipe, tmp_path, capsys):
    result = train(make_recipe(GROW | {"grow.train.max_steps": 16, "model.dropout": 0.0}))
    assert result.output == tmp_path / "run" / "stage2"
    assert (result.step, result.stopped) == (16, "max_steps")
    said, best = capsys.readouterr().out, tmp_path / "run" / "stage1" / "best.pt"
    assert f"grows on {best}, of step" in said
    first, second = said.split(f"output {result.output}\n")
    assert first.startswith(f"output {best.parent}\n")
    # Each header counts the parameters that its run trains, and all parameters.
    counts = [sum(p.numel() for p in load_model(path)[0].parameters())
              for path in (best, result.best)]  # fmt: skip
    assert f", {counts[0]:,} parameters, cpu" in first
    learns = counts[1] - counts[0]
    assert f", {counts[1]:,} parameters, {learns:,} of them trainable, cpu" in second
    states = [weights(result.output / n) for n in ("step-00000012", "average.pt", "step-00000016")]
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


def test_a_signal_in_the_last_save_of_the_first_run(run, tmp_path, monkeypatch):
    save = saving.Saving.step

    def signalled(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self)

    monkeypatch.setattr(saving.Saving, "step", signalled)
    first = run(GROW | {"train.save_every": 6})
    assert (first.stopped, first.step) == ("SIGTERM", 6)
    assert not (tmp_path / "run" / "stage2").exists()


def test_a_checkpoint_that_was_trained_before(make_recipe, run, whole_run, tmp_path):
    first = {"train.max_steps": 2, "train.save_every": 1, "train.validate_every": 2}
    before = run(first | {"output": str(tmp_path / "before")})
    result = run(GROW | {"grow.from": str(before.average)})
    assert result.output == tmp_path / "run" / "stage2"
    assert not (tmp_path / "run" / "stage1").exists()
    for name, tensor in weights(before.average).items():
        assert torch.equal(weights(result.checkpoint)[f"bottom.{name}"], tensor)
    grown = whole_run(GROW).best
    other = GROW | {"output": str(tmp_path / "other")}
    for path, told in ((grown, "of the kind transformer, got depth_growing"), ("none", "no such")):
        with pytest.raises(CheckpointError, match=told):
            train(make_recipe(other | {"grow.from": str(path)}))


def test_what_stops_the_second_run_is_seen_before_the_first_begins(run, tmp_path):
    for device in ("cuda:99", "tpu"):
        with pytest.raises(RecipeError, match=r"train\.device: expected .*, got '" + device):
            run(GROW | {"grow.train.device": device})
    (tmp_path / "run" / "stage2").mkdir(parents=True)
    (tmp_path / "run" / "stage2" / "best.pt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"stage2: expected a new folder.*\(best\.pt\)"):
        run(GROW)
    assert not (tmp_path / "run" / "stage1").exists()


def test_a_recipe_of_the_second_run_is_a_recipe(make_recipe, run, whole_run, tmp_path):
    """The recipe in a run's folder trains the same model again, also where the folders moved."""
    recipe = make_recipe(GROW | {"grow.optim.betas": [0.8, 0.9]})
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    second = recipe_from_dict(second_run(recipe).to_dict())
    assert second == second_run(recipe)
    assert second.optim.betas == (0.8, 0.9)
    assert (second.model["kind"], second.model["dim"]) == ("depth_growing", 16)
    assert second.grow == {"from": str(tmp_path / "run" / "stage1" / "best.pt")}
    # A section may be empty, and the second run has its own length.
    for changes, length in (({}, 9), ({"grow.train.max_steps": 7}, 7)):
        recipe = make_recipe({"grow": {}, "train.max_steps": 9} | changes)
        assert (recipe.train.max_steps, second_run(recipe).train.max_steps) == (9, length)
    assert make_recipe({"grow": None}).grow is None

    whole, moved = whole_run(GROW).output, tmp_path / "moved"
    alone = train(load_recipe(whole / "recipe.yaml", [f"output={tmp_path / 'alone'}"]), quiet=True)
    assert alone.output == tmp_path / "alone"
    assert rows(alone.output) == rows(whole)
    shutil.copytree(whole.parent, moved)
    changes = {"output": str(moved), "resume": True, "grow.train.max_steps": 6}
    assert run(GROW | changes).step == 6


@pytest.mark.parametrize("growing", [False, True])
def test_torchrun_starts_a_run_again_in_either_stage(make_recipe, killed_at, monkeypatch, growing):
    changes = GROW | {"train.save_every": 1}
    killed_at(4, changes, model=DepthGrowing if growing else torch.nn.Module)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    left = runs(make_recipe(changes))
    assert [Path(run.output).name for run in left] == ["stage1", "stage2"][growing:]
    assert checkpoint_to_resume(left[0].output, left[0].resume).name == "step-00000003"
