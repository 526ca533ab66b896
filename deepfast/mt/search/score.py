"""BLEU and chrF of translations by sacrebleu, with the signatures that make figures comparable.

Papineni et al., BLEU, 2002; Popovic, chrF, 2015; Post, A Call for Clarity in Reporting BLEU
Scores, 2018, https://aclanthology.org/W18-6319.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.files import MissingPackage, require

TOKENIZERS = ("13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab")
"""sacrebleu's names. "none" is for tokenised text, as the multi-bleu script of the papers."""
OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""Target language -> its tokenizer; all others have 13a."""


def tokenizer_of(language: str | None) -> str:
    """The tokenizer for a target language, such as "zh" or "zh-CN"; None: the language is not
    known."""
    return OF_LANGUAGE.get((language or "").partition("-")[0], "13a")


def require_tokenizer(name: str) -> None:
    """Checks that BLEU can use a tokenizer here.

    Raises:
        ValueError: not one of `TOKENIZERS`.
        MissingPackage: sacrebleu, or a package that this tokenizer needs, is not installed.
    """
    _metric(name)


def warn_of_long_words(references: Sequence[str], tokenize: str) -> None:
    """Warns where a tokenizer that splits at spaces gets text without spaces: each sentence is then
    one word, and BLEU is 0 even for equal texts."""
    words = [len(line.split()) for line in references]
    if tokenize in ("13a", "none", "intl") and words.count(1) > len(words) / 2:
        warnings.warn(
            f"most references have no space, so each is one word for the tokenizer {tokenize}: "
            "expected zh, ja-mecab, ko-mecab or char for such text",
            stacklevel=3,
        )


def _metric(tokenize: str, **options: Any) -> Any:
    """sacrebleu's BLEU by a tokenizer, see `require_tokenizer`."""
    checks.choice("bleu", TOKENIZERS, tokenize=tokenize)
    bleu = require("sacrebleu.metrics", "scoring").BLEU
    try:
        # Text that is tokenised on purpose needs no advice to detokenise it.
        return bleu(tokenize=tokenize, force=tokenize == "none", **options)
    except RuntimeError as error:
        raise MissingPackage(
            f"BLEU by {tokenize} needs packages that cannot be imported: "
            f"pip install 'sacrebleu[{tokenize[:2]}]'"
        ) from error


@dataclass(frozen=True)
class Scores:
    """Corpus scores in percent, 0 to 100, each with sacrebleu's signature."""

    bleu: float
    """Cased BLEU."""
    bleu_signature: str
    bleu_lowercase: float
    """BLEU of the lower-cased text."""
    bleu_lowercase_signature: str
    chrf: float
    """chrF2, cased."""
    chrf_signature: str
    brevity_penalty: float
    """The brevity penalty of cased BLEU, 0 to 1."""
    length_ratio: float
    """Tokens of the translations divided by tokens of the references."""
    sentences: int

    def __str__(self) -> str:
        return "\n".join(
            (
                f"BLEU            {self.bleu:6.2f}  {self.bleu_signature}",
                f"BLEU lower-case {self.bleu_lowercase:6.2f}  {self.bleu_lowercase_signature}",
                f"chrF            {self.chrf:6.2f}  {self.chrf_signature}",
                f"{self.sentences} sentences, length ratio {self.length_ratio:.3f}, "
                f"brevity penalty {self.brevity_penalty:.3f}",
            )
        )


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Scores:
    """Scores of translations, each against one reference, as plain, detokenised text.

    Args:
        tokenize: one of `TOKENIZERS`, for both kinds of BLEU.

    Raises:
        ValueError: the counts differ, there is nothing to score, or a list was expected.
        MissingPackage: sacrebleu, or a package that the tokenizer needs, is not installed.
    """
    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if not isinstance(lines, (list, tuple)) or not all(isinstance(x, str) for x in lines):
            raise ValueError(f"bleu: {name} must be a list of sentences, got {checks.shown(lines)}")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"bleu: expected one reference for every translation, got {len(hypotheses)} "
            f"translations and {len(references)} references"
        )
    if not hypotheses:
        raise ValueError("bleu: expected at least one translation, got none")
    character_metric = require("sacrebleu.metrics", "scoring").CHRF()
    metrics = _metric(tokenize), _metric(tokenize, lowercase=True), character_metric
    warn_of_long_words(references, tokenize)
    cased, lower, chrf = (m.corpus_score(list(hypotheses), [list(references)]) for m in metrics)
    signatures = [str(metric.get_signature()) for metric in metrics]
    return Scores(
        bleu=cased.score,
        bleu_signature=signatures[0],
        bleu_lowercase=lower.score,
        bleu_lowercase_signature=signatures[1],
        chrf=chrf.score,
        chrf_signature=signatures[2],
        brevity_penalty=cased.bp,
        length_ratio=cased.sys_len / cased.ref_len if cased.ref_len else 0.0,
        sentences=len(hypotheses),
    )


def bleu_against(
    references: Sequence[str], tokenize: str = "13a"
) -> Callable[[Sequence[str]], float]:
    """The cased BLEU of `bleu` for many translations of one text, whose n-grams are counted once.

    Raises:
        MissingPackage: see `bleu`.
    """
    metric = _metric(tokenize, references=[list(references)])
    return lambda hypotheses: metric.corpus_score(list(hypotheses), None).score


def sentence_counts(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> str:
    """The counts of which `bleu_of_counts` makes the cased BLEU of any of these sentences: for each
    sentence its matching 1-, 2-, 3- and 4-grams, its tokens and those of its reference. Integers
    with spaces between them, sentences with semicolons."""
    score = _metric(tokenize, effective_order=True).sentence_score
    found = (score(h, [r]) for h, r in zip(hypotheses, references, strict=True))
    return ";".join(" ".join(map(str, (*s.counts, s.sys_len, s.ref_len))) for s in found)


def counts_of(text: str) -> Tensor:
    """`sentence_counts` as a table (S, 10), int64: the matching n-grams of each sentence, all its
    n-grams, its tokens and those of its reference."""
    rows = torch.tensor([[int(x) for x in line.split()] for line in text.split(";")])
    matching, length, reference = rows.split((4, 1, 1), 1)
    return torch.cat((matching, (length - torch.arange(4)).clamp(min=0), length, reference), 1)


def bleu_of_counts(counts: Tensor) -> float:
    """The cased BLEU, 0 to 100, of the sentences whose rows add up to ``counts`` (10,)."""
    *grams, length, reference = counts.tolist()
    found = require("sacrebleu.metrics", "scoring").BLEU.compute_bleu(
        correct=grams[:4], total=grams[4:], sys_len=length, ref_len=reference, smooth_method="exp"
    )
    return found.score
