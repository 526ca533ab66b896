"""Recipes: files, overrides, and a sentence for every mistake."""

from pathlib import Path

import pytest

from deepfast.mt.training import (
    OptimSection,
    RecipeError,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    train,
)
from deepfast.mt.training.corpus import load_corpus
from deepfast.mt.training.recipe_file import differences
from deepfast.mt.training.sections import DataSection
from deepfast.policies import POLICIES

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


def test_python_s_own_kinds_of_paths_and_lists():
    section = DataSection(train_source=Path("a"), train_target=Path("~/b"), languages=("de", "fr"))
    assert (section.train_source, section.languages) == ("a", ["de", "fr"])
    assert section.train_target == str(Path.home() / "b")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("transparent30", {"encoder_connection": "residual", "cross_attention": "transparent"}),
        ("postnorm30", {"encoder_connection": "residual", "norm": "post"}),
        ("deepnorm30", {"encoder_connection": "residual", "norm": "deepnorm"}),
    ],
)
def test_what_is_compared_with_dlcl30_differs_in_nothing_else(name, changed):
    dlcl, other = (load_recipe(f"phrases-{n}").to_dict() for n in ("dlcl30", name))
    assert other == dlcl | {"output": other["output"], "model": dlcl["model"] | changed}


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("phrases-fusion", [], "where model.encoder_fusion is attention"),
        ("phrases-transparent30", [], "where model.cross_attention is transparent"),
        ("phrases-growing", [], "for a model that grows"),
        ("phrases-deepnorm30", [], "where model.norm is deepnorm"),
        ("phrases-dlcl30", ["model.share_embeddings=none"], "where model.share_embeddings is none"),
    ],
)  # fmt: skip
def test_what_no_plan_counts_names_the_policies_that_serve(name, change, why):
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, [*change, "memory_budget=2GiB"])
    text = str(caught.value)
    start = f"memory_budget: expected null {why}, which the planner cannot predict; set recompute "
    assert text.startswith(f"{start}to one of none, ")
    offered = text.partition("one of ")[2].removesuffix(", got '2GiB'").split(", ")
    for policy in POLICIES:
        if policy in offered:
            assert load_recipe(name, [*change, f"recompute={policy}"]).recompute == policy
        else:
            with pytest.raises(
                RecipeError, match=rf"^recompute: expected one of.*got '{policy[:5]}"
            ):
                load_recipe(name, [*change, f"recompute={policy}"])


def test_a_plan_serves_where_the_planner_counts_the_model():
    assert load_recipe("phrases-attnres", ["memory_budget=2GiB"]).planned()
    # A policy by name needs no plan.
    assert not load_recipe("phrases-fusion", ["recompute=ffn"]).planned()


def test_overrides_replace_nested_values_and_a_file_gives_them_back(tmp_path):
    changes = (
        "model.encoder_layers=60 optim.lr=2e-3 model.dlcl.window=4 model.dlcl.init=one "
        "optim.betas=[0.9,0.99] train.patience=null output=x/y"
    )
    recipe = load_recipe("phrases-small", changes.split())
    assert recipe.model["encoder_layers"] == 60
    assert recipe.model["dlcl"] == {"window": 4, "init": "one"}
    assert (recipe.optim.lr, recipe.optim.betas, recipe.output) == (2e-3, (0.9, 0.99), "x/y")
    path = tmp_path / "mine.yaml"
    latent = load_recipe(
        "phrases-latent",
        ["model.latent.prior=beta", "model.latent.beta=[2,1]", "data.phrases=de,fr"],
    )
    assert latent.model["latent"]["beta"] == (2.0, 1.0)
    for one in (recipe, latent):
        path.write_text(dump_recipe(one))
        assert load_recipe(path) == one
        assert recipe_from_dict(one.to_dict()) == one


def test_a_path_may_begin_with_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["data.vocabulary=~/v", "output=~/o", "resume=~/r", "grow.from=~/f"]
    recipe = load_recipe("translate", [*(text.replace("=", "=~/") for text in FILES), *paths])
    assert (recipe.data.train_source, recipe.data.dev_target) == ("/home/me/a.en", "/home/me/b.de")
    found = recipe.data.vocabulary, recipe.output, recipe.resume, recipe.grow["from"]
    assert found == ("/home/me/v", "/home/me/o", "/home/me/r", "/home/me/f")


