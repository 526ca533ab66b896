"""BLEU of a run's own translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from deepfast.mt.models import TranslationModel
from deepfast.mt.search import DecodingOptions, bleu, translate_lines
from deepfast.mt.search.score import sentence_counts, tokenizer_of
from deepfast.mt.training.corpus import Corpus, by_language
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.recipe import Recipe


@dataclass(frozen=True)
class Translated:
    """The translations of a text, and how good they are."""

    lines: list[str]
    row: dict[str, float]
    """``bleu``, 0 to 100; with several languages also that of each, and the first is their mean."""
    signature: str
    """sacrebleu's."""
    sentences: str | None
    """`deepfast.mt.search.score.sentence_counts`; None with several languages."""


def translated(
    model: TranslationModel,
    pairs: Sequence[tuple[str, str]],
    recipe: Recipe,
    corpus: Corpus,
    ranks: Ranks,
) -> Translated:
    """Translates the sources as the recipe's section `decode` says, each rank its share."""
    lines, references = zip(*pairs, strict=True)
    options = DecodingOptions(**asdict(recipe.decode))
    mine = lines[ranks.rank :: ranks.size]
    model.eval()
    found = translate_lines(model, corpus.vocabulary, mine, options) if mine else []
    outputs = [""] * len(lines)
    for rank, part in enumerate(ranks.objects(found)):
        outputs[rank :: ranks.size] = part
    tokenize = tokenizer_of(recipe.data.target_language)
    parts = by_language(pairs) if corpus.languages else {"": list(range(len(lines)))}
    scores = {
        name: bleu([outputs[i] for i in own], [references[i] for i in own], tokenize=tokenize)
        for name, own in parts.items()
    }
    each = {f"bleu_{name}": score.bleu for name, score in scores.items() if name}
    first = next(iter(scores.values()))
    # Both sides are lower-cased then, so the two kinds of BLEU are the same number.
    lower = recipe.data.lowercase
    return Translated(
        lines=outputs,
        row={"bleu": sum(score.bleu for score in scores.values()) / len(scores)} | each,
        signature=first.bleu_lowercase_signature if lower else first.bleu_signature,
        sentences=None if each else sentence_counts(outputs, references, tokenize=tokenize),
    )
