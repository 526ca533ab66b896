"""The shipped recipes: their commands, and the settings of the papers that they follow."""

import importlib.resources
import re
import shlex
from dataclasses import asdict

import pytest

from deepfast.mt.search import DecodingOptions
from deepfast.mt.training import load_recipe, recipe_names

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


def commands(name):
    """The words after `deepfast mt train NAME` of every command in a recipe's comments."""
    file = importlib.resources.files("deepfast.mt") / "recipes" / f"{name}.yaml"
    for line in file.read_text("utf-8").splitlines():
        words = shlex.split(line.removeprefix("#     ")) if line.startswith("#     ") else []
        if words[:3] == ["deepfast", "mt", "train"]:
            assert words[3] == name
            yield words[4:]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_a_summary_and_commands_that_load_on_top(name):
    file = importlib.resources.files("deepfast.mt") / "recipes" / f"{name}.yaml"
    summary, command, *_ = file.read_text("utf-8").splitlines()
    assert summary == f"# {recipe_names()[name]}"
    assert re.match(f"#     deepfast mt (train|sweep) {name}", command)
    recipe = load_recipe(name, [] if name.startswith("phrases") else FILES)
    assert recipe.output == f"runs/{name}"
    # A checkpoint holds these values, which a search takes as they are.
    assert DecodingOptions(**recipe.to_dict()["decode"]).beam == recipe.decode.beam
    loaded = [load_recipe(name, words) for words in commands(name)]
    for recipe in loaded:
        recipe.model_config(vocab_size=100)
    # The commands may run at the same time.
    assert len({recipe.output for recipe in loaded}) == len(loaded)


DECODING = {
    "dlcl30": (4, 0.6, "power"),
    "transformer-base": (4, 0.6, "power"),
    # Wang et al. 2018, section 4.2.
    "layer-fusion": (8, 1.6, "gnmt"),
    # Zhou et al. 2016, section 4.3.
    "fflstm": (3, 0.0, "gnmt"),
    # The command of the authors of Li et al. 2020.
    "latent": (5, 1.0, "power"),
    "growing-big": (5, 0.0, "gnmt"),
}


@pytest.mark.parametrize("name", DECODING)
def test_the_decoding_is_that_of_the_papers(name):
    recipe = load_recipe(name, next(commands(name)))
    assert tuple(asdict(recipe.decode).values()) == DECODING[name]
