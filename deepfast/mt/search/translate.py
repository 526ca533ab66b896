"""Lines of text in, their translations out."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepfast.mt.data import split_tag
from deepfast.mt.data.posunk import read_translations, without_marks
from deepfast.mt.data.vocabulary import AnyVocabulary
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import beam_search
from deepfast.mt.search.deep_shallow import ALPHA, GAMMA, line_candidates
from deepfast.mt.search.lines import decode_lines
from deepfast.mt.search.options import DEFAULTS, DecodingOptions
from deepfast.mt.search.unknown import check_aligns, replace_unknown

Scored = list[tuple[float, tuple[int, ...]]]
"""Scores and token ids of the translations of a line, best first."""


@dataclass(frozen=True)
class Translations:
    """What `translate_all` found."""

    nbest: list[list[tuple[float, str]]]
    """Of every line, in the order of the lines, the best translations with their scores."""
    target_tokens: int
    """Tokens of the best translation of every line, eos included."""


def translate_all(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    options: DecodingOptions = DEFAULTS,
) -> Translations:
    """The best translations of every line, and what a report needs besides them.

    A line without text has the one translation ``(0.0, "")``.
    `deepfast.mt.search.lines.decode_lines` makes the batches.

    Args:
        model: on the device where it is to run; the caller chooses autocast.
        vocabulary: the one that the model was trained with.
        lines: source sentences.

    Raises:
        ValueError: a vocabulary of another size than the model's, ``replace_unknown`` with a model
            without attention over the source, or ``deep_shallow`` with one that has not grown.
        RuntimeError: see `beam_search`.
    """
    subwords = check_aligns(model, vocabulary) if options.replace_unknown else None
    found: list[Scored | None]
    if options.deep_shallow:
        alpha = ALPHA if options.alpha is None else options.alpha
        gamma = GAMMA if options.gamma is None else options.gamma
        found = [
            None if best is None else best.ranked(alpha, gamma)[: options.nbest]
            for best in line_candidates(model, vocabulary, lines, options)
        ]
    else:

        def decode(source_BS: Tensor) -> list[Scored]:
            best = beam_search(model, source_BS, options, **vocabulary.search_ids())
            return [[(h.score, h.tokens) for h in own] for own in best]

        found = decode_lines(model, vocabulary, lines, decode, max_tokens=options.max_tokens)
    translations = {} if options.dictionary is None else read_translations(options.dictionary)
    results = []
    for line, best in zip(lines, found, strict=True):
        scores, tokens = zip(*(best or [(0.0, ())]), strict=True)
        if subwords is not None:
            texts = replace_unknown(model, subwords, line, tokens, translations)
        else:
            texts = [vocabulary.decode(ids) for ids in tokens]
        if options.dictionary is not None:
            tag, rest = split_tag(line)
            words = (rest if tag in vocabulary.tags else line).split()
            texts = [without_marks(words, text, translations) for text in texts]
        results.append(list(zip(scores, texts, strict=True)))
    return Translations(
        nbest=results,
        target_tokens=sum(len(best[0][1]) + 1 for best in found if best is not None),
    )


def translate_nbest(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    options: DecodingOptions = DEFAULTS,
) -> list[list[tuple[float, str]]]:
    """For each line up to ``options.nbest`` pairs of score and text, best first; see
    `translate_all`."""
    return translate_all(model, vocabulary, lines, options).nbest


def translate_lines(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    options: DecodingOptions = DEFAULTS,
) -> list[str]:
    """The best translation of every line, in the order of the lines; see `translate_all`."""
    return [best[0][1] for best in translate_nbest(model, vocabulary, lines, options)]
