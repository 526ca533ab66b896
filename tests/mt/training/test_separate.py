"""Source and target with vocabularies of their own: training, resuming, translating."""

import pickle

import pytest
import torch

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import (
    SeparateVocabularies,
    TokenVocabulary,
    Vocabulary,
    read_vocabulary,
    subwords,
)
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.training import RecipeError, recipe_from_dict, train

SEPARATE = {"data.vocab_size": 50, "data.target_vocab_size": 60}
LSTM = {"kind": "fast_forward_lstm", "dim": 12, "embedding_dim": 8, "encoder_layers": 1,
        "decoder_layers": 1}  # fmt: skip


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


@pytest.mark.parametrize("model", [{}, {"share_embeddings": "none"}, LSTM], ids=str)
def test_trains_resumes_and_translates(make_recipe, corpus, sides, tmp_path, capsys, model):
    def recipe(**changes):
        tree = make_recipe(SEPARATE | {k.replace("_", ".", 1): v for k, v in changes.items()})
        tree = tree.to_dict()
        own = model if model.get("kind") else tree["model"] | model
        return recipe_from_dict(tree | {"model": own})

    straight = train(recipe(train_max_steps=8))
    broken = {"output": str(tmp_path / "broken")}
    train(recipe(**broken, train_max_steps=4))
    resumed = train(recipe(**broken, train_max_steps=8, resume=True))
    one, other = (read_checkpoint(r.checkpoint) for r in (straight, resumed))
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name]), name
    found, vocabulary = load_model(straight.for_translation)
    assert (found.config.vocab_size, found.config.target_vocab_size) == (50, 60)
    assert read_vocabulary(vocabulary) == SeparateVocabularies(*sides)
    files = ["--source", str(corpus / "test.en"), "--reference", str(corpus / "test.de")]
    arguments = ["--checkpoint", str(straight.for_translation), *files, "--replace-unknown"]
    assert main(["score", *arguments, "--device", "cpu"]) == 0
    assert "chrF" in capsys.readouterr().out


def test_ready_vocabularies(make_recipe, sides, tmp_path):
    SeparateVocabularies(*sides).save(tmp_path / "vocabulary.model")
    paths = {"data.vocabulary": str(tmp_path / "source.model"),
             "data.target_vocabulary": str(tmp_path / "target.model")}  # fmt: skip
    result = train(make_recipe(paths | {"train.max_steps": 2}))
    assert read_vocabulary(load_model(result.checkpoint)[1]) == SeparateVocabularies(*sides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.target_vocab_size": 3}, "data.target_vocab_size: expected more than 4 pieces"),
        ({"data.target_vocabulary": "x"}, "null without data.vocabulary"),
        ({"data.vocabulary": "x"} | SEPARATE, "data.target_vocab_size: expected null beside"),
        (
            SEPARATE | {"model.share_embeddings": "all"},
            "model.share_embeddings: expected decoder or none",
        ),
    ],
)
def test_refused_with_a_sentence(make_recipe, changes, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(changes)
