"""Scores: sacrebleu's figures and signatures."""

import json

import pytest
import sacrebleu

from deepfast.mt.search import bleu, bleu_of_part
from deepfast.mt.search.score import bleu_against

HYPOTHESES = ["Das Haus steht am Fluss .", "die alte Brücke ist gesperrt.", "Sie liest"]
REFERENCES = ["Das Haus steht am Fluss.", "Die alte Brücke ist gesperrt.", "Sie liest ein Buch."]


def test_figures_are_those_of_sacrebleu():
    scores = bleu(HYPOTHESES, REFERENCES)
    cased = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert scores.bleu == pytest.approx(cased.score)
    assert scores.bleu_lowercase == pytest.approx(
        sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True).score
    )
    assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert scores.bleu < scores.bleu_lowercase
    assert scores.brevity_penalty == pytest.approx(cased.bp)
    assert scores.length_ratio == pytest.approx(cased.sys_len / cased.ref_len)
    assert scores.sentences == 3

    again = json.loads(json.dumps(scores.as_dict()))
    assert again["bleu"] == scores.bleu
    for shown in (f"{scores.bleu:.2f}", scores.bleu_signature, scores.bleu_lowercase_signature):
        assert shown in str(scores)
    assert "case:mixed" in scores.bleu_signature
    assert "case:lc" in scores.bleu_lowercase_signature
    assert "nc:6" in scores.chrf_signature
    for signature in (scores.bleu_signature, scores.bleu_lowercase_signature):
        assert "tok:13a" in signature
        assert f"version:{sacrebleu.__version__}" in signature
        assert "nrefs:1" in signature


def test_many_translations_of_one_text():
    score = bleu_against(REFERENCES)
    for hypotheses in (HYPOTHESES, REFERENCES, ["", "die alte Brücke ist", "Das Haus"]):
        assert score(hypotheses) == pytest.approx(bleu(hypotheses, REFERENCES).bleu)


def test_perfect_and_empty():
    assert bleu(REFERENCES, REFERENCES).bleu == pytest.approx(100)
    nothing = bleu(["", "", ""], REFERENCES)
    assert (nothing.bleu, nothing.length_ratio) == (0, 0)
    assert bleu([""], [""]).sentences == 1


def test_the_bleu_of_some_sentences_is_that_of_these_alone():
    chosen = [True, False, True]
    hypotheses = ["a b c d e", "x", "the cat sat on the mat"]
    references = ["a b c d f", "y", "the cat sat on a mat"]
    part = bleu_of_part("two of them", chosen, hypotheses, references)
    assert part.sentences == 2
    assert part.bleu == bleu([hypotheses[0], hypotheses[2]], [references[0], references[2]]).bleu
