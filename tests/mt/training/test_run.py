"""Whole runs: the files they write, what they say, how they stop, and going on with them."""

import json
import math
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.models.checkpoint import load_model, read_run
from deepfast.mt.search import DecodingOptions, bleu, translate_lines
from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.training import (
    CheckpointError,
    NotFiniteError,
    TrainingError,
    average_checkpoints,
    load_checkpoint,
    train,
)
from deepfast.mt.training.run_folder import only_run
from deepfast.mt.training.trainer import Trainer, Validation
from tests.mt.training.runs import at_step, files_of, full_disk, interrupt, names, rows


def test_a_run_learns_and_leaves_its_files(make_recipe, corpus, capsys):
    recipe = make_recipe({"train.max_steps": 40, "train.validate_every": 20, "train.log_every": 20,
                          "train.save_every": 10, "train.average_last": 2, "train.test_bleu": True,
                          "model.dropout": 0.0, "decode.beam": 3, "decode.length_penalty": 0,
                          "data.lowercase": True})  # fmt: skip
    result = train(recipe, quiet=True)
    assert capsys.readouterr().out == ""
    losses, validations = (rows(result.output, event) for event in ("train", "valid"))
    assert [row["step"] for row in losses] == [1, 20, 40]
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.5
    assert [row["step"] for row in validations] == [20, 40]
    assert (result.step, result.stopped) == (40, "max_steps")
    assert result.best_nll == min(row["nll"] for row in validations)
    assert names(result.output) == ["average.pt", "best.pt", "step-00000020",
                                    "step-00000030", "step-00000040"]  # fmt: skip
    assert result.checkpoint.name == "step-00000040"
    assert result.for_translation in (result.best, result.average)
    last = [result.output / f"step-{step:08d}" for step in (30, 40)]
    average, expected = load_checkpoint(result.average)["model"], average_checkpoints(last)
    assert all(torch.equal(average[name], expected[name]) for name in expected)
    found = json.loads((result.output / "result.json").read_text())
    assert (found["step"], found["stopped"]) == (40, "max_steps")
    assert (found["best_nll"], found["average_nll"]) == (result.best_nll, result.average_nll)
    assert found["step_seconds"] > 0
    assert found["peak_bytes"] > 4 * found["parameters"] > 4000
    assert {"cpu", "torch", "commit"} <= found["machine"].keys()
    # The translations have the decoding of the recipe, and the references the case of the text.
    lines, texts = ((corpus / f"test.{side}").read_text().splitlines() for side in ("en", "de"))
    model, vocabulary = load_model(result.for_translation)
    vocabulary = Vocabulary.from_bytes(vocabulary)
    assert model.config == recipe.model_config(len(vocabulary))
    options = DecodingOptions(beam=3, length_penalty=0)
    translated = translate_lines(model, vocabulary, lines, options)
    assert (result.output / "test.txt").read_text().splitlines() == translated
    score = bleu(translated, list(map(str.lower, texts)))
    # The counts of the sentences give the BLEU.
    assert found["test_bleu"] == result.test_bleu == rows(result.output, "test")[0]["bleu"]
    assert result.test_bleu == score.bleu
    assert bleu_of_counts(counts_of(found["sentences"]).sum(0)) == pytest.approx(score.bleu)
    assert found["bleu_signature"] == score.bleu_lowercase_signature


