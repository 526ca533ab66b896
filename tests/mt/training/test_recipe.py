"""Recipes: files, overrides, and a sentence for every mistake."""

import pytest
import yaml

from deepfast.memory.policies import POLICIES
from deepfast.mt.training import (
    RecipeError,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    train,
)
from deepfast.mt.training.corpus import load_corpus
from deepfast.mt.training.recipe_file import differences

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


def test_the_transparent_twin_differs_in_what_the_decoder_reads_alone():
    dlcl, other = (load_recipe(f"phrases-{n}").to_dict() for n in ("dlcl30", "transparent30"))
    connections = [r["model"].pop("encoder_connection") for r in (dlcl, other)]
    assert connections == ["dlcl", "residual"]
    assert other["model"].pop("cross_attention") == "transparent"
    assert {k: v for k, v in dlcl.items() if k != "output"} == {
        k: v for k, v in other.items() if k != "output"
    }


def test_the_two_compared_recipes_differ_in_the_connection_alone():
    dlcl, post = (load_recipe(f"phrases-{n}").to_dict() for n in ("dlcl30", "postnorm30"))
    assert (dlcl["model"].pop("norm"), post["model"].pop("norm")) == ("pre", "post")
    connections = [r["model"].pop("encoder_connection") for r in (dlcl, post)]
    assert connections == ["dlcl", "residual"]
    assert {k: v for k, v in dlcl.items() if k != "output"} == {
        k: v for k, v in post.items() if k != "output"
    }


def test_overrides_replace_nested_values():
    changes = (
        "model.encoder_layers=60 optim.lr=2e-3 model.dlcl.window=4 model.dlcl.init=one "
        "optim.betas=[0.9,0.99] train.patience=null output=x/y"
    )
    recipe = load_recipe("phrases-small", changes.split())
    assert recipe.model["encoder_layers"] == 60
    assert recipe.model["dlcl"] == {"window": 4, "init": "one"}
    assert recipe.optim.lr == 2e-3
    assert recipe.optim.betas == (0.9, 0.99)
    assert recipe.output == "x/y"


def test_fusion_of_layers():
    changes = ["model.encoder_fusion=attention", "model.fusion.hops=2"]
    config = load_recipe("phrases-small", changes).model_config(99)
    assert (config.encoder_fusion, config.fusion) == ("attention", {"hops": 2})
    with pytest.raises(
        RecipeError, match=r"model\.fusion: hops must be a whole .* at least 1, got 0"
    ):
        load_recipe("phrases-small", [changes[0], "model.fusion.hops=0"])
    # A policy by name needs no plan.
    assert not load_recipe("phrases-small", [*changes, "memory=lean"]).planned()
    message = r"one of keep, .*, or null where model\.encoder_fusion is attention"
    with pytest.raises(RecipeError, match=message):
        load_recipe("phrases-small", [*changes, "memory=2GiB"])


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("phrases-fusion", [], "where model.encoder_fusion is attention"),
        ("phrases-transparent30", [], "where model.cross_attention is transparent"),
        ("phrases-growing", [], "for a model that grows"),
        ("phrases-dlcl30", ["model.share_embeddings=none"], "where model.share_embeddings is none"),
    ],
)  # fmt: skip
def test_what_no_plan_counts_names_the_policies_that_serve(name, change, why):
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, [*change, "memory=2GiB"])
    text = str(caught.value)
    assert text.startswith("memory: expected a policy, one of keep, ")
    assert text.endswith(f", or null {why}, which the planner cannot predict, got '2GiB'")
    offered = text.partition("one of ")[2].partition(", or null")[0].split(", ")
    for policy in POLICIES:
        if policy in offered:
            assert load_recipe(name, [*change, f"memory={policy}"]).memory == policy
        else:
            with pytest.raises(RecipeError, match=f"^memory: expected a policy.*got '{policy}'$"):
                load_recipe(name, [*change, f"memory={policy}"])


