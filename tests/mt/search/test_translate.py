"""Translating lines: their order and batches, several models, deep-shallow decoding, tuning."""

import json
import operator
import random
import shlex

import pytest
import torch

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.search import (
    DecodingOptions,
    Ensemble,
    beam_search,
    bleu,
    score_hypotheses,
    translate_lines,
    translate_nbest,
    tune,
    tuning,
)
from deepfast.mt.search.deep_shallow import Candidate, ranked
from tests.mt.search.conftest import FAST, lively, recurrent

pytestmark = pytest.mark.filterwarnings("ignore:most references have no space")
LINES = ["the old bridge", "", "boats", "we walk home"]
LONG = "a small house stands by the river and she reads a long book"


@pytest.mark.parametrize("max_tokens", [1, 25, 2000])
def test_order_and_scores_are_those_of_lines_alone(model, vocabulary, max_tokens):
    lines, given = [*LINES, "   ", LONG, "7 people wait"], {"nbest": 2, "beam": 3, "max_length": 8}
    options = DecodingOptions(max_tokens=max_tokens, **given)
    found = translate_nbest(model, vocabulary, lines, options)
    for line, mine in zip(lines, found, strict=True):
        if not line.strip():
            assert mine == [(0.0, "", ())]
            continue
        source = torch.tensor([[*vocabulary.encode(line), vocabulary.eos_id]])
        (alone,) = beam_search(model, source, DecodingOptions(**given))
        assert [best.score for best in mine] == pytest.approx([h.score for h in alone], abs=1e-4)
        assert mine[0].tokens == alone[0].tokens
        assert mine[0].text == vocabulary.decode(alone[0].tokens)
    assert translate_lines(model, vocabulary, lines, options) == [best[0].text for best in found]


@pytest.fixture
def models(model, vocabulary):
    size = len(vocabulary)
    return [model, lively(size, seed=5), recurrent(size)]


@torch.no_grad()
def test_probabilities_are_averaged_and_hypotheses_move_in_every_model(models):
    source, index = torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]]), torch.tensor([1, 0, 1])
    ensemble = Ensemble(models)
    together, alone = ensemble.start(source), [model.start(source) for model in models]
    for tokens in torch.tensor([[2, 2], [6, 9]]):
        steps = zip(models, alone, strict=True)
        expected = torch.stack([m.step(tokens, state).softmax(-1) for m, state in steps])
        mean = expected.mean(0)
        torch.testing.assert_close(ensemble.step(tokens, together).exp(), mean)
        assert not torch.allclose(mean, expected[0], atol=1e-3)
    last = torch.tensor([4, 5, 6])
    for state in (together, *alone):
        state.reorder(index)
    expected = [m.step(last, state).softmax(-1) for m, state in zip(models, alone, strict=True)]
    torch.testing.assert_close(ensemble.step(last, together).exp(), torch.stack(expected).mean(0))


def test_translate_with_several_checkpoints(models, vocabulary, write, text, capsys):
    """The first one says how to decode."""
    first = write(models[0], recipe={"decode": {"length_penalty": 2.0}})
    paths = [first, *map(write, models[1:])]
    assert main(["mt", "translate", *paths, "--input", text(LINES), *FAST]) == 0
    options = DecodingOptions(beam=2, max_length=6, length_penalty=2.0)
    said = capsys.readouterr()
    assert said.out.splitlines() == translate_lines(Ensemble(models), vocabulary, LINES, options)
    assert "decoding: beam 2, length penalty 2 (gnmt)\n" in said.err
    other = Vocabulary.train(["other words of another text"] * 3, 30).to_bytes()
    paths = paths[0], write(models[1], vocabulary=other)
    assert main(["mt", "translate", *paths, "--input", text(LINES), *FAST]) == 1
    wanted = f"{paths[1]}: expected the vocabulary of {paths[0]}, got another one"
    assert wanted in capsys.readouterr().err