def test_differences_of_sections():
    """One that only the new recipe has is a difference, but not one of the sections themselves."""
    new = {"model": {"dlcl": {"window": 2}}, "parallel": {"kind": "ddp"}}
    assert differences({"model": {}}, new) == ["model.dlcl None -> {'window': 2}"]


def test_sizes_are_base_and_big():
    base = load_recipe("translate", [*FILES, "model.ffn_dim=1024"]).model_config(99)
    assert (base.dim, base.num_heads, base.ffn_dim, base.vocab_size) == (512, 8, 1024, 99)
    big = load_recipe("translate", [*FILES, "model.size=big"]).model_config(99)
    assert (big.dim, big.num_heads, big.ffn_dim) == (1024, 16, 4096)


REFUSED = {
    "phrases-small": [
        ("optim.lrr=3", "unknown key optim.lrr, the nearest known key is optim.lr"),
        ("encoder_layers=3", "the nearest known key is model.encoder_layers"),
        ("grow.optim.lrr=3", "the nearest known key is grow.optim.lr"),
        ("optim.lr", "expected key=value"),
        ("optim.betas=[", "expected YAML, got an error"),
        ("output=" + "[" * 1500, "expected keys and values, got too many nested levels"),
        # Types and limits, each of them once.
        ("optim=3", "optim: expected keys and values, got 3"),
        ("optim.lr=-1", "optim.lr: expected a number above 0, got -1"),
        ("optim.lr=.inf", "optim.lr: expected a number above 0, got inf"),
        ("optim.lr=fast", "optim.lr: expected a number above 0, got 'fast'"),
        ("optim.lr=true", "optim.lr: expected a number above 0, got True"),
        ("optim.l2=.inf", "optim.l2: expected a number of at least 0, got inf"),
        ("optim.weight_decay=-1", "optim.weight_decay: expected a number of at least 0, got -1"),
        ("optim.betas=0.9", "optim.betas: expected a list of 2 numbers, got 0.9"),
        ("optim.betas=[0.9, 1]", "optim.betas: expected a number in [0, 1), got 1"),
        ("optim.clip_norm=0", "optim.clip_norm: expected a number above 0 or null, got 0"),
        ("optim.accumulate=0", "optim.accumulate: expected an integer of at least 1, got 0"),
        ("optim.schedule=linear", "expected one of inverse_sqrt, constant, got 'linear'"),
        ("train.max_steps=1.5", "expected an integer of at least 1 or null, got 1.5"),
        ("train.max_steps=true", "expected an integer of at least 1 or null, got True"),
        ("train.deterministic=1", "train.deterministic: expected true or false, got 1"),
        ("train.threads=1025", "train.threads: expected an integer from 1 to 1024 or null"),
        ("train.seed=18446744073709551616", "train.seed: expected an integer from -2^63 to"),
        ("parallel.timeout=0.0", "timeout: expected seconds above 0 and below 1e6, got 0.0"),
        ("parallel.timeout=1e30", "parallel.timeout: expected seconds above 0 and below 1e6"),
        ("data.dev_size=-1", "data.dev_size: expected an integer of at least 0, got -1"),
        ("data.vocab_size=4", "data.vocab_size: expected 5 to 2147483647 pieces, got 4"),
        ("data.target_vocab_size=2147483648", "expected 5 to 2147483647 pieces or null"),
        ("resume=''", "resume: expected true or false or a file, got ''"),
        ("output=~no-such-user/x", "output: expected a folder, ./~NAME for one that begins with"),
        ('output="a\\0b"', r"output: expected text without the character NUL, got 'a\x00b'"),
        ("memory_budget=less", "memory_budget: expected a size such as 24GiB, or null, got 'less'"),
        ("recompute=keep", "recompute: expected one of none, ffn, "),
        ("recompute=ffn memory_budget=1GiB", "memory_budget: expected null with recompute"),
        ("memory_budget=24", "memory_budget: expected text or null, got 24"),
        # What does not fit the rest of the recipe.
        (
            "recompute=layer+input model.encoder_connection=residual",
            "is residual, got 'layer+input'",
        ),
        ("optim.restart_step=3", "restart_lr: expected a rate if restart_step is set, else null"),
        ("optim.restart_accumulate=2", "optim.restart_accumulate: expected null without a restart"),
        ("optim.l2=1 optim.weight_decay=1", "optim.l2: expected 0 if optim.weight_decay is set"),
        ("train.max_steps=null", "train: expected an end"),
        ("train.average_last=9", "expected 0 to keep_last=2 checkpoints, got 9"),
        ("train.patience=2 data.dev_size=0", "train.patience: expected dev pairs to validate on"),
        ("train.validate_bleu=true data.dev_size=0", "train.validate_bleu: expected dev pairs to"),
        ("train.test_bleu=true data.test_size=0", "train.test_bleu: expected test pairs to"),
        ("data.phrases=xx", "data.phrases: expected one of de, fr, es or null, got 'xx'"),
        ("data.train_source=a", "got both: set data.phrases=null with files"),
        ("data.max_length=9999", "data.max_length: expected at most data.max_tokens=400"),
        ("data.dev_source=a", "data.dev_target: expected a file for both sides"),
        ("data.vocabulary=v data.whole_words=true", "whole_words: expected false with data.voc"),
        ("data.vocabulary=v data.target_vocab_size=9", "target_vocab_size: expected null with "),
        ("data.target_vocabulary=v", "data.target_vocabulary: expected null without data.vocabul"),
        (
            "data.target_vocab_size=60 model.share_embeddings=all",
            "model.share_embeddings: expected decoder or none",
        ),
        # What the model's config refuses.
        ("model.dim=1000000000000", "model.dim must be at most 2147483647, got 1000000000000"),
        ("model.size=huge", "model.size: expected one of base, big or null, got 'huge'"),
        ("model.dlcl.window=0", "model.dlcl: window must be an integer of at least 1, got 0"),
        ("model.dlcl.norm=post", "dlcl: norm must be None or the stack's 'pre', got 'post'"),
        ("model.top_encoder_layers=2", "model.top_encoder_layers: expected a field of Transform"),
    ],
    "phrases-latent": [
        ("data.phrases=[de, it]", "data.phrases: expected one of de, fr, es or null"),
        ("data.phrases=[de, de]", "data.phrases: expected each language once"),
        ("data.phrases=[]", "data.phrases: expected one of de, fr, es or null"),
        ("data.languages=[de, fr]", "data.languages: expected null with phrases"),
        ("model.latent.tau=0", "model.latent: tau must be a number above 0, got 0"),
        (
            "model.latent.target_layers=13",
            "must be above 0 and at most the 12 layers",
        ),
        ("model.languages={}", "unknown key model.languages"),
        *(
            (f"data.phrases=null data.languages={names}", f"data.languages: {words}")
            for names, words in (
                ("[de]", "expected two or more languages or null, got ['de']"),
                ("[de,de]", "expected each language once, got ['de', 'de']"),
                ("[<de>,fr]", "expected names such as de or zh-CN, got '<de>'"),
                ("[de,s]", "expected names such as de or zh-CN, got 's'"),
                ("de,,fr", "expected names such as de or zh-CN, got ''"),
            )
        ),
    ],
    "phrases-fflstm": [
        ("model.num_heads=2", "model.num_heads: expected a field of FastForwardLSTMConfig"),
        ("model.dim=7", "model.dim must be even, got 7"),
        ("model.size=big", "model.size: expected null for the kind fast_forward_lstm"),
        ("recompute=none", "recompute: expected null for a model without recompute policies"),
    ],
    "phrases-growing": [
        ("grow.model.dim=32", "unknown key grow.model.dim, the nearest known key is"),
        ("grow.data.seed=3", "unknown key grow.data"),
        ("grow.optim.lr=-1.0", "grow.optim.lr: expected a number above 0"),
        ("grow.train.max_steps=null", "grow.train: expected an end"),
        ("grow.model.top_encoder_layers=0", "grow.model.top_encoder_layers must be an integer"),
        ("grow.model.top_dlcl.window=2", "grow.model.top_dlcl needs a side with connection"),
        (
            "model.norm=post grow.model.top_decoder_connection=attnres",
            "grow.model.top_decoder_connection attnres needs norm pre, got norm post",
        ),
        ("model.kind=depth_growing", "model.kind: expected transformer with a section"),
        ("data.dev_size=0", "grow: expected dev pairs"),
        ("grow=3", "grow: expected keys and values, got 3"),
        ("memory_budget=2GiB", "memory_budget: expected null for a model that grows"),
    ],
}


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_a_wrong_override_is_one_sentence(name, overrides, words):
    # Values with spaces come alone.
    given = overrides.split() if overrides.count("=") > 1 else [overrides]
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sections_made_in_python_have_the_same_limits():
    section = OptimSection(betas=[0, 0.5], lr=1)
    assert section == OptimSection(betas=(0.0, 0.5), lr=1.0)
    for wrong in ({"lr": 0}, {"warmup": 1.0}, {"betas": (0.9,)}):
        with pytest.raises(RecipeError, match=f"^optim.{next(iter(wrong))}: expected a"):
            OptimSection(**wrong)


