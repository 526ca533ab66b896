"""Scores: sacrebleu's figures and signatures."""

import builtins
import json
import re

import pytest
import sacrebleu
import torch

from deepfast.files import MissingPackage
from deepfast.mt.search import bleu, bleu_by_length, bleu_of_part
from deepfast.mt.search.score import (
    bleu_against,
    bleu_of_counts,
    counts_of,
    require_tokenizer,
    sentence_counts,
    tokenizer_of,
)

HYPOTHESES = ["Das Haus steht am Fluss .", "die alte Brücke ist gesperrt.", "Sie liest"]
CHINESE = ["我们步行穿过安静的村庄回家。", "那座旧桥已经关闭。", "她在读一本关于桥的长书。"]
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


@pytest.mark.parametrize("tokenize", ["13a", "none", "char"])
def test_all_kinds_of_bleu_have_one_tokenizer(tokenize):
    scores = bleu(HYPOTHESES, REFERENCES, tokenize=tokenize)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize).score
    assert scores.bleu == pytest.approx(expected)
    assert f"tok:{tokenize}" in scores.bleu_signature
    assert f"tok:{tokenize}" in scores.bleu_lowercase_signature
    everything = [True] * 3
    assert bleu_of_part("all", everything, HYPOTHESES, REFERENCES, tokenize).bleu == scores.bleu
    parts = bleu_by_length(REFERENCES, HYPOTHESES, REFERENCES, [9], tokenize)
    assert parts[0].bleu == scores.bleu
    counts = counts_of(sentence_counts(HYPOTHESES, REFERENCES, tokenize))
    assert bleu_of_counts(counts.sum(0)) == pytest.approx(scores.bleu)
    assert counts.dtype == torch.int64
    score = bleu_against(REFERENCES, tokenize)
    for hypotheses in (HYPOTHESES, REFERENCES, ["", "die alte Brücke ist", "Das Haus"]):
        expected = bleu(hypotheses, REFERENCES, tokenize=tokenize).bleu
        assert score(hypotheses) == pytest.approx(expected)


def test_the_tokenizer_of_a_language(recwarn):
    languages = ["zh", "zh-CN", "ja", "ko", "de", None]
    assert [*map(tokenizer_of, languages)] == ["zh", "zh", "ja-mecab", "ko-mecab", "13a", "13a"]
    assert bleu(CHINESE, CHINESE, tokenize=tokenizer_of("zh")).bleu == pytest.approx(100)
    assert bleu(REFERENCES, REFERENCES).bleu == pytest.approx(100)
    assert not recwarn


def test_text_without_spaces_is_warned_of():
    with pytest.warns(UserWarning, match="have no space, so each is one word for the tokenizer 13"):
        assert bleu(CHINESE, CHINESE).bleu == 0


@pytest.mark.parametrize("name", ["ja-mecab", "ko-mecab"])
def test_a_tokenizer_without_its_package(monkeypatch, name):
    """The packages are not installed, or are hidden."""
    imported = builtins.__import__
    monkeypatch.setattr(
        "importlib.import_module",
        lambda module, *rest: imported("no_" + module if "ecab" in module.lower() else module),
    )
    language = name[:2]
    with pytest.raises(MissingPackage, match=f"BLEU by {name} needs the package (MeCab|mecab_ko)"):
        require_tokenizer(name)
    with pytest.raises(MissingPackage, match=re.escape(f"pip install 'sacrebleu[{language}]'")):
        bleu(["a"], ["a"], tokenize=tokenizer_of(language))


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
