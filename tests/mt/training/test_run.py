"""Whole runs: the files they write, what they say, how they stop, and going on with them."""

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.models.checkpoint import load_model, read_run
from deepfast.mt.search import bleu
from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.training import (
    CheckpointError,
    NotFiniteError,
    RecipeError,
    TrainingError,
    average_checkpoints,
    load_checkpoint,
    train,
)
from deepfast.mt.training.run_folder import only_run
from deepfast.mt.training.trainer import Trainer, Validation
from tests.mt.training.runs import at_step, files_of, names, rows


def interrupt(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("lowercase", [False, True])
def test_a_run_learns_and_leaves_its_files(make_recipe, corpus, capsys, lowercase):
    recipe = make_recipe({"train.max_steps": 40, "train.validate_every": 20, "model.dropout": 0.0,
                          "train.log_every": 20, "train.test_bleu": True,
                          "data.lowercase": lowercase})  # fmt: skip
    result = train(recipe, quiet=True)
    assert capsys.readouterr().out == ""
    losses, validations = (rows(result.output, event) for event in ("train", "valid"))
    assert [row["step"] for row in losses] == [1, 20, 40]
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.5
    assert [row["step"] for row in validations] == [20, 40]
    assert (result.step, result.stopped) == (40, "max_steps")
    assert result.best_nll == min(row["nll"] for row in validations)
    assert names(result.output) == ["average.pt", "best.pt", "step-00000032",
                                    "step-00000036", "step-00000040"]  # fmt: skip
    assert result.checkpoint.name == "step-00000040"
    assert result.for_translation in (result.best, result.average)
    last = [result.output / f"step-{step:08d}" for step in (36, 40)]
    average, expected = load_checkpoint(result.average)["model"], average_checkpoints(last)
    assert all(torch.equal(average[name], expected[name]) for name in expected)
    for path in (result.best, result.average, result.checkpoint):
        model, serialised = load_model(path)
        vocabulary = Vocabulary.from_bytes(serialised)
        assert not model.training
        assert model.config == recipe.model_config(len(vocabulary))
        assert vocabulary.decode(vocabulary.encode("das rot")) == "das rot"

    found = json.loads((result.output / "result.json").read_text())
    assert (found["step"], found["stopped"]) == (40, "max_steps")
    assert (found["best_nll"], found["average_nll"]) == (result.best_nll, result.average_nll)
    assert found["step_seconds"] > 0
    assert found["peak_bytes"] > 4 * found["parameters"] > 4000
    assert {"cpu", "torch", "commit"} <= found["machine"].keys()
    # The counts of the sentences give the BLEU, of references of the text's case.
    references = (corpus / "test.de").read_text().splitlines()
    references = [line.lower() if lowercase else line for line in references]
    score = bleu((result.output / "test.txt").read_text().splitlines(), references)
    assert found["test_bleu"] == result.test_bleu == rows(result.output, "test")[0]["bleu"]
    assert result.test_bleu == score.bleu
    assert bleu_of_counts(counts_of(found["sentences"]).sum(0)) == pytest.approx(score.bleu)
    signature = score.bleu_lowercase_signature if lowercase else score.bleu_signature
    assert found["bleu_signature"] == signature


def test_a_run_says_what_was_read_and_dropped(make_recipe, corpus, tmp_path, capsys):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one two\n\u200b\n" + (corpus / "train.en").read_text() + "red " * 50 + "\n")
    target.write_text("zwei eins\nx\n" + (corpus / "train.de").read_text("utf-8") + "rot\n")
    (tmp_path / "dev.en").write_text("one Q\n")
    (tmp_path / "dev.de").write_text("eins Q\n")
    changes = {"data.train_source": str(source), "data.train_target": str(target),
               "data.dev_source": str(tmp_path / "dev.en"),
               "data.dev_target": str(tmp_path / "dev.de"), "train.max_steps": 2}  # fmt: skip
    train(make_recipe(changes))
    out = capsys.readouterr().out
    assert "train 242 pairs" in out
    assert "2 pairs dropped: 1 empty, 1 too long; sentences of at most 40 tokens, " in out
    assert out.count("dropped") == 1
    dev = next(line for line in out.splitlines() if line.startswith("dev "))
    assert "1 pairs" in dev
    assert "0.00% unknown" not in dev
    assert "\nencoder layer           step 1        step 2\n1     " in out


def test_resuming_a_finished_run_and_then_a_longer_one(
    make_recipe, run, finished, capsys, monkeypatch
):
    folder = finished({"train.max_steps": 4})
    before, files = rows(folder), files_of(folder)
    with pytest.raises(CheckpointError, match="expected a new folder, got one with an earlier run"):
        run()
    assert files_of(folder) == files
    again = run({"train.max_steps": 4, "resume": True})
    assert (again.step, again.stopped) == (4, "max_steps")
    assert rows(folder) == before
    changes = {"train.max_steps": 6, "resume": True, "optim.lr": 1e-4, "optim.betas": [0.8, 0.9],
               "optim.weight_decay": 0.1}  # fmt: skip
    with monkeypatch.context() as patch:
        at_step(patch, 5, interrupt)
        assert train(make_recipe(changes)).stopped == "SIGTERM"
    assert "changed since: optim.lr 0.005 -> 0.0001" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    groups = []
    at_step(monkeypatch, 6, lambda trainer: groups.extend(trainer.optimizer.param_groups))
    longer = run(changes)
    assert json.loads((folder / "result.json").read_text())["step"] == longer.step == 6
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.9)}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert rows(longer.output, "train")[-1]["lr"] == pytest.approx(6e-5)


