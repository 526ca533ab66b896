"""A corpus of a few words, and a recipe of a model that trains on it in milliseconds."""

import shutil
from pathlib import Path

import pytest
import torch

from deepfast.mt.training import recipe_from_dict, train
from deepfast.mt.training.corpus import load_corpus
from deepfast.mt.training.environment import settings
from deepfast.mt.training.trainer import Trainer
from tests.mt.training.runs import Killed, at_step, die
from tests.mt.words import reversed_pairs, write_pairs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with train, dev and test in en and de: word by word, in reverse order."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (part, count) in enumerate((("train", 240), ("dev", 20), ("test", 10))):
        write_pairs(folder, part, reversed_pairs(count, seed))
    return folder


@pytest.fixture
def make_recipe(corpus, tmp_path):
    """make_recipe({"train.max_steps": 3}): a tiny recipe with dotted changes."""

    def make(changes=()):
        tree = {
            "data": {
                f"{part}_{side}": str(corpus / f"{part}.{suffix}")
                for part in ("train", "dev", "test")
                for side, suffix in (("source", "en"), ("target", "de"))
            }
            | {"vocab_size": 60, "max_tokens": 120, "max_length": 40},
            "model": {"dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 2,
                      "decoder_layers": 1, "dropout": 0.2},
            "optim": {"lr": 5e-3, "warmup": 10},
            "train": {"device": "cpu", "max_steps": 8, "validate_every": 5, "save_every": 4,
                      "keep_last": 3, "average_last": 1, "log_every": 1, "tensorboard": False},
            "output": str(tmp_path / "run"),
        }  # fmt: skip
        for key, value in dict(changes).items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return recipe_from_dict(tree)

    return make


@pytest.fixture
def run(make_recipe):
    """run(changes) trains such a recipe."""
    return lambda changes=(): train(make_recipe(changes), quiet=True)


@pytest.fixture
def make_trainer(make_recipe, tmp_path):
    """make_trainer({"optim.accumulate": 3}): a new trainer of such a recipe."""

    def make(changes=(), ranks=None):
        recipe = make_recipe(changes)
        with settings(recipe.train):
            corpus = load_corpus(recipe.data, seed=recipe.train.seed, folder=tmp_path)
            return Trainer(recipe, corpus, torch.device("cpu"), ranks)

    return make


@pytest.fixture(scope="session")
def _finished():
    return {}


@pytest.fixture
def whole_run(make_recipe, tmp_path_factory, _finished):
    """Results of uninterrupted runs, each made once."""

    def run(changes):
        key = repr(sorted(changes.items()))
        if key not in _finished:
            folder = tmp_path_factory.mktemp("whole")
            _finished[key] = train(make_recipe(changes | {"output": str(folder)}), quiet=True)
        return _finished[key]

    return run


@pytest.fixture
def finished(whole_run, tmp_path):
    """finished(changes): a copy of such a run, in the folder of `make_recipe`."""

    def copy(changes=()):
        return Path(shutil.copytree(whole_run(dict(changes)).output, tmp_path / "run"))

    return copy


@pytest.fixture
def killed_at(run, monkeypatch):
    """killed_at(step, changes) kills a run in the given step of the given class of model."""

    def killed(step, changes=(), model=torch.nn.Module):
        with monkeypatch.context() as patch:
            at_step(patch, step, die, model)
            with pytest.raises(Killed):
                run(changes)

    return killed
