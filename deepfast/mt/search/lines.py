"""Lines of text in, the search's result for each line out, in the order of the lines."""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from deepfast.mt.data import evaluation_batches, restore_order
from deepfast.mt.data.vocabulary import AnyVocabulary
from deepfast.mt.models.interface import SearchModel, target_vocab_size

Found = TypeVar("Found")


def decode_lines(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    decode: Callable[[Tensor], list[Found]],
    *,
    max_tokens: int,
) -> list[Found | None]:
    """The result of ``decode`` for every line, in the order of the lines; None for a line without
    text.

    Lines are sorted by length into batches of at most ``max_tokens`` source tokens, eos and padding
    included. If a model can only batch lines that share something, such as their language, each
    batch has lines of one group. A line longer than ``max_tokens`` gets its own batch, and a
    warning names it.

    Args:
        decode: from a batch of sentences (B, S) on the model's device to one result each.

    Raises:
        ValueError: a vocabulary of another size than the model's, or a line that the model refuses
            (names it).
    """
    sizes = model.config.vocab_size, target_vocab_size(model.config)
    for expected, got in zip(sizes, (len(vocabulary), vocabulary.target_size), strict=True):
        if expected != got:
            raise ValueError(f"expected a vocabulary of the model's {expected} pieces, got {got}")
    encoded = [vocabulary.encode(line) for line in lines]
    filled = [index for index, tokens in enumerate(encoded) if tokens]
    groups = None
    if hasattr(model, "group"):
        groups = [_group(model, index, lines[index], encoded[index]) for index in filled]
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


def _group(model: SearchModel, index: int, line: str, tokens: list[int]) -> int:
    """A number that the lines of one batch must share."""
    try:
        return model.group(tokens)
    except ValueError as error:
        # The model's message shows ids; the user knows words.
        word = (line.split() or [line])[0]
        raise ValueError(f"line {index + 1} begins with {word!r}: {error}") from error
