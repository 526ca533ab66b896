"""The same commands train, resume to the bit, and translate with another kind of model."""

import pytest
import torch

from deepfast.cli import main
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.training import (
    RecipeError,
    load_recipe,
    recipe_from_dict,
    train,
)

MODEL = {
    "kind": "fast_forward_lstm", "dim": 12, "embedding_dim": 8, "encoder_layers": 2,
    "decoder_layers": 2, "dropout": 0.2,
}  # fmt: skip


@pytest.fixture
def recipe(make_recipe):
    """recipe(dotted changes, model changes)"""

    def make(changes=(), **model):
        tree = make_recipe(changes).to_dict()
        return recipe_from_dict(tree | {"model": MODEL | model})

    return make


@pytest.mark.parametrize("attention", [True, False])
def test_resumed_as_uninterrupted(recipe, tmp_path, attention):
    schedule = {"optim.l2": 0.01, "optim.schedule": "constant", "train.validate_every": 4}
    straight = train(recipe(schedule | {"train.max_steps": 8}, attention=attention))
    broken = schedule | {"output": str(tmp_path / "broken")}
    train(recipe(broken | {"train.max_steps": 4}, attention=attention))
    resumed = train(recipe(broken | {"train.max_steps": 8, "resume": True}, attention=attention))
    one, other = (read_checkpoint(r.checkpoint) for r in (straight, resumed))
    assert one["kind"] == other["kind"] == "fast_forward_lstm"
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name]), name
    assert straight.best_nll == resumed.best_nll


def test_learns_and_translates(recipe, corpus, capsys):
    changes = {
        "train.max_steps": 100, "train.validate_every": 50, "train.save_every": 100,
        "train.average_last": 0, "optim.lr": 2e-2, "optim.warmup": 20, "data.max_tokens": 400,
    }  # fmt: skip
    sizes = {"dim": 32, "embedding_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    result = train(recipe(changes, **sizes, lr_scale=1.0, init_std=0.2, dropout=0.0))
    # From 4.1 nats it learns words and lengths; their order needs more steps than a test has.
    assert result.best_nll < 1.0
    model, _ = load_model(result.for_translation)
    assert model.describe() == "Deep-Att, 1 + 1 LSTM layers, 32 cells"
    capsys.readouterr()
    files = ["--source", str(corpus / "test.en"), "--reference", str(corpus / "test.de")]
    paths = [str(result.for_translation), str(result.checkpoint)]
    assert main(["score", "--checkpoint", *paths, *files, "--device", "cpu"]) == 0
    assert "chrF" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ((), {"heads": 2}, "model.heads: expected a field of FastForwardLSTMConfig"),
        ((), {"dim": 7}, "model.dim must be even, got 7"),
        ((), {"size": "big"}, "model.size: expected null for the kind fast_forward_lstm"),
        ({"memory": "keep"}, {}, "memory: expected null for a model without memory policies"),
    ],
)
def test_refused_with_a_sentence(recipe, changes, model, message):
    with pytest.raises(RecipeError, match=message):
        recipe(changes, **model)


def test_shipped_recipes():
    files = [f"data.{part}_{side}=x" for part in ("train", "dev") for side in ("source", "target")]
    full, small = load_recipe("fflstm", files), load_recipe("phrases-fflstm")
    assert full.model_config(8).encoder_layers == 9
    assert full.optim.lr == 5e-4
    assert full.optim.lr * full.model_config(8).lr_scale == pytest.approx(4e-5)
    assert small.model["kind"] == "fast_forward_lstm"
    # As in the paper.
    assert full.model["bias"]
    assert small.model["bias"]
