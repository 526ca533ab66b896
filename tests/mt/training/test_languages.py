"""Several languages in one run, latent depth for each of them, from recipe to pruned checkpoint."""

import json

import pytest
import torch

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import lower
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import (
    RecipeError,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    train,
)
from deepfast.mt.training.corpus import by_language, load_corpus
from deepfast.mt.training.sections import DataSection

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


def rows(output, event):
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["event"] == event]


# ---- the text ------------------------------------------------------------------------------------


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
    files = [(tmp_path / "phrases" / "en-fr" / f"test.{s}").read_text().splitlines()
             for s in ("en", "fr")]  # fmt: skip
    pairs = [corpus.test[i] for i in by_language(corpus.test)["fr"]]
    turned = files[::-1] if direction == "many-to-one" else files
    assert pairs == [(f"<fr> {source}", target) for source, target in zip(*turned, strict=True)]


def test_one_language_has_no_tags(tmp_path):
    sizes = {"train_size": 20, "dev_size": 2, "test_size": 2, "vocab_at_most": True}
    english, turned = (
        load_corpus(DataSection(phrases="de", direction=d, **sizes), seed=1, folder=tmp_path / d)
        for d in ("one-to-many", "many-to-one")
    )
    assert english.languages == {}
    assert english.vocabulary.tags == {}
    assert english.test == [(source, target) for target, source in turned.test]


def test_a_line_without_a_tag_is_named(latent_recipe, tagged, tmp_path):
    lines = (tagged / "train.source").read_text().splitlines()
    lines[6] = lines[6].removeprefix("<de> ")
    path = tmp_path / "train.source"
    path.write_text("\n".join(lines) + "\n")
    recipe = latent_recipe({"data.train_source": str(path)})
    with pytest.raises(DataError, match=r"train\.source:7: expected a source that begins with"):
        load_corpus(recipe.data, seed=1, folder=tmp_path)


def test_lower_case_leaves_the_tags_as_they_are(make_recipe, tmp_path):
    sources = ["<zh-CN> The Old Bridge", "<fr> A Small HOUSE"] * 4
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in sources))
    (tmp_path / "target").write_text("Brücke\nHaus\n" * 4)
    files = {f"data.{part}_{side}": str(tmp_path / side) for part in ("train", "dev", "test")
             for side in ("source", "target")}  # fmt: skip
    recipe = make_recipe(files | {"data.languages": "zh-CN,fr", "data.lowercase": True,
                                  "data.vocab_at_most": True})  # fmt: skip
    corpus = load_corpus(recipe.data, seed=1, folder=tmp_path)
    assert corpus.languages == {"zh-CN": 4, "fr": 5}
    assert corpus.test[:2] == [("<zh-CN> the old bridge", "brücke"), ("<fr> a small house", "haus")]
    assert lower(sources[0], ["<zh-CN>"]) == "<zh-CN> the old bridge"
    # A tag that the vocabulary does not have is text.
    assert lower("<B> Bold", ["<zh-CN>"]) == "<b> bold"


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (["de"], "expected two or more languages or null, got ['de']"),
        (["de", "de"], "expected each language once, got ['de', 'de']"),
        (["de x", "fr"], "expected names such as de or zh-CN, got 'de x'"),
        (["<de>", "fr"], "expected names such as de or zh-CN, got '<de>'"),
        (["de", "s"], "expected names such as de or zh-CN, got 's'"),
        ("de,,fr", "expected names such as de or zh-CN, got ''"),
    ],
)
def test_names_of_languages_that_cannot_be_tags(languages, message):
    with pytest.raises(RecipeError) as error:
        DataSection(languages=languages, train_source="a", train_target="b")
    assert str(error.value) == f"data.languages: {message}"


def test_a_ready_vocabulary_needs_the_tags(latent_recipe, make_recipe, tmp_path):
    plain = load_corpus(make_recipe().data, seed=1, folder=tmp_path).vocabulary
    plain.save(tmp_path / "plain.model")
    recipe = latent_recipe({"data.vocabulary": str(tmp_path / "plain.model")})
    with pytest.raises(DataError, match="got one without <de>, <xx>: learn one"):
        load_corpus(recipe.data, seed=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.phrases=[de,it]", "data.phrases: expected one of de, fr, es or null"),
        ("data.phrases=[de,de]", "data.phrases: expected each language once"),
        ("data.phrases=[]", "data.phrases: expected one of de, fr, es or null"),
        ("data.direction=back", "data.direction: expected one of one-to-many, many-to-one"),
        ("data.languages=[de,fr]", "data.languages: expected null beside phrases"),
        ("model.latent.tau=0", "model.latent: tau: expected a number above 0, got 0"),
        ("model.latent.taus=1", "the nearest known key is model.latent.tau"),
        ("model.latent.target_layers=13", "target_layers: expected above 0 and at most the 12"),
        ("model.latent.hard=1", "model.latent.hard: expected true or false, got 1"),
        ("model.languages={}", "unknown key model.languages"),
    ],
)
def test_mistakes_in_a_recipe(override, message):
    with pytest.raises(RecipeError, match=message.replace("[", r"\[")):
        load_recipe("phrases-latent", [override])


def test_a_recipe_and_back(tmp_path):
    changes = ["model.latent.prior=beta", "model.latent.beta=[2,1]", "data.phrases=de,fr"]
    recipe = load_recipe("phrases-latent", changes)
    assert recipe.model["latent"]["beta"] == (2.0, 1.0)
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert recipe_from_dict(recipe.to_dict()) == recipe