def test_lines_of_several_languages():
    """Each model chooses layers for a batch, and each numbers the languages in its own way."""
    letters = ["a b c d e f g h"] * 9
    vocabulary = Vocabulary.train(letters, 14, tags=["<de>", "<fr>"], whole_words=True)
    tags = {tag: vocabulary.encode(f"<{tag}>")[0] for tag in ("de", "fr")}
    latent = {"encoder_connection": "latent", "decoder_connection": "latent"}
    kinds = latent | {"languages": tags}, latent | {"languages": dict(reversed(tags.items()))}, {}
    models = [lively(len(vocabulary), seed, **options) for seed, options in enumerate(kinds)]
    ensemble = Ensemble(models).eval()
    lines = ["<de> a b c", "<fr> a b c", "<de> d e", "", "<fr> f g h"]
    options = DecodingOptions(nbest=3, max_length=6)
    alone = [translate_nbest(ensemble, vocabulary, [line], options)[0] for line in lines]
    together = translate_nbest(ensemble, vocabulary, lines, options)
    for one, other in zip(alone, together, strict=True):
        assert [found.text for found in one] == [found.text for found in other]
        scores = [found.score for found in other]
        assert [found.score for found in one] == pytest.approx(scores, abs=1e-4)
    assert alone[0] != alone[1]


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 0.0), (0.3, 1.2), (1.0, -0.4)])
def test_ranked_by_the_formula(alpha, gamma):
    """Of equals the first comes first, and each text is there once, with its better score."""
    draw, found, scores = random.Random(4), [], {}
    for _ in range(12):
        tokens = tuple(draw.choices(range(4, 7), k=draw.randint(0, 2)))
        found.append(Candidate(tokens, -draw.randint(1, 3), -draw.randint(1, 3)))
    for c in found:
        score = (alpha * c.own + (1 - alpha) * c.other) / (len(c.tokens) + 1) ** gamma
        scores[c.tokens] = max(score, scores.get(c.tokens, score))
    expected = sorted(scores.items(), key=lambda item: -item[1])
    assert [(h.tokens, h.score) for h in ranked(found, alpha, gamma)] == expected
    assert len(scores) < 12


def test_each_judges_the_others_in_the_order_of_lines(grown_model, vocabulary):
    plain = {"beam": 3, "max_length": 6}
    options = DecodingOptions(
        nbest=2, max_tokens=20, deep_shallow=True, alpha=0.3, gamma=0.8, **plain
    )
    got = translate_nbest(grown_model, vocabulary, LINES, options)
    assert got.pop(1) == [(0.0, "", ())]
    differing = 0
    for line, best in zip(filter(None, LINES), got, strict=True):
        source, judged = torch.tensor([[*vocabulary.encode(line), 3]]), []
        for own, other in ((grown_model, grown_model.bottom), (grown_model.bottom, grown_model)):
            found = beam_search(own, source, DecodingOptions(nbest=3, **plain))[0]
            (scores,) = score_hypotheses(other, source, [[h.tokens for h in found]])
            judged += [
                Candidate(h.tokens, h.log_prob, s) for h, s in zip(found, scores, strict=True)
            ]
            differing += found[0].tokens != best[0].tokens
        expected = ranked(judged, 0.3, 0.8)[:2]
        assert [h.tokens for h in best] == [h.tokens for h in expected]
        scores = [h.score for h in expected]
        assert [h.score for h in best] == pytest.approx(scores, abs=1e-4)
    # The two networks must disagree here, or the test would show little.
    assert differing > 0


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
    options = DecodingOptions(beam=3, max_length=6, no_unknown=True)
    given = translate_lines(model, vocabulary, LINES, options)
    texts = {
        choice: translate_lines(model, vocabulary, LINES, choice)
        for choice, _ in tune(model, vocabulary, LINES, given, options)
    }
    assert len(texts) == count
    assert next(iter(texts)) == options
    assert len({tuple(lines) for lines in texts.values()}) > 1
    assert all(choice.no_unknown for choice in texts)
    # The choice that gives the references is found, even far from the defaults.
    references = list(texts.values())[-1]
    found = dict(tune(model, vocabulary, LINES, references, options))
    assert found == {choice: right(references, "")(lines) for choice, lines in texts.items()}


def test_the_tokenizer_is_that_of_the_bleu(model, vocabulary):
    options = DecodingOptions(max_length=8)
    lines = translate_lines(model, vocabulary, LINES, options)
    references = [f"{line}." for line in lines]
    for tokenize in ("none", "13a"):
        _, first = next(tune(model, vocabulary, LINES, references, options, tokenize=tokenize))
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
        command = ["mt", "score", "--tune", "--checkpoint", checkpoint, "--source", source,
                   "--reference", text(references, "references"), *FAST,
                   "--beam", "3"]  # fmt: skip
        assert main(command) == 0
        score, gain, last = capsys.readouterr().out.splitlines()
        assert score.startswith("BLEU 100.00 with beam ")
        old = right(references, "")(before)
        assert gain == f"a gain of {100 - old:.2f} over beam 3, length penalty 0.1 (gnmt)"
        words = shlex.split(last.removeprefix("to translate: deepfast ").removesuffix(" < FILE"))
        assert ("--length-penalty" in words or "--deep-shallow" in words) == helps
        # The pasted command gives the translations that were tuned.
        assert main([*words, "--input", source]) == 0
        assert capsys.readouterr().out.splitlines() == references
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = {"bleu": 100, "before": old, "tokenize": "13a"}
        assert {name: found.pop(name) for name in expected} == expected
        assert found.keys() == (best.keys() if helps else set())
