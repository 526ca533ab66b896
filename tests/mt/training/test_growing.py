"""Two runs of one recipe: what the second starts from, and resuming anywhere in either."""

import shutil
from pathlib import Path

import pytest
import torch

from deepfast.mt.models import DepthGrowing
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import (
    CheckpointError,
    RecipeError,
    load_checkpoint,
    load_recipe,
    recipe_from_dict,
    saving,
    train,
)
from deepfast.mt.training.growing import runs, second_run
from deepfast.mt.training.run_folder import checkpoint_to_resume
from tests.mt.training.runs import interrupt, rows, tensors

GROW = {
    "model.encoder_layers": 1,
    "grow.model.top_encoder_layers": 2,
    "grow.model.top_decoder_layers": 1,
    "grow.model.top_encoder_connection": "dlcl",
    "grow.optim.lr": 8e-3,
    "grow.optim.warmup": 4,
    "grow.train.max_steps": 3,
    "train.max_steps": 4,
    "train.save_every": 2,
    "train.validate_every": 2,
}


def weights(path):
    return load_checkpoint(path)["model"]


def test_the_second_run_learns_on_the_best_of_the_first(make_recipe, tmp_path, capsys):
    changes = {"grow.train.max_steps": 16, "model.dropout": 0.0, "grow.train.save_every": 8}
    result = train(make_recipe(GROW | changes))
    assert result.output == tmp_path / "run" / "stage2"
    assert (result.step, result.stopped) == (16, "max_steps")
    said, best = capsys.readouterr().out, tmp_path / "run" / "stage1" / "best.pt"
    assert f"grows on {best}, of step" in said
    assert isinstance(load_model(result.for_translation)[0], DepthGrowing)
    bottom = weights(best)
    states = [weights(result.output / n) for n in ("step-00000008", "average.pt", "step-00000016")]
    # No bit of the bottom has changed, also in an average; all of the top has.
    for name, tensor in bottom.items():
        assert all(torch.equal(state[f"bottom.{name}"], tensor) for state in states)
    tops = [name for name in states[0] if not name.startswith("bottom.")]
    assert len(tops) + len(bottom) == len(states[0])
    assert all(not torch.equal(states[0][name], states[2][name]) for name in tops)
    # The header counts the parameters that the run trains, and all parameters.
    learns = sum(states[0][name].numel() for name in tops)
    assert f", {result.parameters:,} parameters, {learns:,} of them trainable, cpu" in said
    assert said.count("trainable") == 1
    losses = [row["loss"] for row in rows(result.output, "train")]
    assert losses[-1] < losses[0] - 0.2
    # The second run has its own counter, schedule and optimizer.
    rates = [row["lr"] for row in rows(result.output, "train")[:5]]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3 * (4 / 5) ** 0.5])
    learned = {n.rpartition(".")[0] for n in tensors(result.checkpoint) if "optimizer" in n}
    assert len(learned) == len(tops)


def test_a_signal_in_the_last_save_of_the_first_run(run, tmp_path, monkeypatch):
    save = saving.Saving.step
    monkeypatch.setattr(saving.Saving, "step", lambda self: interrupt(self.trainer) or save(self))
    first = run(GROW | {"train.save_every": 4})
    assert (first.stopped, first.step) == ("SIGTERM", 4)
    assert not (tmp_path / "run" / "stage2").exists()


def test_a_checkpoint_that_was_trained_before(make_recipe, run, tmp_path):
    first = {"model.encoder_layers": 1, "train.max_steps": 2, "train.save_every": 2}
    before = run(first | {"output": str(tmp_path / "before")})
    result = run(GROW | {"grow.from": str(before.average)})
    assert result.output == tmp_path / "run" / "stage2"
    assert not (tmp_path / "run" / "stage1").exists()
    grown = weights(result.checkpoint)
    for name, tensor in weights(before.average).items():
        assert torch.equal(grown[f"bottom.{name}"], tensor)
    other, kind = GROW | {"output": str(tmp_path / "other")}, "of the kind transformer, got depth_"
    for path, told in ((result.best, kind), ("none", "no such")):
        with pytest.raises(CheckpointError, match=told):
            train(make_recipe(other | {"grow.from": str(path)}))


def test_what_stops_the_second_run_is_seen_before_the_first_begins(run, tmp_path):
    for device in ("cuda:99", "tpu", "meta"):
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
    second = second_run(recipe)
    for one in (recipe, second):
        assert recipe_from_dict(one.to_dict()) == one
    assert second.optim.betas == (0.8, 0.9)
    assert second.grow == {"from": str(tmp_path / "run" / "stage1" / "best.pt")}
    # A section may be empty; then the second run is as long as the first.
    assert second_run(make_recipe({"grow": {}, "train.max_steps": 9})).train.max_steps == 9

    whole, moved = whole_run(GROW).output, tmp_path / "moved"
    alone = train(load_recipe(whole / "recipe.yaml", [f"output={tmp_path / 'alone'}"]), quiet=True)
    assert alone.output == tmp_path / "alone"
    assert rows(alone.output) == rows(whole)
    shutil.copytree(whole.parent, moved)
    changes = {"output": str(moved), "resume": True, "grow.train.max_steps": 4}
    assert run(GROW | changes).step == 4


def test_torchrun_starts_a_run_again_in_its_second_stage(make_recipe, killed_at, monkeypatch):
    changes = GROW | {"train.save_every": 1}
    killed_at(2, changes, model=DepthGrowing)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    (left,) = runs(make_recipe(changes))
    assert left.output == str(Path(make_recipe().output, "stage2"))
    assert checkpoint_to_resume(left.output, left.resume).name == "step-00000001"
