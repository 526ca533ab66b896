"""`tune`, and `deepfast mt score --tune`: the options with the best BLEU on a text."""

import json
import operator
import shlex

import pytest

from deepfast.cli import main
from deepfast.mt.search import DecodingOptions, bleu, translate_lines, tune, tuning

pytestmark = pytest.mark.filterwarnings("ignore:most references have no space")
LINES = ["the old bridge", "", "boats", "we walk home"]
FAST = ["--beam", "3", "--max-length", "6", "--device", "cpu", "--threads", "1"]


def right(references, tokenize):
    """Percent of lines that are right. It replaces BLEU, which is 0 for such short lines."""
    return lambda lines: 100 * sum(map(operator.eq, lines, references)) / len(references)


@pytest.fixture
def few(monkeypatch):
    """Few options to try, and `right` in place of BLEU."""
    for name, values in (
        ("ALPHAS", [0.0, 0.5, 1.0]), ("GAMMAS", [0.0, 2.0]), ("BEAMS", [1, 4]),
        ("PENALTIES", [0.0, 3.0]), ("bleu_against", right),
    ):  # fmt: skip
        monkeypatch.setattr(tuning, name, values)


@pytest.mark.parametrize(("kind", "count"), [("model", 1 + 2 * 2), ("grown_model", 1 + 3 * 2)])
def test_the_score_of_each_choice_is_that_of_its_translations(
    few, request, vocabulary, kind, count
):
    model = request.getfixturevalue(kind)
    options = DecodingOptions(beam=3, max_length=12, no_unknown=True)
    given = translate_lines(model, vocabulary, LINES, options)
    texts = {
        choice: translate_lines(model, vocabulary, LINES, choice)
        for choice, _ in tune(model, vocabulary, LINES, given, options)
    }
    assert len(texts) == count
    assert len({tuple(lines) for lines in texts.values()}) > 1
    assert all(choice.no_unknown for choice in texts)
    # The choice that gives the references is found, even far from the defaults.
    for references in texts.values():
        found = dict(tune(model, vocabulary, LINES, references, options))
        assert [*found] == [*texts]
        assert next(iter(found)) == options
        assert found == {choice: right(references, "")(lines) for choice, lines in texts.items()}


def test_the_tokenizer_is_that_of_the_bleu(model, vocabulary):
    options = DecodingOptions(max_length=8)
    references = [f"{line}." for line in translate_lines(model, vocabulary, LINES, options)]
    for tokenize in ("none", "13a"):
        (_, first), *_ = tune(model, vocabulary, LINES, references, options, tokenize=tokenize)
        lines = translate_lines(model, vocabulary, LINES, options)
        assert first == pytest.approx(bleu(lines, references, tokenize=tokenize).bleu)


@pytest.fixture
def tuned(tmp_path, capsys):
    """tuned(checkpoint, references, *words): the lines that `score --tune` prints."""

    def run(checkpoint, references, *words):
        for name, lines in (("dev.en", LINES), ("dev.de", references)):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        text = ["--source", str(tmp_path / "dev.en"), "--reference", str(tmp_path / "dev.de")]
        command = ["mt", "score", "--tune", "--checkpoint", str(checkpoint), *text, *FAST, *words]
        assert main(command) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    ("kind", "best"),
    [
        ("model", {"beam": 4, "length_penalty": 3.0}),
        ("grown_model", {"deep_shallow": True, "alpha": 0.0, "gamma": 2.0}),
    ],
)
def test_the_command_is_ready_to_paste(
    few, request, vocabulary, write, tuned, tmp_path, capsys, kind, best
):
    model = request.getfixturevalue(kind)
    checkpoint = write(model, recipe={"decode": {"beam": 9, "length_penalty": 0.1}})
    plain = {"beam": 3, "max_length": 6, "length_penalty": 0.1}
    before, after = (
        translate_lines(model, vocabulary, LINES, DecodingOptions(**plain | more))
        for more in ({}, best)
    )
    assert before != after
    for references, helps in ((after, True), (before, False)):
        score, gain, last = tuned(checkpoint, references)
        assert score.startswith("BLEU 100.00 with beam ")
        assert score.endswith(", tokenizer 13a")
        gained = 100 - right(references, "")(before)
        assert gain == f"a gain of {gained:.2f} over beam 3, length penalty 0.1 (gnmt)"
        words = shlex.split(last.removeprefix("to translate: deepfast ").removesuffix(" < FILE"))
        assert ("--length-penalty" in words or "--deep-shallow" in words) == helps
        # The pasted command gives the translations that were tuned.
        assert main([*words, "--input", str(tmp_path / "dev.en")]) == 0
        assert capsys.readouterr().out.splitlines() == references


def test_as_json(few, grown_checkpoint, grown_model, vocabulary, tuned):
    options = DecodingOptions(beam=3, max_length=6, deep_shallow=True, alpha=0.0, gamma=2.0)
    references = translate_lines(grown_model, vocabulary, LINES, options)
    found = json.loads("".join(tuned(grown_checkpoint, references, "--json")))
    assert (found["bleu"], found["tokenize"]) == (100, "13a")
    assert found["before"] < 100
    assert (found["deep_shallow"], found["alpha"], found["gamma"]) == (True, 0.0, 2.0)
