"""From lines of text to translations, with a model and its vocabulary or with checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deepfast.mt.data import Vocabulary, evaluation_batches, lower, split_tag, tag_of
from deepfast.mt.data.posunk import read_translations, without_marks
from deepfast.mt.models.checkpoint import load_checkpoint, model_of
from deepfast.mt.models.interface import SearchModel, target_vocab_size
from deepfast.mt.search.beam import Hypothesis, beam_search
from deepfast.mt.search.deep_shallow import candidates, ranked
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.options import DEFAULTS, DecodingOptions
from deepfast.mt.search.score import tokenizer_of
from deepfast.mt.search.unknown import aligned_words, check_aligns

Found = TypeVar("Found")
UNKNOWN = "\0"
"""What stands for an unk until the word that replaces it is known; no vocabulary has it."""


class Translation(NamedTuple):
    """One translation of a line."""

    score: float
    """Higher is better."""
    text: str
    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""


def translate_nbest(
    model: SearchModel,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    options: DecodingOptions = DEFAULTS,
) -> list[list[Translation]]:
    """For each line up to ``options.nbest`` translations, best first.

    A line without text has one translation without text, of score 0. `decode_lines` makes the
    batches.

    Args:
        model: on the device where it is to run; the caller chooses autocast.
        vocabulary: the one that the model was trained with.
        lines: source sentences.

    Raises:
        ValueError: a vocabulary of another size than the model's, ``replace_unknown`` with a model
            without attention over the source, or ``deep_shallow`` with one that has not grown.
        RuntimeError: see `beam_search`.
    """
    if options.replace_unknown:
        check_aligns(model)
    dictionary = {} if options.dictionary is None else read_translations(options.dictionary)

    def decode(source_BS: Tensor) -> list[list[Hypothesis]]:
        if not options.deep_shallow:
            return beam_search(model, source_BS, options)
        found = candidates(model, source_BS, options)
        return [ranked(own, options.alpha, options.gamma)[: options.nbest] for own in found]

    found = decode_lines(model, vocabulary, lines, decode, max_tokens=options.max_tokens)
    results = []
    for line, best in zip(lines, found, strict=True):
        best = best or [Hypothesis((), 0.0, 0.0)]
        tokens = [h.tokens for h in best]
        texts = texts_of(model, vocabulary, line, tokens, options, dictionary)
        results.append(
            [Translation(h.score, x, h.tokens) for h, x in zip(best, texts, strict=True)]
        )
    return results


def translate_lines(
    model: SearchModel,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    options: DecodingOptions = DEFAULTS,
) -> list[str]:
    """The best translation of every line, in the order of the lines; see `translate_nbest`."""
    return [best[0].text for best in translate_nbest(model, vocabulary, lines, options)]


def decode_lines(
    model: SearchModel,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    decode: Callable[[Tensor], list[Found]],
    *,
    max_tokens: int,
) -> list[Found | None]:
    """The result of ``decode`` for every line, in the order of the lines; None for a line without
    text.

    Lines are sorted by length into batches of at most ``max_tokens`` source tokens, eos and padding
    included; a longer line gets its own batch. If a model can only batch lines that share
    something, such as their language, each batch has lines of one group.

    Args:
        decode: from a batch of sentences (B, S) on the model's device to one result each.

    Raises:
        ValueError: a vocabulary of another size than the model's, or a line that the model refuses
            (names it).
    """
    sizes = model.config.vocab_size, target_vocab_size(model.config)
    for expected, got in zip(sizes, (len(vocabulary), len(vocabulary.target)), strict=True):
        if expected != got:
            raise ValueError(f"expected a vocabulary of the model's {expected} pieces, got {got}")
    encoded = [vocabulary.encode(line) for line in lines]
    filled = [index for index, tokens in enumerate(encoded) if tokens]
    groups = []
    for index in filled:
        try:
            groups.append(model.group(encoded[index]))
        except ValueError as error:
            # The model's message shows ids; the user knows words.
            word = lines[index].split()[0]
            raise ValueError(f"line {index + 1} begins with {word!r}: {error}") from error
    pairs = [(encoded[index], ()) for index in filled]
    device = next(model.parameters()).device
    results: list[Found | None] = [None] * len(lines)
    for batch in evaluation_batches(pairs, max_tokens=max_tokens, groups=groups):
        outputs = decode(batch.source_BS.to(device))
        for index, found in zip(batch.indices, outputs, strict=True):
            results[filled[index]] = found
    return results


def texts_of(
    model: SearchModel,
    vocabulary: Vocabulary,
    line: str,
    hypotheses: Sequence[Sequence[int]],
    options: DecodingOptions,
    dictionary: Mapping[str, str],
) -> list[str]:
    """The texts of a line's hypotheses, their marks and unks replaced as the options say."""
    unknown = UNKNOWN if options.replace_unknown else "⁇"
    texts = [vocabulary.decode(tokens, unknown=unknown) for tokens in hypotheses]
    if options.dictionary is not None:
        # Before unks become words: a mark counts the words as the model gave them.
        tag, rest = split_tag(line)
        words = (rest if tag in vocabulary.tags else line).split()
        texts = [without_marks(words, text, dictionary) for text in texts]
    if options.replace_unknown:
        found = aligned_words(model, vocabulary, line, hypotheses, dictionary)
        texts = [_filled(text, own) for text, own in zip(texts, found, strict=True)]
    return texts


