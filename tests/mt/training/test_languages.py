"""Several languages in one run, latent depth for each of them, from recipe to pruned checkpoint."""

import pytest
import torch

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.models.checkpoint import load_checkpoint, load_model, save_checkpoint
from deepfast.mt.search import load_translator
from deepfast.mt.training import train
from deepfast.mt.training.corpus import by_language, load_corpus
from deepfast.mt.training.sections import DataSection
from tests.mt.training.runs import rows

LATENT = {
    "data.languages": "de,xx",
    "model.decoder_layers": 4,
    "model.decoder_connection": "latent",
    "model.latent": {"hard": True, "soft_steps": 3, "prior": "mean", "kl_weight": 0.1},
    "train.log_every": 1,
    "train.max_steps": 8,
}


@pytest.fixture(scope="module")
def tagged(corpus, tmp_path_factory):
    """The corpus with a tag before every source: into xx, which is English, and into de."""
    folder = tmp_path_factory.mktemp("tagged")
    for part in ("train", "dev", "test"):
        sides = [(corpus / f"{part}.{s}").read_text("utf-8").splitlines() for s in ("en", "de")]
        rows = [
            (f"<{'xx' if i % 3 else 'de'}> {source}", source if i % 3 else target)
            for i, (source, target) in enumerate(zip(*sides, strict=True))
        ]
        for side, name in enumerate(("source", "target")):
            text = "".join(f"{row[side]}\n" for row in rows)
            (folder / f"{part}.{name}").write_text(text, "utf-8")
    return folder


@pytest.fixture
def latent_recipe(make_recipe, tagged):
    def make(changes=()):
        files = {
            f"data.{part}_{side}": str(tagged / f"{part}.{side}")
            for part in ("train", "dev", "test")
            for side in ("source", "target")
        }
        return make_recipe(LATENT | files | dict(changes))

    return make


@pytest.mark.parametrize("direction", ["one-to-many", "many-to-one"])
def test_phrases_of_several_languages(tmp_path, direction):
    section = DataSection(
        phrases="de,fr", direction=direction, train_size=30, dev_size=6, test_size=6,
        vocab_size=200, vocab_at_most=True, max_tokens=90, max_length=80,
    )  # fmt: skip
    corpus = load_corpus(section, seed=1, folder=tmp_path)
    assert corpus.languages == {"de": 4, "fr": 5}
    assert len(corpus.batches.pairs) == 60
    assert {name: len(own) for name, own in by_language(corpus.test).items()} == {"de": 6, "fr": 6}
    for batch in (*corpus.batches, *corpus.dev_batches):
        assert len(batch.source_BS[:, 0].unique()) == 1
    files = [(tmp_path / "phrases" / f"test.{side}").read_text("utf-8").splitlines()
             for side in ("source", "target")]  # fmt: skip
    assert corpus.test == list(zip(*files, strict=True))
    assert [source.split()[0] for source in files[0]] == ["<de>"] * 6 + ["<fr>"] * 6
    english = files[direction == "many-to-one"]
    assert not any(set("éèüß") & set(line) for line in english)


def test_one_language_has_no_tags(tmp_path):
    sizes = {"train_size": 20, "dev_size": 2, "test_size": 2, "vocab_at_most": True}
    english, turned = (
        load_corpus(DataSection(phrases="de", direction=d, **sizes), seed=1, folder=tmp_path / d)
        for d in ("one-to-many", "many-to-one")
    )
    assert english.languages == {}
    assert english.vocabulary.tags == {}
    assert english.test == [(source, target) for target, source in turned.test]


@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_a_line_without_a_tag_is_named(latent_recipe, tagged, tmp_path, part):
    lines = (tagged / f"{part}.source").read_text().splitlines()
    lines[6] = lines[6].removeprefix("<de> ")
    path = tmp_path / f"{part}.source"
    path.write_text("\n".join(lines) + "\n")
    recipe = latent_recipe({f"data.{part}_source": str(path)})
    with pytest.raises(DataError, match=rf"{part}\.source:7: expected a source that begins with"):
        load_corpus(recipe.data, seed=1, folder=tmp_path)


