"""Source and target with vocabularies of their own: learned or ready, and to translate with."""

import pytest

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import train


@pytest.fixture
def sides(corpus):
    """The vocabularies of the two languages, each learned alone."""
    texts = [(corpus / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    return tuple(map(Vocabulary.train, texts, (50, 60)))


@pytest.mark.parametrize("ready", [False, True])
def test_trains_and_translates(make_recipe, corpus, sides, tmp_path, capsys, ready):
    both = sides[0].with_target(sides[1])
    both.save(tmp_path / "vocabulary.model")
    changes = {"data.vocab_size": 50, "data.target_vocab_size": 60}
    if ready:
        changes = {"data.vocabulary": str(tmp_path / "source.model"),
                   "data.target_vocabulary": str(tmp_path / "target.model")}  # fmt: skip
    changes |= {"train.max_steps": 2, "model.share_embeddings": "none"}
    result = train(make_recipe(changes))
    assert "vocabulary 50 and 60 pieces, " in capsys.readouterr().out
    found, vocabulary = load_model(result.for_translation)
    assert (found.config.vocab_size, found.config.target_vocab_size) == (50, 60)
    assert Vocabulary.from_bytes(vocabulary) == both
    files = ["--source", str(corpus / "test.en"), "--reference", str(corpus / "test.de")]
    options = ["--replace-unknown", "--max-length", "9", "--device", "cpu"]
    assert main(["mt", "score", "--checkpoint", str(result.for_translation), *files, *options]) == 0
    assert "chrF" in capsys.readouterr().out
