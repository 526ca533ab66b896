"""The BLEU of a dev text for many decoding options, to find the best."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from deepfast.mt.data import Vocabulary
from deepfast.mt.data.posunk import read_translations
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.deep_shallow import candidates, check_grown, ranked
from deepfast.mt.search.options import ALPHA, DEFAULTS, GAMMA, DecodingOptions
from deepfast.mt.search.score import bleu_against, warn_of_long_words
from deepfast.mt.search.translate import decode_lines, texts_of, translate_lines

ALPHAS, GAMMAS = [i / 10 for i in range(11)], [i / 5 for i in range(11)]
"""The weights that are tried for a model that has grown."""
BEAMS, PENALTIES = (2, 4, 8), (0.0, 0.3, 0.6, 1.0, 1.5)
"""The beams and length penalties that are tried for any other model."""


def tune(
    model: SearchModel,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    references: Sequence[str],
    options: DecodingOptions = DEFAULTS,
    *,
    tokenize: str = "13a",
) -> Iterator[tuple[DecodingOptions, float]]:
    """Options and their cased BLEU, 0 to 100, one after the other; the given options come first.

    For a model that has grown the others are deep-shallow decoding with every pair of `ALPHAS` and
    `GAMMAS`, the nearest to `ALPHA` and `GAMMA` first; the model and its bottom search once each.
    For any other model they are every pair of `BEAMS` and `PENALTIES`, a search for each.

    Args:
        lines, references: the text and its translation, line by line.
        tokenize: see `bleu`.
        model, vocabulary, options: see `translate_nbest`; deep_shallow and nbest are not read.

    Raises:
        ValueError: the counts differ, or there is nothing to translate.
    """
    if len(lines) != len(references) or not lines:
        raise ValueError(
            f"expected as many references as lines, at least one, got {len(lines)} lines "
            f"and {len(references)} references"
        )
    if options.deep_shallow:
        check_grown(model)
    options = replace(options, nbest=1, deep_shallow=False, alpha=ALPHA, gamma=GAMMA)
    warn_of_long_words(references, tokenize)
    score = bleu_against(references, tokenize)
    if not hasattr(model, "bottom"):
        others = [
            replace(options, beam=beam, length_penalty=penalty)
            for beam, penalty in product(BEAMS, PENALTIES)
        ]
        for choice in dict.fromkeys([options, *others]):
            yield choice, score(translate_lines(model, vocabulary, lines, choice))
        return
    found = decode_lines(
        model, vocabulary, lines,
        lambda source_BS: candidates(model, source_BS, options),
        max_tokens=options.max_tokens,
    )  # fmt: skip
    dictionary = {} if options.dictionary is None else read_translations(options.dictionary)

    # Most pairs of alpha and gamma choose the same translations.
    @functools.cache
    def bleu(*chosen: tuple[int, ...]) -> float:
        texts = [
            texts_of(model, vocabulary, line, [tokens], options, dictionary)[0]
            for line, tokens in zip(lines, chosen, strict=True)
        ]
        return score(texts)

    yield options, bleu(*(own[0].tokens if own else () for own in found))
    pairs = sorted(product(ALPHAS, GAMMAS), key=lambda p: abs(p[0] - ALPHA) + abs(p[1] - GAMMA))
    for alpha, gamma in pairs:
        choice = replace(options, deep_shallow=True, alpha=alpha, gamma=gamma)
        yield choice, bleu(*(ranked(own, alpha, gamma)[0].tokens if own else () for own in found))