def test_text_is_asked_for_when_training_begins(tmp_path):
    """A recipe whose files come from the command line loads without them."""
    recipe = load_recipe("phrases-small", ["data.phrases=null", f"output={tmp_path / 'run'}",
                                           "train.test_bleu=false"])  # fmt: skip
    assert "phrases: null" in dump_recipe(recipe)
    with pytest.raises(RecipeError, match="data: expected text to train on, got none"):
        train(recipe)
    with pytest.raises(RecipeError, match="data: expected text to train on, got none"):
        load_corpus(recipe.data, seed=1, folder=tmp_path)
    assert not (tmp_path / "run").exists()


BAD_YAML = "{path}: expected YAML, got an error at line"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optim:\n  lr: 1\noptim:\n  warmup: 2\n", f"{BAD_YAML} 3: the key optim occurs twice"),
        ("optim:\n  lr: 1\n  lr: 2\n", f"{BAD_YAML} 3: the key lr occurs twice"),
        ("output: 2026-99-99", f"{BAD_YAML} 1: '2026-99-99' is not a valid timestamp"),
        ("? [a]\n: 1", f"{BAD_YAML} 1: found unhashable key"),
        ("train: !!map [1]", f"{BAD_YAML} 1: expected a mapping node, but found sequence"),
        (f"optim: {{lr: {10**400}}}", f"{BAD_YAML} 1: '100000000000...0000000000000' has too many"),
        (f"resume: {'9' * 5000}", f"{BAD_YAML} 1: '999999999999...9999999999999' is not a valid"),
        ("optim:\n  lr: [1\n", f"{BAD_YAML} 3: expected ',' or ']', but got '<stream end>'"),
        ("model: \0\n", "{path}: expected YAML, got an error: unacceptable character #x0000: spec"),
        ("just text", "{path}: expected keys and values, got str"),
        ("optim:\n  lrr: 1\n", "{path}: unknown key optim.lrr, the nearest known key is optim.lr"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value).startswith(sentence.format(path=path))
    assert "\n" not in str(error.value)


