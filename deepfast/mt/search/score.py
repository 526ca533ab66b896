"""BLEU and chrF of translations by sacrebleu, with the signatures that make figures comparable.

Papineni et al., BLEU, 2002; Popovic, chrF, 2015; Post, A Call for Clarity in Reporting BLEU
Scores, 2018, https://aclanthology.org/W18-6319.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from deepfast.mt.data.errors import require


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


def bleu_against(references: Sequence[str]) -> Callable[[Sequence[str]], float]:
    """The cased BLEU of `bleu` for many translations of one text, whose n-grams are counted once.

    Raises:
        MissingPackage: sacrebleu is not installed.
    """
    require("sacrebleu", "scoring")
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="13a", references=[list(references)])
    return lambda hypotheses: metric.corpus_score(list(hypotheses), None).score
