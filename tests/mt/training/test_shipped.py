"""The shipped recipes: their commands, and the settings of the papers that they follow."""

import importlib.resources
import re
import shlex
from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import build
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
UNSAID = {
    "layer-fusion": {"decoder_connection": "residual", "encoder_fusion": None},
    "fflstm": {"columns": 2, "fast_forward": True, "bidirectional": True, "init_std": 0.07},
    "latent": {"norm_type": "layer", "activation_dropout": 0.0},
    "growing-big": {"dim": 1024, "num_heads": 16, "ffn_dim": 4096, "share_embeddings": "all",
                    "decoder_connection": "residual"},
}  # fmt: skip
"""Settings of the papers' models that a recipe's file leaves to the defaults."""


@pytest.mark.parametrize("name", DECODING)
def test_the_decoding_and_the_defaults_are_those_of_the_papers(name):
    recipe = load_recipe(name, next(commands(name)))
    assert tuple(asdict(recipe.decode).values()) == DECODING[name]
    model = asdict(recipe.model_config(vocab_size=100))
    wanted = UNSAID.get(name, {})
    assert {key: model[key] for key in wanted} == wanted
    schedule = "constant" if name == "fflstm" else "inverse_sqrt"
    assert (recipe.optim.schedule, recipe.optim.l2) == (schedule, 0.0)


def test_the_parameters_of_layer_fusion():
    """Table 2 of Wang et al. 2018; here the output has no biases, 0.006 million."""
    for changes, millions in (
        ("decoder_fusion=null fusion=null", 10.97),
        ("decoder_fusion=null fusion=null encoder_layers=6 decoder_layers=6", 16.50),
        ("decoder_fusion=average fusion.hops=null", 10.97),
        ("encoder_fusion=feed_forward decoder_fusion=feed_forward fusion.hops=null", 12.29),
        ("decoder_fusion=null encoder_fusion=attention fusion.hops=4", 11.90),
        ("fusion.hops=4", 11.90),
        ("encoder_fusion=feed_forward fusion.hops=4", 12.55),
    ):
        words = [f"model.{change}" for change in changes.split()]
        recipe = load_recipe("layer-fusion", [*FILES, *words])
        config = recipe.model_config(
            recipe.data.vocab_size, target_vocab_size=recipe.data.target_vocab_size
        )
        with torch.device("meta"):
            model = build(config)
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert count == pytest.approx(millions, abs=0.01), changes
