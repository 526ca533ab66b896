"""BLEU and chrF of translations by sacrebleu, with the signatures that make figures comparable.

Papineni et al., BLEU, 2002; Popovic, chrF, 2015; Post, A Call for Clarity in Reporting BLEU
Scores, 2018, https://aclanthology.org/W18-6319.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from deepfast.files import require
from deepfast.mt.data import split_tag


@dataclass(frozen=True)
class Scores:
    """Corpus scores in percent, 0 to 100, each with sacrebleu's signature."""

    bleu: float
    """Cased BLEU, tokens by 13a."""
    bleu_signature: str
    bleu_lowercase: float
    """BLEU of the lower-cased text, tokens by 13a."""
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


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Scores of translations, each against one reference; both as plain, detokenised text.

    Raises:
        ValueError: the counts differ, there is nothing to score, or a list was expected.
        MissingPackage: sacrebleu is not installed.
    """
    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(lines, str):
            raise ValueError(f"bleu: {name} must be a list of sentences, got one string")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"bleu: expected one reference for every translation, got {len(hypotheses)} "
            f"translations and {len(references)} references"
        )
    if not hypotheses:
        raise ValueError("bleu: expected at least one translation, got none")
    require("sacrebleu", "scoring")
    from sacrebleu.metrics import BLEU, CHRF

    metrics = BLEU(tokenize="13a"), BLEU(tokenize="13a", lowercase=True), CHRF()
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
    name: str, chosen: Sequence[bool], hypotheses: Sequence[str], references: Sequence[str]
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
    return Part(name, len(rows), bleu_against(expected)(translated))


def bleu_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    bounds: Sequence[int],
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
        parts.append(bleu_of_part(f"{name} words", chosen, hypotheses, references))
    return parts


def check_bounds(bounds: Sequence[int]) -> Sequence[int]:
    """The bounds of `bleu_by_length`, or a ValueError."""
    if not bounds or any(low >= high for low, high in itertools.pairwise((0, *bounds))):
        raise ValueError(f"by_length: expected rising integers of at least 1, got {list(bounds)}")
    return bounds


def bleu_against(references: Sequence[str]) -> Callable[[Sequence[str]], float]:
    """The cased BLEU of `bleu` for many translations of one text, whose n-grams are counted once.

    Raises:
        MissingPackage: sacrebleu is not installed.
    """
    require("sacrebleu", "scoring")
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="13a", references=[list(references)])
    return lambda hypotheses: metric.corpus_score(list(hypotheses), None).score


def sentence_counts(hypotheses: Sequence[str], references: Sequence[str]) -> str:
    """What the cased BLEU of any of these sentences is computed from (`bleu_of_counts`): for each
    sentence its matching 1-, 2-, 3- and 4-grams, its tokens and those of its reference. Integers
    with spaces between them, sentences with semicolons."""
    require("sacrebleu", "scoring")
    from sacrebleu.metrics import BLEU

    score = BLEU(tokenize="13a", effective_order=True).sentence_score
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
