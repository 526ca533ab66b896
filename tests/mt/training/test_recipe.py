"""Recipes: files, overrides, and a sentence for every mistake."""

import re
from pathlib import Path

import pytest

from deepfast.mt.training import (
    OptimSection,
    Recipe,
    RecipeError,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    train,
)
from deepfast.mt.training.recipe_file import differences
from deepfast.mt.training.sections import DataSection

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


def test_values_as_python_and_text_give_them(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    section = DataSection(train_source=Path("a"), train_target=Path("~/b"), languages=("de", "fr"))
    assert (section.train_source, section.languages) == ("a", ["de", "fr"])
    assert section.train_target == "/home/me/b"
    assert OptimSection(betas=[0, 0.5], lr=1) == OptimSection(betas=(0.0, 0.5), lr=1.0)
    for wrong in ({"lr": 0}, {"warmup": 1.0}, {"betas": (0.9,)}):
        with pytest.raises(RecipeError, match=f"^optim.{next(iter(wrong))}: expected a"):
            OptimSection(**wrong)
    with pytest.raises(RecipeError, match=r"^data: expected DataSection, got \{\}$"):
        Recipe(data={})
    # A path may begin with the home.
    paths = ["data.vocabulary=~/v", "output=~/o", "grow.from=~/f"]
    recipe = load_recipe("translate", [*(text.replace("=", "=~/") for text in FILES), *paths])
    assert (recipe.data.train_source, recipe.data.dev_target) == ("/home/me/a.en", "/home/me/b.de")
    found = recipe.data.vocabulary, recipe.output, recipe.grow["from"]
    assert found == ("/home/me/v", "/home/me/o", "/home/me/f")
    # YAML 1.1 reads the code of Norwegian as false.
    for names in ("[no, sv]", "no,sv", "[on, off]", "[y, n]"):
        recipe = load_recipe("latent", [f"data.languages={names}", *FILES])
        assert recipe.data.languages == names.strip("[]").replace(" ", "").split(",")
        assert recipe_from_dict(recipe.to_dict()).data.tags == recipe.data.tags
    assert load_recipe("dlcl30", ["data.target_language=no"]).data.target_language == "no"


def test_what_no_plan_counts_is_named():
    for change, why in (
        ("model.encoder_fusion=attention", "where model.encoder_fusion is attention"),
        ("model.cross_attention=transparent", "where model.cross_attention is transparent"),
        ("model.norm=deepnorm", "where model.norm is deepnorm"),
        ("model.share_embeddings=none", "where model.share_embeddings is none"),
        ("grow.from=bottom.pt model.kind=depth_growing", "for a model that grows"),
    ):
        given = ["model.encoder_connection=residual", *change.split()]
        told = f"^memory_budget: expected null {why}, which the planner cannot predict; set recompu"
        with pytest.raises(RecipeError, match=told):
            load_recipe("phrases-dlcl30", [*given, "memory_budget=2GiB"])
        # A policy by name needs no plan.
        assert load_recipe("phrases-dlcl30", [*given, "recompute=ffn"]).recompute == "ffn"
    assert load_recipe("phrases-dlcl30", ["memory_budget=2GiB"]).memory_budget == "2GiB"


def test_overrides_replace_nested_values_and_a_file_gives_them_back(tmp_path):
    changes = (
        "model.encoder_layers=60 optim.lr=2e-3 model.dlcl.window=4 model.dlcl.init=one "
        "optim.betas=[0.9,0.99] train.patience=null output=x/y decode.length_penalty=1 "
        "optim.eps=1e-9"
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


def test_differences_of_sections():
    new = {"model": {"dlcl": {"window": 2}}, "parallel": {"kind": "ddp"}}
    old = {"model": {}, "parallel": {"kind": "auto"}}
    expected = ["model.dlcl None -> {'window': 2}", "parallel.kind 'auto' -> 'ddp'"]
    assert differences(old, new) == expected


LONG = "x" * 5000
REFUSED = {
    "phrases-small": [
        ("optim.lrr=3", "optim.lrr: unknown key, the nearest one is lr"),
        ("optim={1: 2}", "optim.1: unknown key"),
        ("option.lr=3", "option: unknown key, the nearest one is optim"),
        ("optim.lr", "expected key=value"),
        ("output=" + "[" * 600, "expected YAML, got an error: maximum recursion depth exceeded"),
        # What is long is shortened.
        (f"optim.lr={LONG}", "optim.lr: expected a number above 0, got 'xxx"),
        (f"optim.lr=[{LONG}", "expected YAML, got an error at line 1: expected ',' or ']', but"),
        (f"{LONG}=1", "xxx: unknown key, expected data, model, optim, "),
        # Types and limits, each of them once.
        ("optim=3", "optim: expected keys and values, got 3"),
        ("optim.lr=-1", "optim.lr: expected a number above 0, got -1"),
        ("optim.lr=.nan", "optim.lr: expected a number above 0, got nan"),
        ("optim.lr=true", "optim.lr: expected a number above 0, got True"),
        ("optim.betas=[true, 0.1]", "expected a list of 2 numbers in [0, 1), got [True, 0.1]"),
        ("train.max_steps=true", "expected an integer of at least 1 or null, got True"),
        ("train.deterministic=no", "train.deterministic: expected true or false, got 'no'"),
        ("data.vocab_size=4", "data.vocab_size: expected an integer above 4 and below 214"),
        ("resume=step-00000004", "resume: expected true or false, got 'step-00000004'"),
        ('output="a\\0b"', r"output: expected a folder, got 'a\x00b'"),
        ("memory_budget=less", "memory_budget: expected a size such as 24GiB or null, got 'less'"),
        # What does not fit the rest of the recipe.
        ("recompute=ffn memory_budget=1GiB", "memory_budget: expected null with recompute"),
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
        ("data.target_language=Chinese", "expected a language's code such as de or zh or null"),
        ("data.max_length=9999", "data.max_length: expected at most data.max_tokens=400"),
        ("data.dev_source=a", "data.dev_target: expected a file, as data.dev_source is one"),
        ("data.vocabulary=v data.whole_words=true", "whole_words: expected false with data.voc"),
        ("data.vocabulary=v data.target_vocab_size=9", "target_vocab_size: expected null with "),
        ("data.target_vocabulary=v", "data.target_vocabulary: expected null without data.vocabul"),
        ("data.target_vocab_size=60 model.share_embeddings=all", "expected decoder or none where"),
        # What the model's config refuses.
        ("model.kind=[rnn]", "model.kind: expected one of transformer, depth_growing, fast_forw"),
        ("model.size=huge", "model.size: expected one of null, base, big for the kind transformer"),
        ("model=null model.kind=fast_forward_lstm model.size=big", "expected one of null for th"),
        ("model.dlcl.window=0", "model.dlcl: window must be an integer of at least 1, got 0"),
        ("model.top_encoder_layers=2", "model.top_encoder_layers: unknown key, the nearest one"),
        ("model.languages={}", "model.languages: expected no value: the vocabulary decides it"),
        ("model.latent.tau=0", "model.latent: expected no options without a side with connection"),
        # Depth growing.
        ("grow=3", "grow: expected keys and values or null, got 3"),
        ("grow.optim=3", "grow.optim: expected keys and values, got 3"),
        ("grow.data.seed=3", "grow.data: unknown key, expected from, model, optim, train"),
        ("grow.model.dim=32", "grow.model.dim: expected one of top_encoder_layers, "),
        ("grow.optim.lrr=3", "grow.optim.lrr: unknown key, the nearest one is lr"),
        ("grow.train.max_steps=null", "grow.train.max_steps: expected an end"),
        ("grow.model.top_dlcl.window=2", "grow.model.top_dlcl: expected no options without a side"),
        ("model.norm=post grow.model.top_decoder_connection=attnres",
         "grow.model.top_decoder_connection: expected another one with norm post, as it needs"),
        ("model.kind=depth_growing", "model.kind: expected transformer with a section"),
        ("grow={} data.dev_size=0", "grow: expected dev pairs"),
    ],
    "phrases-latent": [
        ("model.latent.tau=0", "model.latent: tau must be a number above 0, got 0"),
        ("model.latent.target_layers=13", "must be above 0 and at most the 12 layers"),
        ("model=null model.kind=fast_forward_lstm recompute=ffn", "null for a model without reco"),
        *(
            (f"data.phrases=null data.languages={names}", f"data.languages: expected {words}")
            for names, words in (
                ("[de]", "two or more names such as de or zh-CN or null, got ['de']"),
                ("[de,de]", "each language once, got ['de', 'de']"),
                ("[<de>,fr]", "two or more names such as de or zh-CN or null, got ['<de>', 'fr']"),
                ("de,,fr", "two or more names such as de or zh-CN or null, got 'de,,fr'"),
            )
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_a_wrong_override_is_one_sentence(name, overrides, words):
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, re.split(r" (?=[\w.]+=)", overrides))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_text_is_asked_for_when_training_begins(tmp_path):
    """A recipe whose files come from the command line loads without them."""
    recipe = load_recipe("phrases-small", ["data.phrases=null", f"output={tmp_path / 'run'}",
                                           "train.test_bleu=false"])  # fmt: skip
    assert "phrases: null" in dump_recipe(recipe)
    with pytest.raises(RecipeError, match="data: expected text to train on, got none"):
        train(recipe)
    assert not (tmp_path / "run").exists()


BAD = "expected YAML, got an error"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optim:\n  lr: 1\noptim:\n  warmup: 2\n", f'{BAD} at line 3: found duplicate key "optim"'),
        ("optim:\n  lr: 1\n  lr: 2\n", f'{BAD} at line 3: found duplicate key "lr"'),
        ("output: 2026-99-99", f"{BAD}: month must be in 1..12"),
        ("? {a: 1}\n: 1", f"{BAD} at line 1: found unhashable key"),
        ("train: !!map [1]", f"{BAD} at line 1: expected a mapping node, but found sequence"),
        ("train: !!python/name:os.system x", f"{BAD} at line 1: could not determine a constructor"),
        ("train: !!bool x", BAD),
        ("train: !!int ''", BAD),
        (f"resume: {'9' * 5000}", f"{BAD}: Exceeds the limit (4300 digits) for integer string"),
        ("optim:\n  lr: [1\n", f"{BAD} at line 3: expected ',' or ']', but got '<stream end>'"),
        ("model: \0\n", f"{BAD}: unacceptable character #x0000: special characters are not"),
        ("%YAML 1.1\n---\ntrain: {deterministic: no}", "expected YAML without directives"),
        ("# Mine.\n%YAML 1.1\n---\ndata: {languages: [no, sv]}", "expected YAML without direct"),
        ("just text", "expected keys and values, got 'just text'"),
        ("", "expected keys and values, got None"),
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


def test_aliases_and_merge_keys_serve(tmp_path):
    path = tmp_path / "recipe.yaml"
    same = "&same {max_steps: 9, log_every: &last 3}"
    path.write_text(f"train: {same}\ngrow: {{train: {{<<: *same, patience: *last}}}}\n")
    recipe = load_recipe(path, ["data.phrases=de"])
    assert recipe.grow == {"train": {"max_steps": 9, "log_every": 3, "patience": 3}}
    path.write_text(f"train: {same}\ngrow: {{train: *same}}\n")
    recipe = load_recipe(path, ["data.phrases=de", "train.max_steps=7"])
    assert (recipe.train.max_steps, recipe.grow["train"]["max_steps"]) == (7, 9)
    path.write_text("model: &m {latent: *m}\n")
    with pytest.raises(RecipeError, match=r"^model\.latent: expected no options .*\.\.\.}}}$"):
        load_recipe(path)


def test_an_unknown_recipe_names_the_nearest():
    near, none = ", the nearest one is phrases-small", ": deepfast mt train --list names them"
    for name, hint in (("phrasessmall", near), ("q", none)):
        with pytest.raises(RecipeError, match=f"or the name of a shipped recipe{hint}$"):
            load_recipe(name)
