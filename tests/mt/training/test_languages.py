"""Several languages in one run, latent depth for each of them, from recipe to pruned checkpoint;
and source and target with vocabularies of their own."""

import re

import pytest
import torch

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import Vocabulary
from deepfast.mt.models.checkpoint import load_checkpoint, load_model, save_checkpoint
from deepfast.mt.search import load_translator
from deepfast.mt.training import train
from deepfast.mt.training.corpus import by_language, load_corpus
from deepfast.mt.training.sections import DataSection
from tests.mt.training.runs import rows

PARTS = ("train", "dev", "test")
NO_FILES = {f"data.{part}_{side}": None for part in PARTS for side in ("source", "target")}
PHRASES = NO_FILES | {
    "data.phrases": "de,fr",
    "data.train_size": 60,
    "data.dev_size": 5,
    "data.test_size": 5,
    "data.vocab_size": 120,
    "train.max_steps": 5,
}
LATENT = {
    "model.decoder_layers": 4,
    "model.decoder_connection": "latent",
    "model.latent": {"hard": True, "soft_steps": 3, "prior": "mean", "kl_weight": 0.1},
}


@pytest.fixture
def corpus_of(make_recipe, tmp_path):
    """corpus_of(sources, targets, changes): that of a recipe with these lines as all parts."""

    def load(sources, targets, changes):
        for name, lines in (("source", sources), ("target", targets)):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        files = {key: str(tmp_path / key.rpartition("_")[2]) for key in NO_FILES}
        recipe = make_recipe(files | {"data.vocab_at_most": True} | changes)
        return load_corpus(recipe.data, seed=1, folder=tmp_path)

    return load


def test_phrases_of_several_languages_and_of_one(tmp_path):
    def corpus(phrases, direction):
        section = DataSection(
            phrases=phrases, direction=direction, train_size=30, dev_size=6, test_size=6,
            vocab_size=200, vocab_at_most=True, max_tokens=90, max_length=80,
        )  # fmt: skip
        return load_corpus(section, seed=1, folder=tmp_path)

    directions = ("one-to-many", "many-to-one")
    for number, direction in enumerate(directions):
        both = corpus("de,fr", direction)
        assert both.languages == {"de": 4, "fr": 5}
        assert len(both.batches.pairs) == 60
        parts = by_language(both.test)
        assert {name: len(own) for name, own in parts.items()} == {"de": 6, "fr": 6}
        for batch in (*both.batches, *both.dev_batches):
            assert len(batch.source_BS[:, 0].unique()) == 1
        files = [(tmp_path / "phrases" / f"test.{side}").read_text("utf-8").splitlines()
                 for side in ("source", "target")]  # fmt: skip
        assert both.test == list(zip(*files, strict=True))
        assert [source.split()[0] for source in files[0]] == ["<de>"] * 6 + ["<fr>"] * 6
        assert not any(set("éèüß") & set(line) for line in files[number])
    # One language has no tags.
    one, turned = (corpus("de", direction) for direction in directions)
    assert one.languages == one.vocabulary.tags == {}
    assert one.test == [(source, target) for target, source in turned.test]


def test_tags_in_the_text_and_in_a_ready_vocabulary(corpus_of, tmp_path):
    sources, targets = ["<xx> a house", "<de> a house"] * 9, ["a house", "ein Haus"] * 9
    corpus_of(sources, targets, {}).vocabulary.save(tmp_path / "plain")
    (tmp_path / "bad").write_text("\n".join([*sources[:6], "a house", *sources[7:]]))
    for key, name, told in (
        ("vocabulary", "plain", "got one without <de>, <xx>: learn one"),
        *((f"{part}_source", "bad", f"{part} text, .*bad:7: expected a source that begins with")
          for part in PARTS),
    ):  # fmt: skip
        changes = {"data.languages": "de,xx", f"data.{key}": str(tmp_path / name)}
        with pytest.raises(DataError, match=told):
            corpus_of(sources, targets, changes)


