"""From lines of text to translations, with a model and its vocabulary or with checkpoints."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deepfast.mt.data import Vocabulary, evaluation_batches, lower, restore_order, split_tag, tag_of
from deepfast.mt.data.posunk import MARK, read_translations, without_marks
from deepfast.mt.models.checkpoint import load_checkpoint, model_of
from deepfast.mt.models.interface import SearchModel, target_vocab_size
from deepfast.mt.search.beam import beam_search
from deepfast.mt.search.deep_shallow import Scored, candidates, check_grown, ranked
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

    def decode(source_BS: Tensor) -> list[list[Scored]]:
        if options.deep_shallow:
            found = candidates(check_grown(model), source_BS, options)
            return [ranked(own, options.alpha, options.gamma)[: options.nbest] for own in found]
        best = beam_search(model, source_BS, options)
        return [[(h.score, h.tokens) for h in own] for own in best]

    found = decode_lines(model, vocabulary, lines, decode, max_tokens=options.max_tokens)
    dictionary = {} if options.dictionary is None else read_translations(options.dictionary)
    results = []
    for line, best in zip(lines, found, strict=True):
        scores, tokens = zip(*(best or [(0.0, ())]), strict=True)
        texts = texts_of(model, vocabulary, line, tokens, options, dictionary)
        results.append([*map(Translation, scores, texts, tokens)])
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
    groups = []
    for index in filled:
        try:
            groups.append(model.group(encoded[index]))
        except ValueError as error:
            # The model's message shows ids; the user knows words.
            word = (lines[index].split() or [lines[index]])[0]
            raise ValueError(f"line {index + 1} begins with {word!r}: {error}") from error
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


def texts_of(
    model: SearchModel,
    vocabulary: Vocabulary,
    line: str,
    hypotheses: Sequence[Sequence[int]],
    options: DecodingOptions,
    dictionary: Mapping[str, str],
) -> list[str]:
    """The texts of a line's hypotheses, their marks and unks replaced as the options say."""
    texts = [
        vocabulary.decode(tokens, unknown=[UNKNOWN] * list(tokens).count(vocabulary.unk_id))
        if options.replace_unknown
        else vocabulary.decode(tokens)
        for tokens in hypotheses
    ]
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
    decodings: dict[str, DecodingOptions]
    """How the recipe of each checkpoint decodes, by the checkpoint's path."""
    tokenizer: str
    """sacrebleu's tokenizer for the target language."""

    @property
    def decoding(self) -> DecodingOptions:
        """How the recipe of the first checkpoint decodes."""
        return next(iter(self.decodings.values()))

    def prepare(self, lines: Sequence[str], language: str | None = None) -> list[str]:
        """The lines as the model expects them: lower-cased if it was trained on such text, and with
        the tag of ``language`` in front. A line without text is not changed.

        Raises:
            ValueError: a language that the model does not know, or a line that has a tag already.
        """
        if self.lowercase:
            lines = [lower(line, self.vocabulary.tags) for line in lines]
        if language is None:
            return list(lines)
        known = [tag.strip("<>") for tag in self.vocabulary.tags]
        for part in getattr(self.model, "models", (self.model,)):
            # A pruned model may know fewer languages than its vocabulary has tags.
            own = getattr(part.config, "languages", None) or known
            known = [name for name in known if name in own]
        if language not in known:
            raise ValueError(
                f"language: expected a language of the checkpoint ({', '.join(known) or 'none'}), "
                f"got {language!r}"
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

    def knows(self, references: Sequence[str]) -> list[bool]:
        """For every prepared reference, whether the model knows all its words: no word has a piece
        that is unknown on the target's side, or is a mark of `deepfast mt posunk`."""
        target = self.vocabulary.target
        return [
            target.unk_id not in target.encode(line) and not any(map(MARK.fullmatch, line.split()))
            for line in references
        ]


def load_translator(paths: Sequence[Any], device: torch.device | str | None = None) -> Translator:
    """The model of one checkpoint, or of several as one whose members vote.

    Args:
        paths: checkpoints, all of one vocabulary.
        device: where the model is to run; None: a GPU if there is one, else the CPU.

    Raises:
        ValueError: a checkpoint that cannot be read, or checkpoints of different vocabularies or of
            cased and lower-cased text.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    contents = [load_checkpoint(path) for path in paths]
    models = [
        model_of(path, content, device) for path, content in zip(paths, contents, strict=True)
    ]
    recipes = [content["recipe"] for content in contents]
    sections = [recipe.get("data", {}) for recipe in recipes]
    vocabularies = [content["vocabulary"] for content in contents]
    cases = [section.get("lowercase", False) for section in sections]
    for name, values in (("vocabulary", vocabularies), ("data.lowercase", cases)):
        for path, value in zip(paths, values, strict=True):
            if value != values[0]:
                raise ValueError(
                    f"{path}: expected the {name} of {paths[0]}, got another one: models that "
                    "translate together share theirs"
                )
    return Translator(
        model=models[0] if len(models) == 1 else Ensemble(models),
        vocabulary=Vocabulary.from_bytes(vocabularies[0]),
        lowercase=cases[0],
        decodings=dict(zip(map(str, paths), map(DecodingOptions.of_recipe, recipes), strict=True)),
        tokenizer=tokenizer_of(sections[0].get("target_language")),
    )
