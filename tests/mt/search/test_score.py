"""Scores: sacrebleu's figures and signatures."""

import importlib

import pytest
import sacrebleu
import torch

from deepfast.files import MissingPackage
from deepfast.mt.search import bleu
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


@pytest.mark.parametrize("tokenize", ["13a", "none", "char"])
def test_figures_are_those_of_sacrebleu(tokenize):
    scores = bleu(HYPOTHESES, REFERENCES, tokenize=tokenize)
    given = HYPOTHESES, [REFERENCES]
    cased = sacrebleu.corpus_bleu(*given, tokenize=tokenize)
    lower = sacrebleu.corpus_bleu(*given, tokenize=tokenize, lowercase=True)
    chrf = sacrebleu.corpus_chrf(*given)
    found = [scores.bleu, scores.bleu_lowercase, scores.chrf]
    assert found == pytest.approx([cased.score, lower.score, chrf.score])
    assert scores.bleu < scores.bleu_lowercase
    assert scores.brevity_penalty == pytest.approx(cased.bp)
    assert scores.length_ratio == pytest.approx(cased.sys_len / cased.ref_len)
    assert scores.sentences == 3
    ends = f"tok:{tokenize}|smooth:exp|version:{sacrebleu.__version__}"
    assert scores.bleu_signature == f"nrefs:1|case:mixed|eff:no|{ends}"
    assert scores.bleu_lowercase_signature == f"nrefs:1|case:lc|eff:no|{ends}"
    assert "nc:6" in scores.chrf_signature
    # Other ways to the same BLEU.
    score = bleu_against(REFERENCES, tokenize)
    for hypotheses in (HYPOTHESES, REFERENCES, ["", "die alte Brücke ist", "Das Haus"]):
        expected = bleu(hypotheses, REFERENCES, tokenize=tokenize).bleu
        assert score(hypotheses) == pytest.approx(expected)
        counts = counts_of(sentence_counts(hypotheses, REFERENCES, tokenize))
        assert counts.dtype == torch.int64
        assert bleu_of_counts(counts.sum(0)) == pytest.approx(expected)
    nothing = bleu(["", "", ""], REFERENCES, tokenize=tokenize)
    assert (nothing.bleu, nothing.length_ratio) == (0, 0)


def test_the_tokenizer_of_a_language(recwarn):
    languages = ["zh", "zh-CN", "ja", "ko", "de", None]
    assert [*map(tokenizer_of, languages)] == ["zh", "zh", "ja-mecab", "ko-mecab", "13a", "13a"]
    assert bleu(CHINESE, CHINESE, tokenize=tokenizer_of("zh")).bleu == pytest.approx(100)
    assert bleu(REFERENCES, REFERENCES).bleu == pytest.approx(100)
    assert not recwarn
    with pytest.warns(UserWarning, match="have no space, so each is one word for the tokenizer 13"):
        assert bleu(CHINESE, CHINESE).bleu == 0


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_a_tokenizer_without_its_package(monkeypatch, language):
    """The package is not installed, or is hidden."""
    name = tokenizer_of(language)
    module = importlib.import_module(f"sacrebleu.tokenizers.tokenizer_{language}_mecab")
    monkeypatch.setattr(module, "MeCab", None)
    sentence = rf"BLEU by {name} needs packages .* pip install 'sacrebleu\[{language}\]'"
    for use in (require_tokenizer, lambda name: bleu(["a"], ["a"], tokenize=name)):
        with pytest.raises(MissingPackage, match=sentence):
            use(name)
