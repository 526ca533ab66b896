"""Lines of text in, lines of text out."""

import warnings
from collections.abc import Sequence

from torch import nn

from deepfast.data import Vocabulary, evaluation_batches, restore_order

from .beam import beam_search
from .unknown import check_aligns
from .unknown import replace_unknown as with_replaced


def translate_nbest(
    model: nn.Module,
    vocabulary: Vocabulary,
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
    included. A line without text has the one translation ``(0.0, "")``. A line longer than
    ``max_tokens`` is translated in a batch of its own, with a warning that names it.

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
    if len(vocabulary) != model.config.vocab_size:
        raise ValueError(
            f"translate: expected a vocabulary of the model's {model.config.vocab_size} pieces, "
            f"got {len(vocabulary)}"
        )
    if replace_unknown:
        check_aligns(model)
    encoded = [vocabulary.encode(line) for line in lines]
    filled = [index for index, tokens in enumerate(encoded) if tokens]
    batches = evaluation_batches([(encoded[i], ()) for i in filled], max_tokens=max_tokens)
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
    outputs = [
        beam_search(
            model,
            batch.source_BS.to(device),
            beam=beam,
            length_penalty=length_penalty,
            max_length=max_length,
            nbest=nbest,
            suppress_unknown=suppress_unknown,
        )
        for batch in batches
    ]
    results = [[(0.0, "")] for _ in lines]
    for index, hypotheses in zip(filled, restore_order(batches, outputs), strict=True):
        tokens = [h.tokens for h in hypotheses]
        if replace_unknown:
            texts = with_replaced(model, vocabulary, lines[index], tokens)
        else:
            texts = [vocabulary.decode(t) for t in tokens]
        results[index] = [(h.score, text) for h, text in zip(hypotheses, texts, strict=True)]
    return results


def translate_lines(
    model: nn.Module,
    vocabulary: Vocabulary,
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