def test_any_model_of_several_languages_needs_a_tag_to_translate(latent_recipe):
    plain = {"model.decoder_connection": "residual", "model.latent": None, "train.max_steps": 1}
    recipe = latent_recipe(plain)
    translator = load_translator([train(recipe, quiet=True).average], "cpu")
    assert translator.prepare(["<xx> a", "", " <de> b"]) == ["<xx> a", "", " <de> b"]
    for line in ("a", "<fr> a"):
        with pytest.raises(ValueError, match=f"line 2 begins with '{line.split()[0]}': expected"):
            translator.prepare(["<xx> a", line])


def test_lower_case_leaves_the_tags_as_they_are(make_recipe, tmp_path):
    (tmp_path / "source").write_text("<zh-CN> The Old Bridge\n<fr> A <B> HOUSE\n" * 4)
    (tmp_path / "target").write_text("Brücke\nHaus\n" * 4)
    files = {f"data.{part}_{side}": str(tmp_path / side) for part in ("train", "dev", "test")
             for side in ("source", "target")}  # fmt: skip
    more = {"data.languages": "zh-CN,fr", "data.lowercase": True, "data.vocab_at_most": True}
    corpus = load_corpus(make_recipe(files | more).data, seed=1, folder=tmp_path)
    assert corpus.languages == {"zh-CN": 4, "fr": 5}
    # A tag that the vocabulary does not have is text.
    assert corpus.test[:2] == [("<zh-CN> the old bridge", "brücke"), ("<fr> a <b> house", "haus")]


def test_a_ready_vocabulary_needs_the_tags(latent_recipe, make_recipe, tmp_path):
    plain = load_corpus(make_recipe().data, seed=1, folder=tmp_path).vocabulary
    plain.save(tmp_path / "plain.model")
    recipe = latent_recipe({"data.vocabulary": str(tmp_path / "plain.model")})
    with pytest.raises(DataError, match="got one without <de>, <xx>: learn one"):
        load_corpus(recipe.data, seed=1, folder=tmp_path)


def test_bleu_of_each_language_and_the_same_text_from_a_pruned_checkpoint(
    latent_recipe, tagged, tmp_path, capsys
):
    recipe = latent_recipe({"train.test_bleu": True, "train.validate_bleu": True,
                            "train.validate_every": 8})  # fmt: skip
    result = train(recipe)
    for row in (rows(result.output, "test")[0], rows(result.output, "valid")[0]):
        assert row["bleu"] == pytest.approx((row["bleu_de"] + row["bleu_xx"]) / 2)
    said = capsys.readouterr().out
    assert "decoder depth " in said
    assert "test BLEU " in said
    assert ", de " in said

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
    lines = (tagged / "test.source").read_text().splitlines()
    (tmp_path / "test.en").write_text("".join(line.partition(" ")[2] + "\n\n" for line in lines))
    outputs = []
    for checkpoint in (whole, small):
        options = ["--language", "de", "--beam", "2", "--max-length", "8", "--device", "cpu"]
        assert main(["mt", "translate", checkpoint, "--input", english, *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].split("\n")) == 2 * len(lines) + 1
    assert outputs[0].split("\n")[1] == ""
    # The smaller model is for one language: it refuses the other's tag like a missing tag.
    other = str(tmp_path / "other.en")
    for first, language, sentence in (
        ("<xx> a", [], "line 3 begins with '<xx>': expected a source sentence that begins with the "
         "tag of one of the languages de, got none of them"),
        ("a", ["--language", "de"], "expected lines without a tag, got <de> in front of"),
    ):  # fmt: skip
        (tmp_path / "other.en").write_text(f"<de> house\n\n{first}\n")
        assert main(["mt", "translate", small, "--input", other, *language]) == 1
        assert sentence in capsys.readouterr().err


def test_a_budget_of_memory(latent_recipe):
    result = train(latent_recipe({"memory_budget": "1GiB", "train.max_steps": 2}), quiet=True)
    assert rows(result.output, "memory")[0]["policies"]