PHRASES = {f"data.{p}_{s}": None for p in ("train", "dev", "test") for s in ("source", "target")}
PHRASES |= {"data.phrases": "de", "data.train_size": 60, "data.dev_size": 6, "data.test_size": 6,
            "data.vocab_size": 120}  # fmt: skip


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ({}, {"model.encoder_layers": 4}, "encoder_layers 3 in the checkpoint and 4 in the recipe"),
        ({}, {"data.max_tokens": 100}, "cannot resume, the state was taken with max_tokens 120"),
        ({}, {"data.lowercase": True}, "other sentence pairs"),
        ({}, {"train.seed": 2}, "train.seed 1 -> 2: resuming cannot change it"),
        ({}, {"data.vocab_size": 61}, "data.vocab_size 60 -> 61: resuming cannot"),
        ({}, {"data.vocabulary": "/a.model"}, "data.vocabulary None -> '/a.model': resum"),
        (PHRASES, {"data.seed": 2}, "data.seed 1 -> 2: resuming cannot change it"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run, finished, start, changes, message):
    folder = finished(start | {"train.max_steps": 2})
    files = files_of(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        run(start | changes | {"resume": True})
    assert "step-00000002" in str(caught.value)
    assert files_of(folder) == files


def poison(trainer):
    with torch.no_grad():
        trainer.model.encoder.layers[1].attention.out.bias.fill_(torch.nan)


def fill_the_disk(trainer):
    metrics = os.stat(os.path.join(trainer.recipe.output, "metrics.jsonl"))

    def full(descriptor):
        # The metrics were written before.
        if not os.path.samestat(os.fstat(descriptor), metrics):
            raise OSError(28, "No space left on device")

    os.fsync = full


def remove_the_folder(trainer):
    shutil.rmtree(trainer.recipe.output)


def restart(step):
    return {"optim.restart_step": step - 1, "optim.restart_lr": 1e39}


WEIGHTS = (
    r"the parameter embedding\.weight is not finite after the update; last checkpoint: .*/step"
)
FAILURES = {
    "nan": (poison, {"train.validate_every": 100}, r"step 8: the loss is nan; .* "
            r"encoder\.layers\.1\.attention\.out \(Linear\); last .*/step-0+4", 4),
    # Though all weights are finite.
    "validation": (None, {"optim.lr": 1e30, "optim.warmup": 1, "train.max_steps": 1},
                   "step 1: the loss of the dev part is (nan|inf); the first value .* is the "
                   "output of .*; last checkpoint: none", None),
    "weights": (None, restart(8), f"step 8: {WEIGHTS}-0+4", 4),
    # No later loss tells.
    "weights, last": (None, restart(12), f"step 12: {WEIGHTS}-0+8", 8),
    "disk": (fill_the_disk, {}, ".*No space left on device.*ones are intact", 4),
    "folder": (remove_the_folder, {}, ".*/metrics.jsonl: cannot be written .No such file or .*",
               None),
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
        run({"resume": True})
        assert rows(folder) == rows(whole_run({}).output)
        return
    found = json.loads((folder / "result.json").read_text())
    assert found.keys() == {"diverged", "machine"}
    assert str(error.value).startswith(found["diverged"])


def test_patience_counts_validations_also_after_a_resume(run, killed_at, monkeypatch):
    curve = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(curve[self.step], 0.5))
    changes = {"train.validate_every": 2, "train.save_every": 2, "train.patience": 2}
    killed_at(8, changes)
    result = run(changes | {"resume": True})
    assert (result.stopped, result.step, result.best_nll) == ("patience", 8, 2.0)
    assert load_checkpoint(result.best)["step"] == 4
    assert [row["best"] for row in rows(result.output, "valid")] == [True, True, False, False]


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


def test_bleu_of_dev_and_test_has_the_decoding_of_the_recipe(run, monkeypatch):
    asked = []

    def translate_lines(model, vocabulary, lines, options):
        asked.append((model.training, len(lines), options.beam, options.length_penalty))
        return ["das Haus"] * len(lines)

    monkeypatch.setattr("deepfast.mt.training.bleu.translate_lines", translate_lines)
    changes = {"train.max_steps": 5, "train.validate_bleu": True, "train.test_bleu": True,
               "decode.beam": 3, "decode.length_penalty": 0}  # fmt: skip
    result = run(changes)
    assert asked == [(False, 20, 3, 0.0), (False, 10, 3, 0.0)]
    assert rows(result.output, "valid")[0]["bleu"] >= 0


def test_a_device_or_a_folder_that_cannot_be_used_is_one_sentence(run, tmp_path):
    for name in ("gpu", "cuda:99", "meta"):
        with pytest.raises(RecipeError, match=r"train\.device: expected .* got '"):
            run({"train.device": name})
    folder = tmp_path / "new" / "run"
    told = f"^{folder}: expected a folder that no other run uses, got one that .*output=FOLDER$"
    with only_run(folder), pytest.raises(TrainingError, match=told):
        run({"output": str(folder)})
    assert [path.name for path in folder.iterdir()] == [".lock"]