def doubled(first, join, times=18):
    """Anchors a0 to aN, each with twice what the one before holds."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {join.format(f'*a{i - 1}, *a{i - 1}')}" for i in range(1, times + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        doubled("[x, x]", "[{}]") + "\nmodel: *a18",
        doubled("{lr: 1}", "{{<<: [{}]}}") + "\noptim: {<<: [*a18, *a18]}",
        "optim: &o {<<: *o}",
    ],
)
def test_a_recipe_that_aliases_make_huge_is_refused(tmp_path, text):
    """Values that hold each other twice, 18 times over: real ones do it 40 times."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    for name, overrides in (
        (path, ()),
        ("phrases-small", [f"model={{{text}}}".replace("\n", ", ")]),
    ):
        with pytest.raises(RecipeError, match="more than 10000 keys and values") as error:
            load_recipe(name, overrides)
        assert len(str(error.value)) < 250


def test_aliases_and_merge_keys_serve(tmp_path):
    path = tmp_path / "recipe.yaml"
    same = "&same {max_steps: 9, log_every: &last 3}"
    path.write_text(f"train: {same}\ngrow: {{train: {{<<: *same, patience: *last}}}}\n")
    recipe = load_recipe(path, ["data.phrases=de"])
    assert recipe.grow == {"train": {"max_steps": 9, "log_every": 3, "patience": 3}}


LONG = "x" * 5000


@pytest.mark.parametrize(
    "override",
    [f"optim.lr={LONG}", f"optim.lr=[{'[1, 2], ' * 500}]", f"optim={LONG}", f"model.norm={LONG}",
     f"memory_budget={LONG}", f"{LONG}=1", LONG],
)  # fmt: skip
def test_a_long_value_is_shortened_in_its_message(override):
    with pytest.raises(RecipeError) as error:
        load_recipe("phrases-small", [override])
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("phrasessmall", ", the nearest one is phrases-small"),
        ("q", ": deepfast mt train --list names them"),
    ],
)
def test_an_unknown_recipe_names_the_nearest(name, hint):
    with pytest.raises(RecipeError, match=f"or the name of a shipped recipe{hint}$"):
        load_recipe(name)