def test_resuming_a_finished_run_and_then_a_longer_one(
    make_recipe, run, finished, capsys, monkeypatch
):
    folder = finished({"train.max_steps": 4})
    before, files = rows(folder), files_of(folder)
    with pytest.raises(CheckpointError, match="expected a new folder, got one with an earlier run"):
        run()
    assert files_of(folder) == files
    assert run({"train.max_steps": 4, "resume": True}).stopped == "max_steps"
    assert rows(folder) == before
    changes = {"train.max_steps": 6, "resume": True, "optim.lr": 1e-4}
    with monkeypatch.context() as patch:
        at_step(patch, 5, interrupt)
        assert train(make_recipe(changes)).stopped == "SIGTERM"
    assert "changed since: optim.lr 0.005 -> 0.0001" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    run(changes)
    assert json.loads((folder / "result.json").read_text())["step"] == 6
    assert rows(folder, "train")[-1]["lr"] == pytest.approx(6e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.encoder_layers": 4}, "encoder_layers 2 in the checkpoint and 4 in the recipe"),
        ({"data.max_tokens": 100}, "cannot resume, the state was taken with max_tokens 120"),
        ({"data.lowercase": True}, "other sentence pairs"),
        ({"train.seed": 2}, "train.seed 1 -> 2: resuming cannot change it"),
        ({"data.vocabulary": "/a.model"}, "data.vocabulary None -> '/a.model': resum"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run, finished, changes, message):
    folder = finished({"train.max_steps": 2})
    files = files_of(folder)
    with pytest.raises(CheckpointError, match=rf"step-00000002.*{message}"):
        run(changes | {"resume": True})
    assert files_of(folder) == files


WEIGHTS = "the parameter embedding.weight is not finite after the update; last checkpoint: .*/step"
FAILURES = {
    "nan": (lambda trainer: trainer.model.encoder.layers[1].attention.out.bias.data.fill_(math.nan),
            {"train.validate_every": 100}, r"step 8: the loss is nan; .* "
            r"encoder\.layers\.1\.attention\.out \(Linear\); last .*/step-0+4", 4),
    # Though all weights are finite.
    "validation": (None, {"optim.lr": 1e30, "optim.warmup": 1, "train.max_steps": 1},
                   "step 1: the loss of the dev part is (nan|inf); the first value .* is the "
                   "output of .*; last checkpoint: none", None),
    # No later loss tells.
    "weights": (None, {"optim.restart_step": 7, "optim.restart_lr": 1e39,
                       "data.dev_source": None, "data.dev_target": None},
                f"step 8: {WEIGHTS}-0+4", 4),
    "disk": (full_disk, {"train.max_steps": 9}, r".*/step-0+8: the checkpoint cannot be written "
             r"\(No space left on device\); earlier ones are intact", 4),
    "folder": (lambda trainer: shutil.rmtree(trainer.recipe.output), {},
               ".*/metrics.jsonl: cannot be written .No such file or .*", None),
}  # fmt: skip
"""What happens in step 8, in which recipe, what is said, and the last step that is kept."""


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_run_says_why_and_keeps_what_it_saved(
    make_recipe, run, whole_run, monkeypatch, name
):
    act, changes, told, last = FAILURES[name]
    recipe = make_recipe(changes)
    folder = Path(recipe.output)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", os.fsync)
        if act is not None:
            at_step(patch, 8, act)
        with pytest.raises((TrainingError, CheckpointError, NotFiniteError)) as error:
            train(recipe, quiet=True)
    assert re.fullmatch(told, str(error.value)), error.value
    if name == "folder":
        assert not folder.exists()
        return
    steps = [found for found in names(folder) if found != "best.pt"]
    assert steps[-1:] == ([f"step-{last:08d}"] if last else [])
    for step in steps:
        assert all(w.isfinite().all() for w in load_checkpoint(folder / step)["model"].values())
    assert not list(folder.glob(".*part"))
    if name == "disk":
        run(changes | {"resume": True})
        assert rows(folder) == rows(whole_run(changes).output)
        return
    found = json.loads((folder / "result.json").read_text())
    assert found.keys() == {"diverged", "machine"}
    assert str(error.value).startswith(found["diverged"])


def test_patience_counts_validations_also_after_a_resume(run, killed_at, monkeypatch):
    curve = {2: 3.0, 4: 2.0, 5: 1.5, 6: 2.5, 8: 1.5}
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(curve[self.step], 0.5))
    changes = {"train.validate_every": 2, "train.save_every": 2, "train.patience": 2,
               "train.max_steps": 9}  # fmt: skip
    with monkeypatch.context() as patch:
        at_step(patch, 5, interrupt)
        run(changes)
    changes["resume"] = True
    # A run that ends where it was resumed validates there, and a longer one knows of that.
    ended = run(changes | {"train.max_steps": 5})
    assert (ended.best_nll, load_checkpoint(ended.best)["step"]) == (1.5, 5)
    killed_at(8, changes)
    result = run(changes)
    assert (result.stopped, result.step, result.best_nll) == ("patience", 8, 1.5)
    assert load_checkpoint(result.best)["step"] == 5
    assert [row["best"] for row in rows(result.output, "valid")] == [True] * 3 + [False] * 2


def test_max_minutes_counts_all_resumes(run, monkeypatch):
    changes = {"train.max_steps": None, "train.max_minutes": 1.0}
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt)
        first = run(changes)
    assert first.stopped == "SIGTERM"
    seconds = read_run(first.checkpoint)["training"]["seconds"]
    assert 0 < seconds < 60
    changes["train.max_minutes"] = seconds / 60
    second = run(changes | {"resume": True})
    assert (second.stopped, second.step) == ("max_minutes", 3)


def test_without_dev_pairs_in_a_thread(make_recipe):
    """Only the main thread of a process can have its signals."""
    results = []
    recipe = make_recipe({"data.dev_source": None, "data.dev_target": None, "train.max_steps": 2})
    thread = threading.Thread(target=lambda: results.append(train(recipe, quiet=True)))
    thread.start()
    thread.join()
    (result,) = results
    assert (result.best, result.best_nll, result.average_nll) == (None, None, None)
    assert (result.stopped, result.for_translation) == ("max_steps", result.average)


def test_a_folder_that_another_run_uses(run, tmp_path):
    folder = tmp_path / "new" / "run"
    told = f"^{folder}: expected a folder that no other run uses, got one that .*output=FOLDER$"
    with only_run(folder), pytest.raises(TrainingError, match=told):
        run({"output": str(folder)})
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_run_says_what_was_read_and_dropped(make_recipe, corpus, tmp_path, capsys):
    for side, empty, word in (("en", "\u200b", "red"), ("de", "x", "rot")):
        text = (corpus / f"train.{side}").read_text("utf-8")
        (tmp_path / f"train.{side}").write_text(f"{empty}\n{text}{f'{word} ' * 50}\n")
        (tmp_path / f"dev.{side}").write_text(f"{word} Q\n")
    files = {f"data.{part}_{name}": str(tmp_path / f"{part}.{side}") for part in ("train", "dev")
             for name, side in (("source", "en"), ("target", "de"))}  # fmt: skip
    train(make_recipe(files | {"train.max_steps": 2}))
    out = capsys.readouterr().out
    assert "train 241 pairs" in out
    assert "2 pairs dropped: 1 empty, 1 too long; sentences of at most 40 tokens, " in out
    dev = next(line for line in out.splitlines() if line.startswith("dev "))
    assert "1 pairs" in dev
    assert "0.00% unknown" not in dev
    assert "\nencoder layer           step 1        step 2\n1     " in out
