"""Deep-shallow decoding: the formula, the order of lines, and weights tuned on a text."""

import argparse
import itertools
import json
import operator
import random
import shlex

import pytest
import torch

from deepfast.cli import main
from deepfast.cli.mt.decoding import add_decoding_arguments, decoding_words
from deepfast.mt.search import (
    DecodingOptions,
    beam_search,
    score_hypotheses,
    translate_lines,
    translate_nbest,
    tune_deep_shallow,
)
from deepfast.mt.search.deep_shallow import Candidate, Candidates

LINES = ["the old bridge", "", "boats", "we walk home"]
REFERENCES = ["the long bridge is closed", "", "12 boats", "we read home"]
OPTIONS = {"beam": 3, "max_length": 6}


def mixed(model, vocabulary, alpha, gamma, **options):
    """The best translation of each line by deep-shallow decoding."""
    weights = {"deep_shallow": True, "alpha": alpha, "gamma": gamma}
    return translate_lines(model, vocabulary, LINES, DecodingOptions(**OPTIONS | options | weights))


def test_ranked_by_the_formula():
    generator = random.Random(4)

    def candidates():
        return [
            Candidate(
                tuple(generator.choices(range(4, 7), k=generator.randint(0, 2))),
                -9 * generator.random(),
                -9 * generator.random(),
            )
            for _ in range(6)
        ]

    found = Candidates(candidates(), candidates())
    for alpha, gamma in ((0.0, 0.0), (0.3, 1.2), (1.0, -0.4)):
        scores = {}
        for c in found.deep + found.shallow:
            score = (alpha * c.own + (1 - alpha) * c.other) / (len(c.tokens) + 1) ** gamma
            scores.setdefault(c.tokens, []).append(score)
        ranked = found.ranked(alpha, gamma)
        assert len(ranked) == len(scores) < 12
        assert [score for score, _ in ranked] == sorted(map(max, scores.values()), reverse=True)
        assert all(score == max(scores[tokens]) for score, tokens in ranked)


def test_of_equals_the_deep_networks_is_first():
    found = Candidates([Candidate((5,), -1.0, -1.0)], [Candidate((4,), -1.0, -1.0)])
    assert [tokens for _, tokens in found.ranked(0.5, 1.0)] == [(5,), (4,)]


def test_each_judges_the_others_in_the_order_of_lines(grown_model, vocabulary):
    got = translate_nbest(
        grown_model,
        vocabulary,
        LINES,
        DecodingOptions(deep_shallow=True, alpha=0.3, gamma=0.8, nbest=2, max_tokens=20, **OPTIONS),
    )
    assert got[1] == [(0.0, "")]
    differing = 0
    for line, best in zip(LINES, got, strict=True):
        if not line:
            continue
        source = torch.tensor([[*vocabulary.encode(line), 3]])
        scores = {}
        for own, other in ((grown_model, grown_model.bottom), (grown_model.bottom, grown_model)):
            found = beam_search(own, source, DecodingOptions(nbest=3, **OPTIONS))[0]
            for h in found:
                score = 0.3 * h.log_prob + 0.7 * score_hypotheses(other, source, [[h.tokens]])[0][0]
                score /= (len(h.tokens) + 1) ** 0.8
                text = vocabulary.decode(h.tokens)
                scores[text] = max(score, scores.get(text, score))
            differing += vocabulary.decode(found[0].tokens) != best[0][1]
        assert [score for score, _ in best] == pytest.approx(
            sorted(scores.values(), reverse=True)[:2], abs=1e-4
        )
        assert best[0][0] == pytest.approx(scores[best[0][1]], abs=1e-4)
    # The two networks must disagree here, or the test would show little.
    assert differing > 0


def right(references):
    """Percent of lines that are right. It replaces BLEU, which is 0 for such short lines."""
    return lambda lines: 100 * sum(map(operator.eq, lines, references)) / len(references)


