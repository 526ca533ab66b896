"""Recipes: files, overrides, a sentence for every mistake, and the commands of those that ship."""

import importlib.resources
import re
import shlex
from pathlib import Path

import pytest

from deepfast.mt.search import DecodingOptions
from deepfast.mt.training import (
    OptimSection,
    Recipe,
    RecipeError,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    recipe_names,
    train,
)
from deepfast.mt.training.sections import DataSection

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


def test_values_as_python_and_text_give_them(monkeypatch):
    section = DataSection(train_source=Path("a"), train_target=Path("b"), languages=("de", "fr"))
    assert (section.train_source, section.languages) == ("a", ["de", "fr"])
    assert OptimSection(betas=[0, 0.5], lr=1) == OptimSection(betas=(0.0, 0.5), lr=1.0)
    with pytest.raises(RecipeError, match=r"^data: expected DataSection, got \{\}$"):
        Recipe(data={})
    # A path may begin with the home.
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["data.vocabulary=~/v", "output=~/o", "grow.from=~/f"]
    recipe = load_recipe("translate", [*FILES, *paths])
    found = recipe.data.vocabulary, recipe.output, recipe.grow["from"]
    assert found == ("/home/me/v", "/home/me/o", "/home/me/f")
    # YAML 1.1 reads the code of Norwegian as false.
    for names in ("[no, sv]", "no,sv"):
        recipe = load_recipe("latent", [f"data.languages={names}", *FILES])
        assert recipe.data.languages == ["no", "sv"]
        assert recipe_from_dict(recipe.to_dict()).data.tags == ["<no>", "<sv>"]


def test_overrides_replace_nested_values_and_a_file_gives_them_back(tmp_path):
    changes = (
        "model.encoder_layers=60 optim.lr=2e-3 model.dlcl.window=4 model.dlcl.init=one "
        "optim.betas=[0.9,0.99] train.patience=null output=x/y decode.length_penalty=1"
    )
    recipe = load_recipe("phrases-small", changes.split())
    assert recipe.model["encoder_layers"] == 60
    assert recipe.model["dlcl"] == {"window": 4, "init": "one"}
    assert (recipe.optim.lr, recipe.optim.betas, recipe.output) == (2e-3, (0.9, 0.99), "x/y")
    assert recipe.to_dict()["decode"] == {"beam": 4, "length_penalty": 1.0, "length_form": "gnmt"}
    latent = ["model.latent.prior=beta", "model.latent.beta=[2,1]", "data.phrases=de,fr"]
    path = tmp_path / "mine.yaml"
    for one in (recipe, load_recipe("phrases-latent", latent)):
        path.write_text(dump_recipe(one))
        assert load_recipe(path) == one
        assert recipe_from_dict(one.to_dict()) == one
    plain = load_recipe("phrases-latent", ["model.latent=null", "model.decoder_connection=dlcl"])
    assert plain.model_config(vocab_size=9).latent == {}