def test_the_static_stack_to_compare_with():
    """As the recipe's comment says, only the connection differs."""
    deep = "model.decoder_layers=96"
    latent = load_recipe("phrases-latent", [deep, "model.latent.target_layers=48"])
    static = load_recipe(
        "phrases-latent", [deep, "model.decoder_connection=residual", "model.latent=null"]
    )
    own = ("decoder_connection", "latent")
    first, second = ({k: v for k, v in r.model.items() if k not in own} for r in (latent, static))
    assert first == second
    assert static.model_config(9).latent == {}
    assert latent.model_config(9).latent["target_layers"] == 48


# ---- a run ---------------------------------------------------------------------------------------


def test_resuming_draws_the_same(latent_recipe, tmp_path):
    whole = train(latent_recipe({"output": str(tmp_path / "whole")}), quiet=True)
    parts = {"output": str(tmp_path / "parts")}
    train(latent_recipe(parts | {"train.max_steps": 4}), quiet=True)
    resumed = train(latent_recipe(parts | {"resume": True}), quiet=True)
    plain = ("step", "loss", "nll", "grad_norm", "decoder_depth", "decoder_kl", "decoder_used_de")
    first, second = (
        [[row[key] for key in plain] for row in rows(result.output, "train")]
        for result in (whole, resumed)
    )
    assert first == second
    assert len(first) == 8
    states = [torch.load(r.checkpoint, weights_only=True)["model"] for r in (whole, resumed)]
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name
    assert states[0]["decoder.latent.logits"].abs().min() > 0


def test_a_penalty_moves_the_choice(latent_recipe):
    """With a target of one layer in four the expected depth is lower than without."""
    depths = []
    for weight in (0.0, 5.0):
        aim = {"target_layers": 1.0, "target_weight": weight, "hard": True}
        output = latent_recipe().output + str(weight)
        recipe = latent_recipe({"model.latent": aim, "output": output, "optim.lr": 0.05})
        result = train(recipe, quiet=True)
        depths.append(rows(result.output, "train")[-1]["decoder_depth"])
    assert depths[1] < depths[0] - 0.05


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
    assert "(de " in said

    # Set by hand, because 8 steps are too few to decide: layers 0 and 2 for de.
    content = torch.load(result.checkpoint, weights_only=True)
    content["model"]["decoder.latent.logits"] = torch.tensor([[1.0, -1, 1, -1], [1.0, 1, -1, -1]])
    whole, small, english = (str(tmp_path / n) for n in ("whole.pt", "small.pt", "test.en"))
    torch.save(content, whole)
    assert main(["prune", whole, "--language", "de", "--output", small]) == 0
    said = capsys.readouterr().out
    assert "decoder: 2 of 4 layers" in said
    assert said.endswith(f"to translate: deepfast translate {small} --language de < FILE\n")
    assert load_model(small)[0].config.decoder_connection == "residual"
    lines = (tagged / "test.source").read_text().splitlines()
    (tmp_path / "test.en").write_text("".join(line.partition(" ")[2] + "\n\n" for line in lines))
    outputs = []
    for checkpoint in (whole, small):
        options = ["--language", "de", "--beam", "2", "--max-length", "8", "--device", "cpu"]
        assert main(["translate", checkpoint, "--input", english, *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].split("\n")) == 2 * len(lines) + 1
    assert outputs[0].split("\n")[1] == ""

    assert main(["translate", whole, "--input", english, "--language", "it"]) == 1
    assert "language: expected a language of the checkpoint (de, xx)" in capsys.readouterr().err
    assert main(["translate", small, "--input", english, "--language", "xx"]) == 1
    assert "language: expected a language of the checkpoint (de), got" in capsys.readouterr().err
    assert main(["translate", whole, small, "--input", english, "--language", "xx"]) == 1
    assert "language: expected a language of the checkpoint (de), got" in capsys.readouterr().err
    assert main(["translate", whole, "--input", english, "--device", "cpu"]) == 1
    assert "begins with the tag of one of the languages de, xx" in capsys.readouterr().err
    assert main(["prune", whole, "--output", small, "--language", "it"]) == 1
    refused = "deepfast prune: expected a language of the model (de, xx), got 'it'\n"
    assert capsys.readouterr().err == refused

    # The smaller model is for one language: it refuses the other's tag like a missing tag.
    for first, rest in (("<xx>", " house"), ("bridge", " house"), ("\x85", "")):
        (tmp_path / "other.en").write_text(f"<de> house\n\n{first}{rest}\n")
        options = ["--input", str(tmp_path / "other.en"), "--device", "cpu"]
        assert main(["translate", small, *options]) == 1
        assert capsys.readouterr().err == (
            f"deepfast translate: line 3 begins with {first!r}: expected a source sentence that "
            "begins with the tag of one of the languages de, got none of them\n"
        )
    assert main(["translate", small, "--language", "de", *options]) == 1
    expected = "language: expected lines without a tag, got <de> in front of line 1\n"
    assert capsys.readouterr().err.endswith(expected)


def test_a_budget_of_memory(latent_recipe):
    result = train(latent_recipe({"memory": "states", "train.max_steps": 2}), quiet=True)
    assert rows(result.output, "memory")[0]["policies"]
