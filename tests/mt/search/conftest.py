"""Small models to search with: a Transformer with random weights, and a table of logits."""

from functools import partial

import pytest
import torch

from deepfast.mt.data import Vocabulary
from tests.mt.models.kinds import make, save

SENTENCES = [
    "a small house stands by the river",
    "the old bridge over the river is closed",
    "we walk home through the quiet village",
    "she reads a long book about bridges and houses",
    "12 small boats wait for 7 people",
] * 3
FAST = ["--beam", "2", "--max-length", "6", "--device", "cpu"]
"""Arguments of a search that takes no time."""


def lively(vocab_size=9, seed=0, name="dlcl", **changes):
    """A tiny model whose predictions are neither flat nor a copy of its input."""
    return make(name, torch.float32, seed, vocab_size=vocab_size, **changes)


grown = partial(lively, name="dlcl on top")
recurrent = partial(lively, name="Deep-Att")


class Table(torch.nn.Module):
    """A model that looks its logits (V,) up: ``rule(sentence, prefix)``, prefix without bos."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule
        self.rows = []
        """The number of rows of every step."""
        self.config = type("Config", (), {})

    class State:
        def __init__(self, count):
            self.prefixes = [(index, None) for index in range(count)]

        def reorder(self, index, *, encoded=True):
            self.prefixes = [self.prefixes[i] for i in index.tolist()]

    def group(self, tokens):
        return 0

    def start(self, source_BS):
        return self.State(len(source_BS))

    def step(self, tokens_B, state):
        assert len(tokens_B) == len(state.prefixes)
        self.rows.append(len(tokens_B))
        state.prefixes = [
            (sentence, () if prefix is None else (*prefix, token))
            for (sentence, prefix), token in zip(state.prefixes, tokens_B.tolist(), strict=True)
        ]
        return torch.stack([self.rule(*prefix) for prefix in state.prefixes])


@pytest.fixture(scope="session")
def vocabulary():
    return Vocabulary.train(SENTENCES, 60)


@pytest.fixture(scope="session")
def model(vocabulary):
    return lively(len(vocabulary), seed=3)


@pytest.fixture(scope="session")
def write(tmp_path_factory, vocabulary):
    """write(model, **changes): the path of a new checkpoint file."""

    def run(model, **changes):
        path = tmp_path_factory.mktemp("checkpoint") / "model.pt"
        return save(path, model, **{"vocabulary": vocabulary.to_bytes()} | changes)

    return run


@pytest.fixture(scope="session")
def checkpoint(write, model):
    """A checkpoint file of `model`."""
    return write(model)


@pytest.fixture(scope="session")
def grown_model(vocabulary):
    return grown(len(vocabulary))


@pytest.fixture
def text(tmp_path):
    """text(lines): the path of a file with these lines."""

    def write(lines, name="text"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return str(tmp_path / name)

    return write
