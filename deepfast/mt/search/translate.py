"""Lines of text in, lines of text out."""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from deepfast.mt.data import (
    TokenVocabulary,
    Vocabulary,
    evaluation_batches,
    restore_order,
)
from deepfast.mt.models.interface import target_vocab_size
from deepfast.mt.search.beam import Hypothesis, beam_search
from deepfast.mt.search.unknown import check_aligns
from deepfast.mt.search.unknown import replace_unknown as with_replaced

Found = TypeVar("Found")


def translate_nbest(
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    max_tokens: int = 2000,
    nbest: int = 1,
    max_length: int | None = None,
    suppress_unknown: bool = False,
    replace_unknown: bool = False,
) -> list[list[tuple[float, str]]]:
    """The best translations of every line with their scores, in the order of the lines.

    Lines are sorted by length into batches of at most ``max_tokens`` source tokens, padding
    included, and of what the model wants to have alike, such as their language. A line without
    text has the one translation ``(0.0, "")``. A line longer than ``max_tokens`` is translated in a
    batch of its own, with a warning that names it.

    Args:
        model: on the device where it is to run; autocast is the caller's choice.
        vocabulary: the one the model was trained with.
        lines: source sentences.
        beam, length_penalty, nbest, max_length, suppress_unknown: see `beam_search`. The model
            decodes ``beam`` times as many hypotheses at once as a batch has sentences.
        replace_unknown: whether unk becomes the source word it is aligned with.
        max_tokens: tokens of a batch on the source side, eos included.

    Returns:
        For each line up to ``nbest`` pairs of score and text, best first.

    Raises:
        ValueError: an argument out of range, a vocabulary of another size than the model's, or
            ``replace_unknown`` with a model without attention over the source.
        RuntimeError: see `beam_search`.
    """

    if replace_unknown:
        check_aligns(model, vocabulary)

    def decode(source_BS: Tensor) -> list[list[Hypothesis]]:
        return beam_search(
            model,
            source_BS,
            beam=beam,
            length_penalty=length_penalty,
            max_length=max_length,
            nbest=nbest,
            suppress_unknown=suppress_unknown,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            unk_id=vocabulary.unk_id,
        )

    def texts(line: str, tokens: list[tuple[int, ...]]) -> list[str]:
        if replace_unknown:
            return with_replaced(model, vocabulary, line, tokens)
        return [vocabulary.decode(t) for t in tokens]

    found = decode_lines(model, vocabulary, lines, decode, max_tokens=max_tokens)
    results = []
    for line, best in zip(lines, found, strict=True):
        best = best or [Hypothesis((), 0.0, 0.0)]
        scores = [h.score for h in best]
        results.append(list(zip(scores, texts(line, [h.tokens for h in best]), strict=True)))
    return results


def decode_lines(
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    decode: Callable[[Tensor], list[Found]],
    *,
    max_tokens: int,
) -> list[Found | None]:
    """What ``decode`` finds for every line, in the order of the lines; None without text.

    ``decode`` is given batches of sentences (B, S) on the model's device; for the rest see
    `translate_nbest`.
    """
    sizes = model.config.vocab_size, target_vocab_size(model.config)
    for expected, got in zip(sizes, (len(vocabulary), vocabulary.target_size), strict=True):
        if expected != got:
            raise ValueError(f"expected a vocabulary of the model's {expected} pieces, got {got}")
    encoded = [vocabulary.encode(line) for line in lines]
    filled = [index for index, tokens in enumerate(encoded) if tokens]
    groups = _groups(model, lines, {i: encoded[i] for i in filled})
    batches = evaluation_batches(
        [(encoded[i], ()) for i in filled], max_tokens=max_tokens, groups=groups
    )
    # eos makes a line one token longer.
    too_long = [index for index in filled if len(encoded[index]) + 1 > max_tokens]
    if too_long:
        first = too_long[0]
        others = f" and {len(too_long) - 1} more" if len(too_long) > 1 else ""
        warnings.warn(
            f"line {first + 1} has {len(encoded[first]) + 1} tokens{others}, max_tokens is "
            f"{max_tokens}: translated in a batch of its own",
            stacklevel=2,
        )
    device = next(model.parameters()).device
    outputs = [decode(batch.source_BS.to(device)) for batch in batches]
    results: list[Found | None] = [None] * len(lines)
    for index, found in zip(filled, restore_order(batches, outputs), strict=True):
        results[index] = found
    return results


def _groups(
    model: nn.Module, lines: Sequence[str], encoded: dict[int, list[int]]
) -> list[int] | None:
    """What the lines of one batch must agree in; None where the model asks nothing."""
    if not hasattr(model, "group"):
        return None
    groups = []
    for index, tokens in encoded.items():
        try:
            groups.append(model.group(tokens))
        except ValueError as error:
            # The model knows ids alone.
            word = (lines[index].split() or [lines[index]])[0]
            raise ValueError(f"line {index + 1} begins with {word!r}: {error}") from error
    return groups


def translate_lines(
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    max_tokens: int = 2000,
    max_length: int | None = None,
    suppress_unknown: bool = False,
    replace_unknown: bool = False,
) -> list[str]:
    """The best translation of every line, in the order of the lines; see `translate_nbest`."""
    results = translate_nbest(
        model,
        vocabulary,
        lines,
        beam=beam,
        length_penalty=length_penalty,
        max_tokens=max_tokens,
        max_length=max_length,
        suppress_unknown=suppress_unknown,
        replace_unknown=replace_unknown,
    )
    return [best[0][1] for best in results]
