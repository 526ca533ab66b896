"""Checkpoints and configs that were written under the names before 0.1, and recipes with them.

The files in tests/data were written by commit 0975ac7.
"""

import json
from pathlib import Path

import pytest
import torch

import deepfast
from deepfast import renamed
from deepfast.mt.models.checkpoint import VERSION, load_model, read_checkpoint
from deepfast.mt.training.errors import RecipeError
from deepfast.mt.training.recipe_file import load_recipe

DATA = Path(__file__).parent / "data"
OLD = DATA / "checkpoint-version-1.pt"


def test_a_model_of_version_1():
    model, vocabulary = load_model(OLD)
    config = model.config
    assert (config.num_heads, config.norm_type, config.dlcl) == (
        2,
        "rms",
        {"weight_type": "vector"},
    )
    assert vocabulary == b"vocabulary"
    saved = torch.load(OLD, weights_only=True)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_recipe_of_version_1(tmp_path):
    content = read_checkpoint(OLD)
    assert content["version"] == VERSION
    found = content["recipe"]
    assert (found["recompute"], "memory" in found) == ("ffn+qkv", False)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(found))
    assert load_recipe(path).recompute == "ffn+qkv"
    assert renamed.recipe({"memory": "2GiB"}) == {"memory_budget": "2GiB"}


def test_the_config_of_a_connected_model():
    config = json.loads((DATA / "old-connected-config.json").read_text())
    (settings,) = config["depth_connections"]
    new = renamed.options(settings)
    assert new == {"norm": "post", "norm_type": "rms", "parent": "encoder", "weight_type": "vector"}
    assert renamed.options(new) == new


def test_a_connected_model_loads_an_old_config():
    transformers = pytest.importorskip("transformers")
    from deepfast import connected

    config = transformers.BertConfig.from_json_file(DATA / "old-connected-config.json")
    model = connected(transformers.BertModel)(config)
    assert model.encoder.depth_connection.weight_type == "vector"


@pytest.mark.parametrize(
    ("override", "now"),
    [
        ("model.heads=2", "model.num_heads"),
        ("model.norm_kind=rms", "model.norm_type"),
        ("model.dlcl.weight=vector", "model.dlcl.weight_type"),
        ("memory=lean", "recompute or memory_budget"),
    ],
)
def test_a_recipe_with_an_old_key_gets_the_new_one(override, now):
    key = override.partition("=")[0]
    with pytest.raises(RecipeError, match=f"unknown key {key}, it is now {now}$"):
        load_recipe("phrases-small", [override])


ENCODER = (2, 8, 2, 16)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: deepfast.nn.TransformerEncoder(2, 8, heads=2, ffn_dim=16),
         "TransformerEncoder() got an unexpected keyword argument 'heads', which is now num_heads"),
        (lambda: deepfast.nn.TransformerDecoder(*ENCODER, memory="lean"),
         "TransformerDecoder() got an unexpected keyword argument 'memory', which is now "
         "recompute"),
        (lambda: deepfast.nn.TransformerEncoderLayer(8, 2, 16, droput=0.0),
         "TransformerEncoderLayer() got an unexpected keyword argument 'droput'"),
        (lambda: deepfast.nn.TransformerEncoder(*ENCODER, dlcl={"weight": "vector"}),
         "DLCL() got an unexpected keyword argument 'weight', which is now weight_type"),
        (lambda: deepfast.connect(torch.nn.Sequential(torch.nn.LayerNorm(8)), norm="pre",
                                  weights="relu", connection="attnres"),
         "connect() got an unexpected keyword argument 'weights', which is now score_function"),
        (lambda: deepfast.memory.plan(heads=2, budget="1GiB", dim=8, tokens=8),
         "plan() got an unexpected keyword argument 'heads', which is now num_heads"),
    ],
)  # fmt: skip
def test_an_argument_with_an_old_name_gets_the_new_one(call, said):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == said


def test_an_error_inside_a_constructor_stays():
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        deepfast.nn.TransformerEncoder(2, 8)
