"""Source and target with vocabularies of their own: learned or ready, and to translate with."""

import pickle

import pytest

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import SeparateVocabularies, Vocabulary
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import train


@pytest.fixture
def sides(corpus):
    """The vocabularies of the two languages, each learned alone."""
    texts = [(corpus / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    return tuple(map(Vocabulary.train, texts, (50, 60)))


def test_each_side_has_its_own_pieces(sides, corpus):
    (source, target), both = sides, SeparateVocabularies(*sides)
    pair = [(corpus / f"dev.{side}").read_text("utf-8").split("\n")[0] for side in ("en", "de")]
    assert both.encode_pairs([pair]) == [(source.encode(pair[0]), target.encode(pair[1]))]
    assert both.decode(target.encode(pair[1])) == pair[1]
    assert both.words(pair[0]) == source.words(pair[0])
    assert (len(both), both.target_size, source.target) == (50, 60, source)
    content = both.to_bytes()
    for copy in (Vocabulary.from_bytes(content), pickle.loads(pickle.dumps(both))):
        assert (copy, hash(copy), copy.target) == (both, hash(both), target)
        assert copy.fingerprint() == both.fingerprint() != source.fingerprint()
    assert both not in (source, SeparateVocabularies(target, source))
    with pytest.raises(DataError, match="vocabulary: "):
        Vocabulary.from_bytes(content[:-40])


@pytest.mark.parametrize("ready", [False, True])
def test_trains_and_translates(make_recipe, corpus, sides, tmp_path, capsys, ready):
    both = SeparateVocabularies(*sides)
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