def _filled(text: str, copies: Sequence[str]) -> str:
    """The text with a copy in place of each `UNKNOWN`; an empty copy leaves it out."""
    left = iter(copies)
    words = (next(left) if word == UNKNOWN else word for word in text.split())
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Translator:
    """A model with its vocabulary, from one checkpoint or from several that vote.

    translator = load_translator(["model.pt"])
    lines = translator.prepare(["a small house"])
    translate_lines(translator.model, translator.vocabulary, lines, translator.decoding)
    """

    model: SearchModel
    """One model, or an `Ensemble`, in evaluation mode."""
    vocabulary: Vocabulary
    lowercase: bool
    """Whether the model was trained on lower-cased text: capitals are unknown to it."""
    decoding: DecodingOptions
    """How the recipe of the first checkpoint decodes."""
    tokenizer: str
    """sacrebleu's tokenizer for the target language."""
    tags: tuple[str, ...]
    """Those of the recipe's languages: each source begins with one. Empty for one language."""

    def prepare(self, lines: Sequence[str], language: str | None = None) -> list[str]:
        """The lines as the model expects them: lower-cased if it was trained on such text, and with
        the tag of ``language`` in front. A line without text is not changed.

        Raises:
            ValueError: the vocabulary has no tag of the language, a line has a tag already, or it
                has none where it needs one.
        """
        if self.lowercase:
            lines = [lower(line, self.vocabulary.tags) for line in lines]
        if language is None:
            for number, line in enumerate(lines, 1):
                if self.tags and line.strip() and split_tag(line)[0] not in self.tags:
                    raise ValueError(
                        f"line {number} begins with {line.split()[0]!r}: expected --language, or "
                        f"one of the tags {', '.join(self.tags)} in front of every line"
                    )
            return list(lines)
        known = ", ".join(tag.strip("<>") for tag in self.vocabulary.tags) or "none"
        if tag_of(language) not in self.vocabulary.tags:
            raise ValueError(
                f"language: expected a language of the checkpoint ({known}), got {language!r}"
            )
        for number, line in enumerate(lines, 1):
            own, _ = split_tag(line)
            if own in self.vocabulary.tags:
                raise ValueError(
                    f"language: expected lines without a tag, got {own} in front of line {number}"
                )
        return [f"{tag_of(language)} {line}" if line.strip() else line for line in lines]

    def prepare_references(self, references: Sequence[str]) -> list[str]:
        """References as training's BLEU has them: lower-cased where the model's text was."""
        return [line.lower() for line in references] if self.lowercase else list(references)


def load_translator(paths: Sequence[Any], device: torch.device | str | None = None) -> Translator:
    """The model of one checkpoint, or of several as one whose members vote.

    Args:
        paths: checkpoints, all of one vocabulary.
        device: where the model is to run; None: a GPU if there is one, else the CPU.

    Raises:
        ValueError: a checkpoint that cannot be read, or checkpoints of different vocabularies.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    contents = [load_checkpoint(path) for path in paths]
    first, models = contents[0], []
    for path, content in zip(paths, contents, strict=True):
        models.append(model_of(path, content, device))
        if content["vocabulary"] != first["vocabulary"]:
            raise ValueError(
                f"{path}: expected the vocabulary of {paths[0]}, got another one: models that "
                "translate together share theirs"
            )
    section = first["recipe"].get("data", {})
    languages = section.get("languages") or section.get("phrases") or ()
    return Translator(
        model=models[0] if len(models) == 1 else Ensemble(models),
        vocabulary=Vocabulary.from_bytes(first["vocabulary"]),
        lowercase=section.get("lowercase", False),
        decoding=DecodingOptions.of_recipe(first["recipe"]),
        tokenizer=tokenizer_of(section.get("target_language")),
        tags=tuple(map(tag_of, languages)) if len(languages) > 1 else (),
    )