def test_tuned_weights_are_the_best_of_all(grown_model, vocabulary, monkeypatch):
    monkeypatch.setattr("deepfast.mt.search.deep_shallow.bleu_against", right)
    grid = {"alphas": (0.0, 0.5, 1.0), "gammas": (0.0, 2.0)}
    options = {"beam": 4, "max_length": 12}
    texts = {
        (alpha, gamma): mixed(grown_model, vocabulary, alpha, gamma, **options)
        for alpha, gamma in itertools.product(*grid.values())
    }
    assert len({tuple(lines) for lines in texts.values()}) > 2
    # The pair that gives the references is found, even far from the defaults.
    for wanted in texts:
        references = texts[wanted]
        tuned = tune_deep_shallow(
            grown_model, vocabulary, LINES, references, DecodingOptions(**options), **grid
        )
        assert tuned.bleu == 100
        assert texts[tuned.alpha, tuned.gamma] == references
        for model, alone in ((grown_model, tuned.deep), (grown_model.bottom, tuned.shallow)):
            lines = translate_lines(model, vocabulary, LINES, DecodingOptions(**options))
            assert alone == right(references)(lines)


FAST = ["--beam", "3", "--max-length", "6", "--device", "cpu", "--threads", "1"]


def test_commands(grown_model, vocabulary, grown_checkpoint, tmp_path, capsys):
    (tmp_path / "dev.en").write_text("".join(f"{line}\n" for line in LINES))
    (tmp_path / "dev.de").write_text("".join(f"{line}\n" for line in REFERENCES))
    text = [str(tmp_path / "dev.en"), "--reference", str(tmp_path / "dev.de")]
    assert main(["mt", "tune", str(grown_checkpoint), "--source", *text, "--json", *FAST]) == 0
    tuned = json.loads(capsys.readouterr().out)
    weights = ["--alpha", f"{tuned['alpha']:g}", "--gamma", f"{tuned['gamma']:g}"]

    arguments = ["--input", str(tmp_path / "dev.en"), "--deep-shallow", *weights, *FAST]
    assert main(["mt", "translate", str(grown_checkpoint), *arguments]) == 0
    best = mixed(grown_model, vocabulary, tuned["alpha"], tuned["gamma"])
    assert capsys.readouterr().out.split("\n") == [*best, ""]

    score = ["mt", "score", "--checkpoint", str(grown_checkpoint)]
    score += ["--source", *text, "--json", *FAST]
    assert main([*score, "--deep-shallow", *weights]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] == pytest.approx(tuned["bleu"])
    assert main(score) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] == pytest.approx(tuned["deep"])


def test_tuned_flags_are_ready_to_paste_where_they_help(
    grown_model, vocabulary, grown_checkpoint, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("deepfast.mt.search.deep_shallow.bleu_against", right)
    (tmp_path / "dev.en").write_text("".join(f"{line}\n" for line in LINES))
    deep = translate_lines(grown_model, vocabulary, LINES, DecodingOptions(**OPTIONS))
    best = mixed(grown_model, vocabulary, 0.0, 2.0)
    assert best != deep
    for references, helps in ((best, True), (deep, False)):
        (tmp_path / "dev.de").write_text("".join(f"{line}\n" for line in references))
        text = ["--source", str(tmp_path / "dev.en"), "--reference", str(tmp_path / "dev.de")]
        assert main(["mt", "tune", str(grown_checkpoint), *text, *FAST]) == 0
        _, verdict, last = capsys.readouterr().out.splitlines()
        gain = f"gains {100 - right(references)(deep):.2f} BLEU" if helps else "gains nothing"
        assert verdict == f"deep-shallow decoding {gain} over deep alone"
        words = shlex.split(last.removeprefix("to translate: deepfast ").removesuffix(" < FILE"))
        assert ("--deep-shallow" in words) == helps
        # The pasted command gives the translations that were tuned.
        assert main([*words, "--input", str(tmp_path / "dev.en")]) == 0
        assert capsys.readouterr().out.splitlines() == references


@pytest.mark.parametrize(
    ("given", "hints"), [([], 1), (["--alpha", "0.5"], 0), (["--gamma", "1"], 0)]
)
def test_default_weights_hint_at_tuning(grown_checkpoint, tmp_path, capsys, given, hints):
    (tmp_path / "text").write_text("the old bridge\n\na small house\n")
    arguments = ["--input", str(tmp_path / "text"), "--deep-shallow", *given, *FAST]
    assert main(["mt", "translate", str(grown_checkpoint), *arguments]) == 0
    said = capsys.readouterr()
    assert said.err.count("deepfast mt tune finds good ones on a dev text") == hints
    assert "deepfast mt tune" not in said.out


def test_decoding_arguments_are_given_again():
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    assert decoding_words(parser.parse_args(["--beam", "4"])) == []
    words = ["--beam", "1", "--max-length", "9", "--language", "de", "--no-unknown"]
    assert decoding_words(parser.parse_args(words)) == words
