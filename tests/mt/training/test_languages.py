"""Several languages in one run, latent depth for each of them, from recipe to pruned checkpoint;
and source and target with vocabularies of their own."""

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
from tests.mt.words import reversed_pairs, write_pairs

LATENT = {
    "data.languages": "de,xx",
    "model.decoder_layers": 4,
    "model.decoder_connection": "latent",
    "model.latent": {"hard": True, "soft_steps": 3, "prior": "mean", "kl_weight": 0.1},
    "train.log_every": 1,
    "train.max_steps": 8,
}


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A folder with text that has a tag before every source: into xx, which is the source's own
    language, and into de."""
    folder = tmp_path_factory.mktemp("tagged")
    for seed, (part, count) in enumerate((("train", 240), ("dev", 20), ("test", 10))):
        rows = enumerate(reversed_pairs(count, seed))
        write_pairs(folder, part, [
            (["<xx>", *source], source) if i % 3 else (["<de>", *source], target)
            for i, (source, target) in rows
        ])  # fmt: skip
    return folder


@pytest.fixture
def latent_recipe(make_recipe, tagged):
    def make(changes=()):
        files = {f"data.{part}_{side}": str(tagged / f"{part}.{name}")
                 for part in ("train", "dev", "test")
                 for side, name in (("source", "en"), ("target", "de"))}  # fmt: skip
        return make_recipe(LATENT | files | dict(changes))

    return make


@pytest.mark.parametrize("direction", ["one-to-many", "many-to-one"])
def test_phrases_of_several_languages_and_of_one(tmp_path, direction):
    def corpus(phrases, direction, folder):
        section = DataSection(
            phrases=phrases, direction=direction, train_size=30, dev_size=6, test_size=6,
            vocab_size=200, vocab_at_most=True, max_tokens=90, max_length=80,
        )  # fmt: skip
        return load_corpus(section, seed=1, folder=tmp_path / folder)

    both = corpus("de,fr", direction, "both")
    assert both.languages == {"de": 4, "fr": 5}
    assert len(both.batches.pairs) == 60
    assert {name: len(own) for name, own in by_language(both.test).items()} == {"de": 6, "fr": 6}
    for batch in (*both.batches, *both.dev_batches):
        assert len(batch.source_BS[:, 0].unique()) == 1
    files = [(tmp_path / "both" / "phrases" / f"test.{side}").read_text("utf-8").splitlines()
             for side in ("source", "target")]  # fmt: skip
    assert both.test == list(zip(*files, strict=True))
    assert [source.split()[0] for source in files[0]] == ["<de>"] * 6 + ["<fr>"] * 6
    english = files[direction == "many-to-one"]
    assert not any(set("éèüß") & set(line) for line in english)
    # One language has no tags.
    one, turned = (corpus("de", name, name) for name in ("one-to-many", "many-to-one"))
    assert one.languages == one.vocabulary.tags == {}
    assert one.test == [(source, target) for target, source in turned.test]


def test_tags_in_the_text_and_in_a_ready_vocabulary(latent_recipe, make_recipe, tagged, tmp_path):
    load_corpus(make_recipe().data, seed=1, folder=tmp_path).vocabulary.save(tmp_path / "plain")
    cases = [("vocabulary", tmp_path / "plain", "got one without <de>, <xx>: learn one")]
    for part in ("train", "dev", "test"):
        lines = (tagged / f"{part}.en").read_text().splitlines()
        lines[6] = lines[6].removeprefix("<de> ")
        path = tmp_path / f"{part}.en"
        path.write_text("\n".join(lines) + "\n")
        cases.append((f"{part}_source", path, rf"{part}\.en:7: expected a source that begins with"))
    for key, value, told in cases:
        with pytest.raises(DataError, match=told):
            load_corpus(latent_recipe({f"data.{key}": str(value)}).data, seed=1, folder=tmp_path)


def test_any_model_of_several_languages_needs_a_tag_to_translate(latent_recipe):
    plain = {"model.decoder_connection": "residual", "model.latent": None, "train.max_steps": 1}
    recipe = latent_recipe(plain)
    translator = load_translator([train(recipe, quiet=True).average], "cpu")
    assert translator.prepare(["<xx> a", "", " <de> b"]) == ["<xx> a", "", " <de> b"]
    for line in ("a", "<fr> a"):
        with pytest.raises(ValueError, match=f"line 2 begins with '{line.split()[0]}': expected"):
            translator.prepare(["<xx> a", line])


def test_lower_case_leaves_the_tags_as_they_are(latent_recipe, tmp_path):
    (tmp_path / "source").write_text("<zh-CN> The Old Bridge\n<fr> A <B> HOUSE\n" * 4)
    (tmp_path / "target").write_text("Brücke\nHaus\n" * 4)
    files = {f"data.{part}_{side}": str(tmp_path / side) for part in ("train", "dev", "test")
             for side in ("source", "target")}  # fmt: skip
    more = {"data.languages": "zh-CN,fr", "data.lowercase": True, "data.vocab_at_most": True}
    corpus = load_corpus(latent_recipe(files | more).data, seed=1, folder=tmp_path)
    assert corpus.languages == {"zh-CN": 4, "fr": 5}
    # A tag that the vocabulary does not have is text.
    assert corpus.test[:2] == [("<zh-CN> the old bridge", "brücke"), ("<fr> a <b> house", "haus")]


def test_bleu_of_each_language_and_the_same_text_from_a_pruned_checkpoint(
    latent_recipe, tagged, tmp_path, capsys
):
    recipe = latent_recipe({"train.test_bleu": True, "train.validate_bleu": True,
                            "train.validate_every": 8, "memory_budget": "1GiB"})  # fmt: skip
    result = train(recipe)
    for row in (rows(result.output, "test")[0], rows(result.output, "valid")[0]):
        assert row["bleu"] == pytest.approx((row["bleu_de"] + row["bleu_xx"]) / 2)
    assert rows(result.output, "memory")[0]["policies"]
    said = capsys.readouterr().out
    for part in ("decoder depth ", "test BLEU ", ", de "):
        assert part in said

    # Set by hand, because 8 steps are too few to decide: layers 0 and 2 for de.
    content = load_checkpoint(result.checkpoint)
    content["model"]["decoder.latent.logits"] = torch.tensor([[1.0, -1, 1, -1], [1.0, 1, -1, -1]])
    whole, small, english = (str(tmp_path / n) for n in ("whole.pt", "small.pt", "test.en"))
    save_checkpoint(whole, content)
    assert main(["mt", "prune", whole, "--language", "de", "--output", small]) == 0
    said = capsys.readouterr().out
    assert "decoder: 2 of 4 layers" in said
    assert said.endswith(f"to translate: deepfast mt translate {small} --language de < FILE\n")
    assert load_model(small)[0].config.decoder_connection == "residual"
    lines = (tagged / "test.en").read_text().splitlines()
    (tmp_path / "test.en").write_text("".join(line.partition(" ")[2] + "\n\n" for line in lines))
    outputs = []
    for checkpoint in (whole, small):
        options = ["--language", "de", "--beam", "2", "--max-length", "8", "--device", "cpu"]
        assert main(["mt", "translate", checkpoint, "--input", english, *options]) == 0
        outputs.append(capsys.readouterr().out.split("\n"))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 2 * len(lines) + 1
    assert outputs[0][1] == ""
    # The smaller model is for one language: it refuses the other's tag.
    (tmp_path / "other.en").write_text("<de> house\n\n<xx> a\n")
    assert main(["mt", "translate", small, "--input", str(tmp_path / "other.en")]) == 1
    said = capsys.readouterr().err
    assert "line 3 begins with '<xx>': expected a source sentence that begins with the tag" in said
    assert main(["mt", "translate", small, "--input", english, "--language", "xx"]) == 1


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