def test_lower_case_leaves_the_tags_as_they_are(corpus_of):
    sources = ["<zh-CN> The Old Bridge", "<fr> A <B> HOUSE"] * 4
    changes = {"data.languages": "zh-CN,fr", "data.lowercase": True}
    corpus = corpus_of(sources, ["Brücke", "Haus"] * 4, changes)
    assert corpus.languages == {"zh-CN": 4, "fr": 5}
    # A tag that the vocabulary does not have is text.
    assert corpus.test[:2] == [("<zh-CN> the old bridge", "brücke"), ("<fr> a <b> house", "haus")]


def test_any_model_of_several_languages_needs_a_tag_to_translate(run):
    translator = load_translator([run(PHRASES | {"train.max_steps": 1}).average], "cpu")
    assert translator.prepare(["<fr> a", "", " <de> b"]) == ["<fr> a", "", " <de> b"]
    for line in ("a", "<it> a"):
        with pytest.raises(ValueError, match=f"line 2 begins with '{line.split()[0]}': expected"):
            translator.prepare(["<fr> a", line])


def test_bleu_of_each_language_and_the_same_text_from_a_pruned_checkpoint(
    make_recipe, tmp_path, capsys
):
    more = {"train.test_bleu": True, "train.validate_bleu": True}
    result = train(make_recipe(PHRASES | LATENT | more))
    for row in (rows(result.output, "test")[0], rows(result.output, "valid")[0]):
        assert row["bleu"] == pytest.approx((row["bleu_de"] + row["bleu_fr"]) / 2)
    assert re.search("decoder depth .* test BLEU .*, de ", capsys.readouterr().out, re.DOTALL)

    # Set by hand, because 5 steps are too few to decide: layers 0 and 2 for de.
    content = load_checkpoint(result.checkpoint)
    content["model"]["decoder.latent.logits"] = torch.tensor([[1.0, -1, 1, -1], [1.0, 1, -1, -1]])
    whole, small, english = (str(tmp_path / n) for n in ("whole.pt", "small.pt", "test.en"))
    save_checkpoint(whole, content)
    assert main(["mt", "prune", whole, "--language", "de", "--output", small]) == 0
    said = capsys.readouterr().out
    assert "decoder: 2 of 4 layers" in said
    assert said.endswith(f"to translate: deepfast mt translate {small} --language de < FILE\n")
    (tmp_path / "test.en").write_text("the old bridge\n\nthe house\n")
    outputs = []
    for checkpoint in (whole, small):
        options = ["--language", "de", "--beam", "2", "--max-length", "8", "--device", "cpu"]
        assert main(["mt", "translate", checkpoint, "--input", english, *options]) == 0
        outputs.append(capsys.readouterr().out.split("\n"))
    assert outputs[0] == outputs[1]
    assert (len(outputs[0]), outputs[0][1]) == (4, "")


@pytest.mark.parametrize("ready", [False, True])
def test_a_vocabulary_for_each_side(run, corpus, tmp_path, capsys, ready):
    """Learned or ready, and to translate with."""
    texts = [(corpus / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    source, target = map(Vocabulary.train, texts, (50, 60))
    both = source.with_target(target)
    both.save(tmp_path / "vocabulary.model")
    changes = {"data.vocab_size": 50, "data.target_vocab_size": 60}
    if ready:
        changes = {"data.vocabulary": str(tmp_path / "source.model"),
                   "data.target_vocabulary": str(tmp_path / "target.model")}  # fmt: skip
    path = run(changes | {"train.max_steps": 2, "model.share_embeddings": "none"}).for_translation
    found, vocabulary = load_model(path)
    assert (found.config.vocab_size, found.config.target_vocab_size) == (50, 60)
    assert Vocabulary.from_bytes(vocabulary) == both
    files = ["--source", str(corpus / "test.en"), "--reference", str(corpus / "test.de")]
    options = ["--replace-unknown", "--max-length", "9", "--device", "cpu"]
    assert main(["mt", "score", "--checkpoint", str(path), *files, *options]) == 0
    assert "chrF" in capsys.readouterr().out
