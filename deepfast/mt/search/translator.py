"""A translator: a model and its vocabulary from one checkpoint, or from several that vote."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepfast import checks
from deepfast.mt.data import Vocabulary, lower, read_vocabulary, split_tag, tag_of
from deepfast.mt.data.posunk import MARK
from deepfast.mt.data.vocabulary import AnyVocabulary
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.ensemble import Ensemble

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Translator:
    """What `translate_all` and `tune_deep_shallow` need besides the lines.

    translator = load_translator(["model.pt"])
    lines = translator.prepare(["a small house"])
    translate_lines(translator.model, translator.vocabulary, lines)
    """

    model: SearchModel
    """One model, or an `Ensemble`, in evaluation mode."""
    vocabulary: AnyVocabulary
    lowercase: bool
    """Whether the model was trained on lower-cased text: capitals are unknown to it."""

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

    def knows(self, references: Sequence[str]) -> list[bool] | None:
        """For every reference, whether the model knows all its words: no word has a piece that is
        unknown on the target's side, or is a mark of `deepfast mt posunk`. None for a dictionary of
        tokens, which cannot split a text into them."""
        if not isinstance(self.vocabulary, Vocabulary):
            return None
        target = self.vocabulary.target
        lines = [line.lower() for line in references] if self.lowercase else references
        return [
            target.unk_id not in target.encode(line) and not any(map(MARK.fullmatch, line.split()))
            for line in lines
        ]

    @contextlib.contextmanager
    def precision(self, name: str) -> Iterator[None]:
        """Decodes in "float32", or in "bfloat16" by autocast."""
        checks.choice("translator", PRECISIONS, precision=name)
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=name == "bfloat16"):
            yield


def load_translator(paths: Sequence[Any], device: str | None = None) -> Translator:
    """The model of one checkpoint, or of several as one whose members vote.

    Args:
        paths: checkpoints, all of one vocabulary.
        device: "cpu", "cuda" or "cuda:1"; None: cuda if there is a GPU, else cpu.

    Raises:
        ValueError: a checkpoint that cannot be read, checkpoints of different vocabularies or of
            cased and lower-cased text, or a device that this machine does not have.
    """
    device = _device(device)
    loaded = [load_model(path, device) for path in paths]
    cased = [trained_lowercase(path) for path in paths]
    vocabulary, lowercase = loaded[0][1], cased[0]
    for path, (_, other), case in zip(paths, loaded, cased, strict=True):
        if other != vocabulary:
            raise ValueError(
                f"{path}: expected the vocabulary of {paths[0]}, got another one: models that "
                "translate together share theirs"
            )
        if case != lowercase:
            raise ValueError(
                f"{path}: expected a model of {'lower-cased' if lowercase else 'cased'} text as "
                f"{paths[0]} is, got one of {'cased' if lowercase else 'lower-cased'} text"
            )
    models = [model for model, _ in loaded]
    model = models[0] if len(models) == 1 else Ensemble(models)
    return Translator(model, read_vocabulary(vocabulary), lowercase)


def trained_lowercase(checkpoint: Any) -> bool:
    """Whether the recipe of a checkpoint lower-cases its text; False where there is no recipe."""
    recipe = read_checkpoint(checkpoint, optimizer=False).get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    return isinstance(data, dict) and bool(data.get("lowercase"))


def _device(name: str | None) -> str:
    here = torch.cuda.is_available()
    if name is None:
        return "cuda" if here else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name.startswith("cuda") and not here:
        raise ValueError(f"device: expected a device of this machine, got {name!r}: no GPU found")
    return name
