"""`result.json`: how a training command has ended."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from deepfast.mt.search import bleu
from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.training import NotFiniteError, train
from tests.mt.training.runs import at_step


def content(recipe):
    return json.loads(Path(recipe.output, "result.json").read_text())


@pytest.mark.parametrize("lowercase", [False, True])
def test_a_finished_run_says_what_it_found(make_recipe, corpus, lowercase):
    recipe = make_recipe({"train.test_bleu": True, "data.lowercase": lowercase})
    result = train(recipe, quiet=True)
    found = content(recipe)
    assert (found["step"], found["stopped"]) == (12, "max_steps")
    assert (found["best_nll"], found["average_nll"]) == (result.best_nll, result.average_nll)
    assert found["parameters"] > 1000
    assert found["step_seconds"] > 0
    assert found["peak_bytes"] > 4 * found["parameters"]
    assert {"cpu", "torch", "commit"} <= found["machine"].keys()
    # The counts of the sentences give the BLEU, of references of the text's case.
    lines = Path(recipe.output, "test.txt").read_text().splitlines()
    references = (corpus / "test.de").read_text().splitlines()
    references = [line.lower() if lowercase else line for line in references]
    expected = bleu(lines, references)
    assert found["test_bleu"] == result.test_bleu == expected.bleu
    assert bleu_of_counts(counts_of(found["sentences"]).sum(0)) == pytest.approx(expected.bleu)
    signature = expected.bleu_lowercase_signature if lowercase else expected.bleu_signature
    assert found["bleu_signature"] == signature


def test_a_run_that_goes_on_has_no_result(make_recipe, monkeypatch):
    train(make_recipe({"train.max_steps": 2}), quiet=True)
    again = {"train.max_steps": 4, "resume": True}
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        assert train(make_recipe(again), quiet=True).stopped == "SIGTERM"
    assert not Path(make_recipe().output, "result.json").exists()
    train(make_recipe(again), quiet=True)
    assert content(make_recipe())["step"] == 4


def test_a_run_that_diverges_says_why(make_recipe, monkeypatch):
    def poison(trainer):
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(torch.nan)

    at_step(monkeypatch, 2, poison)
    with pytest.raises(NotFiniteError) as error:
        train(make_recipe(), quiet=True)
    found = content(make_recipe())
    assert found.keys() == {"diverged", "machine"}
    assert found["diverged"].startswith("step 2: the loss is nan")
    assert str(error.value).startswith(found["diverged"])
