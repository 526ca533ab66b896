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


@pytest.mark.parametrize("tokenize", ["none", "13a"])
def test_the_tokenizer_is_that_of_the_bleu(model, vocabulary, tokenize):
    options = DecodingOptions(max_length=8)
    lines = translate_lines(model, vocabulary, LINES, options)
    references = [f"{line}." for line in lines]
    (_, first), *_ = tune(model, vocabulary, LINES, references, options, tokenize=tokenize)
    assert first == pytest.approx(bleu(lines, references, tokenize=tokenize).bleu)


@pytest.mark.parametrize(
    ("kind", "best"),
    [
        ("model", {"beam": 4, "length_penalty": 3.0}),
        ("grown_model", {"deep_shallow": True, "alpha": 0.0, "gamma": 2.0}),
    ],
)
def test_the_command_is_ready_to_paste(few, request, vocabulary, write, text, capsys, kind, best):
    model = request.getfixturevalue(kind)
    checkpoint = write(model, recipe={"decode": {"beam": 9, "length_penalty": 0.1}})
    plain = {"beam": 3, "max_length": 6, "length_penalty": 0.1}
    before, after = (
        translate_lines(model, vocabulary, LINES, DecodingOptions(**plain | more))
        for more in ({}, best)
    )
    assert before != after
    source = text(LINES)
    for references, helps in ((after, True), (before, False)):
        reference = text(references, "references")
        command = ["mt", "score", "--tune", "--checkpoint", checkpoint, "--source", source,
                   "--reference", reference, *FAST]  # fmt: skip
        assert main(command) == 0
        score, gain, last = capsys.readouterr().out.splitlines()
        assert score.startswith("BLEU 100.00 with beam ")
        assert score.endswith(", tokenizer 13a")
        gained = 100 - right(references, "")(before)
        assert gain == f"a gain of {gained:.2f} over beam 3, length penalty 0.1 (gnmt)"
        words = shlex.split(last.removeprefix("to translate: deepfast ").removesuffix(" < FILE"))
        assert ("--length-penalty" in words or "--deep-shallow" in words) == helps
        # The pasted command gives the translations that were tuned.
        assert main([*words, "--input", source]) == 0
        assert capsys.readouterr().out.splitlines() == references
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        values = [found.pop(name) for name in ("bleu", "before", "tokenize")]
        assert values == [100, 100 - gained, "13a"]
        assert found.keys() == (best.keys() if helps else set())