LONG = "x" * 5000
NOT_PLANNED = {
    "model.encoder_fusion=attention": "where model.encoder_fusion is attention",
    "model.norm=deepnorm": "where model.norm is deepnorm",
    "model.share_embeddings=none": "where model.share_embeddings is none",
    "grow.from=bottom.pt model.kind=depth_growing": "for a model that grows",
}
REFUSED = [
    ("optim.lrr=3", "optim.lrr: unknown key, the nearest one is lr"),
    ("optim.lr", "expected key=value"),
    # What is long is shortened.
    (f"optim.lr={LONG}", "optim.lr: expected a number above 0, got 'xxx"),
    (f"optim.lr=[{LONG}", "expected YAML, got an error at line 1: expected ',' or ']', but"),
    # Types and limits, each of them once.
    ("optim=3", "optim: expected keys and values, got 3"),
    ("optim.lr=0", "optim.lr: expected a number above 0, got 0"),
    ("optim.lr=.nan", "optim.lr: expected a number above 0, got nan"),
    ("train.max_steps=true", "expected an integer of at least 1 or null, got True"),
    ("data.vocab_size=4", "data.vocab_size: expected an integer above 4 and below 214"),
    ("memory_budget=less", "memory_budget: expected a size such as 24GiB or null, got 'less'"),
    # What does not fit the rest of the recipe.
    ("recompute=ffn memory_budget=1GiB", "memory_budget: expected null with recompute"),
    *((f"model.encoder_connection=residual {change} memory_budget=2GiB",
       f"memory_budget: expected null {why}, which the planner cannot predict; set recompute")
      for change, why in NOT_PLANNED.items()),
    ("model=null model.kind=fast_forward_lstm recompute=ffn", "null for a model without recompu"),
    ("optim.restart_step=3", "restart_lr: expected a rate if restart_step is set, else null"),
    ("optim.restart_accumulate=2", "optim.restart_accumulate: expected null without a restart"),
    ("optim.l2=1 optim.weight_decay=1", "optim.l2: expected 0 if optim.weight_decay is set"),
    ("train.max_steps=null", "train.max_steps: expected an end"),
    ("train.average_last=9", "expected 0 to keep_last=2 checkpoints, got 9"),
    ("train.patience=2 data.dev_size=0", "train.patience: expected null or false without dev"),
    ("train.test_bleu=true data.test_size=0", "null or false without test pairs, which data.t"),
    ("data.phrases=[de, it]", "data.phrases: expected one or more of de, fr, es or null, got"),
    ("data.languages=[de, fr]", "data.languages: expected null with data.phrases"),
    ("data.train_source=a", "null with data.phrases; set data.phrases=null with files"),
    *((f"data.phrases=null data.languages={names}", f"data.languages: expected {words}")
      for names, words in (
          ("[de]", "two or more names such as de or zh-CN or null, got ['de']"),
          ("[de,de]", "each language once, got ['de', 'de']"))),
    ("data.max_length=9999", "data.max_length: expected at most data.max_tokens=400"),
    ("data.dev_source=a", "data.dev_target: expected a file, as data.dev_source is one"),
    ("data.vocabulary=v data.whole_words=true", "whole_words: expected false with data.voc"),
    ("data.vocabulary=v data.target_vocab_size=9", "target_vocab_size: expected null with "),
    ("data.target_vocabulary=v", "data.target_vocabulary: expected null without data.vocabul"),
    ("data.target_vocab_size=60 model.share_embeddings=all", "expected decoder or none where"),
    # What the model's config refuses.
    ("model.dlcl.window=0", "model.dlcl: window must be an integer of at least 1, got 0"),
    ("model.languages={}", "model.languages: expected no value: the vocabulary decides it"),
    # Depth growing.
    ("grow.data.seed=3", "grow.data: unknown key, expected from, model, optim, train"),
    ("grow.train.max_steps=null", "grow.train.max_steps: expected an end"),
    ("grow.model.top_dlcl.window=2", "grow.model.top_dlcl: expected no options without a side"),
    ("model.kind=depth_growing", "model.kind: expected transformer with a section"),
    ("grow={} data.dev_size=0", "grow: expected dev pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_a_wrong_override_is_one_sentence(overrides, words):
    with pytest.raises(RecipeError) as caught:
        load_recipe("phrases-small", re.split(r" (?=[\w.]+=)", overrides))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_text_is_asked_for_when_training_begins(tmp_path):
    """A recipe whose files come from the command line loads without them."""
    recipe = load_recipe("phrases-small", ["data.phrases=null", f"output={tmp_path / 'run'}"])
    with pytest.raises(RecipeError, match="data: expected text to train on, got none"):
        train(recipe)
    assert not (tmp_path / "run").exists()


BAD = "expected YAML, got an error at line"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optim:\n  lr: 1\noptim:\n  warmup: 2\n", f'{BAD} 3: found duplicate key "optim"'),
        ("train: !!python/name:os.system x", f"{BAD} 1: could not determine a constructor"),
        ("# Mine.\n%YAML 1.1\n---\ndata: {languages: [no, sv]}", "expected YAML without direct"),
        ("just text", "expected keys and values, got 'just text'"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250 + len(str(path))


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_has_commands_that_load_on_top(name):
    file = importlib.resources.files("deepfast.mt") / "recipes" / f"{name}.yaml"
    _, command, *_ = lines = file.read_text("utf-8").splitlines()
    assert re.match(f"#     deepfast mt (train|sweep) {name}", command)
    recipe = load_recipe(name, [] if name.startswith("phrases") else FILES)
    assert recipe.output == f"runs/{name}"
    # A checkpoint holds these values, which a search takes as they are.
    assert DecodingOptions(**recipe.to_dict()["decode"]).beam == recipe.decode.beam
    start = f"#     deepfast mt train {name}"
    words = [shlex.split(line.removeprefix(start)) for line in lines if line.startswith(start)]
    loaded = [load_recipe(name, own) for own in words]
    for recipe in loaded:
        recipe.model_config(vocab_size=100)
    # The commands may run at the same time.
    assert len({recipe.output for recipe in loaded}) == len(loaded)
