"""Source and target with vocabularies of their own: training, resuming, translating."""

import pickle

import pytest

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import (
    SeparateVocabularies,
    TokenVocabulary,
    Vocabulary,
    read_vocabulary,
    subwords,
)
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import train


def lines(path):
    return path.read_text("utf-8").splitlines()


@pytest.fixture
def sides(corpus):
    """The vocabularies of the two languages, each learned alone."""
    return (Vocabulary.train(lines(corpus / "train.en"), 50),
            Vocabulary.train(lines(corpus / "train.de"), 60))  # fmt: skip


def test_each_side_has_its_own_pieces(sides, corpus, tmp_path):
    source, target = sides
    both = SeparateVocabularies(source, target)
    pair = lines(corpus / "dev.en")[0], lines(corpus / "dev.de")[0]
    assert both.encode_pairs([pair]) == [(source.encode(pair[0]), target.encode(pair[1]))]
    assert both.decode(target.encode(pair[1])) == pair[1]
    assert both.words(pair[0]) == source.words(pair[0])
    assert (len(both), both.target_size, both.target) == (50, 60, target)
    assert source.target is source
    for copy in (read_vocabulary(both.to_bytes()), pickle.loads(pickle.dumps(both))):
        assert copy == both
        assert hash(copy) == hash(both)
        assert copy.fingerprint() == both.fingerprint() != source.fingerprint()
        assert copy.target == target
    assert both != source
    assert both != SeparateVocabularies(target, source)
    both.save(tmp_path / "vocabulary.model")
    saved = [Vocabulary.load(tmp_path / f"{side}.model") for side in ("source", "target")]
    assert saved == list(sides)


def test_other_content_is_refused(sides):
    content = SeparateVocabularies(*sides).to_bytes()
    with pytest.raises(DataError, match="vocabulary: "):
        read_vocabulary(content[:-40])
    with pytest.raises(DataError, match="expected sentencepiece models, got a dictionary"):
        subwords(TokenVocabulary(["a"]).to_bytes())


def test_trains_and_translates(make_recipe, corpus, sides, capsys):
    sizes = {"data.vocab_size": 50, "data.target_vocab_size": 60, "train.max_steps": 2}
    result = train(make_recipe(sizes | {"model.share_embeddings": "none"}))
    assert "vocabulary 50 and 60 pieces, " in capsys.readouterr().out
    found, vocabulary = load_model(result.for_translation)
    assert (found.config.vocab_size, found.config.target_vocab_size) == (50, 60)
    assert read_vocabulary(vocabulary) == SeparateVocabularies(*sides)
    files = ["--source", str(corpus / "test.en"), "--reference", str(corpus / "test.de")]
    options = ["--replace-unknown", "--max-length", "9", "--device", "cpu"]
    assert main(["mt", "score", "--checkpoint", str(result.for_translation), *files, *options]) == 0
    assert "chrF" in capsys.readouterr().out


def test_ready_vocabularies(make_recipe, sides, tmp_path):
    SeparateVocabularies(*sides).save(tmp_path / "vocabulary.model")
    paths = {"data.vocabulary": str(tmp_path / "source.model"),
             "data.target_vocabulary": str(tmp_path / "target.model")}  # fmt: skip
    result = train(make_recipe(paths | {"train.max_steps": 2}))
    assert read_vocabulary(load_model(result.checkpoint)[1]) == SeparateVocabularies(*sides)