def test_attention_residuals():
    changes = ["model.encoder_connection=block_attnres", "model.attnres_block=3",
               "model.attnres_reads=1"]  # fmt: skip
    config = load_recipe("phrases-small", changes).model_config(99)
    assert (config.encoder_connection, config.attnres_block) == ("block_attnres", 3)
    assert config.stack("encoder")["reads"] == config.attnres_reads == 1
    assert load_recipe("phrases-attnres", ["memory=2GiB"]).planned()
    for more, message in (
        ("model.norm=post", "model.encoder_connection block_attnres needs norm pre, got norm"),
        ("model.attnres_block=0", "attnres_block must be a whole number of at least 1"),
        ("model.attnres_reads=3", "attnres_reads must be a whole number from 1 to 2, got 3"),
        (
            "model.encoder_connection=attnres",
            "attnres_block needs a side with 'block_attnres', got none",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe("phrases-small", [*changes, more])


def test_a_recipe_file_by_path_and_back(tmp_path):
    recipe = load_recipe("phrases-small", ["optim.lr=1e-4", "model.dlcl.weight=vector"])
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert yaml.safe_load(path.read_text())["optim"]["lr"] == 1e-4


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
    assert (base.dim, base.heads, base.ffn_dim, base.vocab_size) == (512, 8, 1024, 99)
    big = load_recipe("translate", [*FILES, "model.size=big"]).model_config(99)
    assert (big.dim, big.heads, big.ffn_dim) == (1024, 16, 4096)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=3", "unknown key optim.lrr, the nearest known key is optim.lr"),
        ("encoder_layers=3", "the nearest known key is model.encoder_layers"),
        ("model.dlcl.windo=3", "the nearest known key is model.dlcl.window"),
        ("optim.lr=-1", "optim.lr: expected a number above 0, got -1.0"),
        ("optim.lr=.inf", "optim.lr: expected a number above 0, got inf"),
        ("optim.eps=.inf", "optim.eps: expected a number above 0, got inf"),
        ("optim.l2=.inf", "optim.l2: expected a number of at least 0, got inf"),
        ("optim.weight_decay=.inf", "optim.weight_decay: expected a number of at least 0, got inf"),
        ("model.dlcl.eps=-1", "model.dlcl: eps must be a number of at least 0, got -1"),
        ("model.dlcl.eps=.inf", "model.dlcl: eps must be a number of at least 0, got inf"),
        ("optim.lr=fast", "optim.lr: expected a number, got 'fast'"),
        ("optim.lr=true", "optim.lr: expected a number, got True"),
        ("optim.betas=0.9", "optim.betas: expected a list of 2 numbers, got 0.9"),
        ("optim.betas=[0.9, 1]", "optim.betas: expected two numbers in [0, 1)"),
        ("optim.accumulate=0", "optim.accumulate: expected at least 1 micro-batch, got 0"),
        ("optim.label_smoothing=1", "optim.label_smoothing: expected a number in [0, 1), got 1.0"),
        ("train.max_steps=1.5", "train.max_steps: expected a whole number or null, got 1.5"),
        ("train.max_steps=null", "train: expected an end"),
        ("train.precision=half", "expected one of float32, bfloat16, got 'half'"),
        ("train.average_last=9", "expected 0 to keep_last=2 checkpoints, got 9"),
        (
            "train.threads=100000000",
            "train.threads: expected a whole number from 1 to 1024 or null",
        ),
        ("train.seed=18446744073709551616", "train.seed: expected a whole number from -2^63 to"),
        ("parallel.timeout=1e30", "parallel.timeout: expected seconds above 0 and below 1e6"),
        ("output=" + "[" * 5000, "expected keys and values, got too many inside each other"),
        ("train.log_every=0", "train.log_every: expected a whole number of at least 1, got 0"),
        ("data.phrases=xx", "data.phrases: expected one of de, fr, es or null, got 'xx'"),
        ("data.train_source=a", "got both: set data.phrases=null beside files"),
        ("data.max_length=9999", "data.max_length: expected at most data.max_tokens=400"),
        ("data.dev_source=a", "data.dev_target: expected a file for both sides"),
        ("data.vocab_size=4", "data.vocab_size: expected more than 4 pieces, got 4"),
        ("data.vocab_size=2147483648", "data.vocab_size: expected at most 2147483647 pieces"),
        ("data.vocabulary=''", "data.vocabulary: expected a file or null, got ''"),
        ("data.dev_source=''", "data.dev_source: expected a file or null, got ''"),
        ("resume=''", "resume: expected true, false or a file, got ''"),
        (
            "output=~no-such-user/x",
            "output: expected a folder, ./~NAME for one that begins with ~, got",
        ),
        ('output="a\\0b"', r"output: expected text without the character NUL, got 'a\x00b'"),
        ("model.dim=1000000000000", "model.dim must be at most 2147483647, got 1000000000000"),
        ("model.encoder_layers=70000", "model.encoder_layers must be at most 65536, got 70000"),
        ("model.heads=3", "model.dim must be an even multiple of heads 3, got 64"),
        ("model.norm=mid", "model.norm must be one of pre, post, got 'mid'"),
        ("model.size=huge", "model.size: expected one of base, big or null, got 'huge'"),
        ("model.dlcl.window=0", "model.dlcl: window must be a whole number of at least 1, got 0"),
        ("model.encoder_connection=none", "model.encoder_connection must be one of"),
        ("optim=3", "optim: expected keys and values, got 3"),
        ("optim.lr", "expected key=value"),
        ("optim.betas=[", "expected YAML, got an error"),
    ],
)
def test_a_wrong_override_is_one_sentence(override, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe("phrases-small", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_restart_needs_a_finite_rate():
    changes = ["optim.restart_step=3", "optim.restart_lr=.inf"]
    with pytest.raises(RecipeError, match=r"optim\.restart_lr: expected a number above 0 or null"):
        load_recipe("phrases-small", changes)


def test_dlcl_options_without_dlcl_are_refused():
    changes = ["model.encoder_connection=residual", "model.dlcl.window=4"]
    with pytest.raises(RecipeError, match=r"model\.dlcl needs a side with connection"):
        load_recipe("phrases-small", changes)


def test_what_needs_dev_or_test_pairs_says_so():
    for change, size in (("train.patience=2", "dev"), ("train.validate_bleu=true", "dev"),
                         ("train.test_bleu=true", "test")):  # fmt: skip
        with pytest.raises(RecipeError, match=f"expected {size} pairs"):
            load_recipe("phrases-small", [change, f"data.{size}_size=0"])


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optim:\n  lr: 1\noptim:\n  warmup: 2\n", "line 3: the key optim stands twice"),
        ("optim:\n  lr: 1\n  lr: 2\n", "line 3: the key lr stands twice"),
        ("resume: !!bool abc", "line 1: bool cannot be 'abc'"),
        ("output: !!timestamp abc", "line 1: timestamp cannot be 'abc'"),
        ("output: 2026-99-99", "line 1: timestamp cannot be '2026-99-99'"),
        ("seed: !!int ''", "line 1: int cannot be ''"),
        ("? [a]\n: 1", "line 1: found unhashable key"),
        ("train: !!map [1]", "line 1: expected a mapping node, but found sequence"),
        ("data: !!set [a]", "line 1: expected a mapping node, but found sequence"),
        (f"optim: {{lr: {10**400}}}", "line 1: '100000000000...0000000000000' has too many digits"),
        (f"resume: 0x{'f' * 4000}", "line 1: '0xffffffffff...fffffffffffff' has too many digits"),
        (f"resume: {'9' * 5000}", "line 1: int cannot be '999999999999...9999999999999'"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(tmp_path, text, sentence):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value) == f"{path}: expected YAML, got an error at {sentence}"


def doubled(first, join, times=18):
    """Anchors a0 to aN, each with twice what the one before holds."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {join.format(f'*a{i - 1}, *a{i - 1}')}" for i in range(1, times + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        doubled("[x, x]", "[{}]") + "\noptim: {lr: *a18}",
        doubled("[x, x]", "[{}]") + "\ndata: {phrases: *a18}",
        doubled("[x, x]", "[{}]") + "\nmodel: *a18",
        doubled("{lr: 1}", "{{<<: [{}]}}") + "\noptim: {<<: [*a18, *a18]}",
        doubled("{lr: 1}", "{{<<: [{}]}}") + "\noptim: *a18",
        "optim: &o {betas: [*o, 1]}",
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


@pytest.mark.parametrize(
    "override",
    [
        f"optim.lr={'x' * 5000}",
        f"optim.lr=[{'[1, 2], ' * 500}]",
        f"optim.betas={'x' * 5000}",
        f"optim={'x' * 5000}",
        f"model.norm={'x' * 5000}",
        f"data.phrases={'x' * 5000}",
        f"memory={'x' * 5000}",
        f"{'x' * 5000}=1",
        "x" * 5000,
    ],
)
def test_a_long_value_is_shortened_in_its_message(override):
    with pytest.raises(RecipeError) as error:
        load_recipe("phrases-small", [override])
    assert len(str(error.value)) < 500


def test_a_character_that_yaml_refuses_is_one_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \0\n")
    with pytest.raises(RecipeError, match=r"special characters are not allowed.* position 7$"):
        load_recipe(path)


def test_an_unknown_recipe_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match="nearest one is phrases-small"):
        load_recipe("phrasessmall")
    with pytest.raises(RecipeError, match="shipped recipe: deepfast train --list names them"):
        load_recipe("q")
    broken = tmp_path / "broken.yaml"
    broken.write_text("optim:\n  lr: [1\n")
    with pytest.raises(RecipeError, match=r"broken\.yaml: expected YAML, got an error at line"):
        load_recipe(broken)
    broken.write_text("just text")
    with pytest.raises(RecipeError, match="expected keys and values, got str"):
        load_recipe(broken)
    broken.write_text("optim:\n  lrr: 1\n")
    with pytest.raises(RecipeError, match=r"broken\.yaml: unknown key optim\.lrr"):
        load_recipe(broken)
