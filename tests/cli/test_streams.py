"""The command line with closed streams."""

import os
import signal
import sys

import pytest

from deepfast.cli import main
from deepfast.mt.training.trainer import Trainer

TRAIN = (
    "mt", "train", "phrases-small", "train.max_steps=2", "data.train_size=100", "data.dev_size=8",
    "data.test_size=8", "data.vocab_size=150", "data.vocab_at_most=true", "model.dim=16",
    "model.num_heads=2", "model.ffn_dim=16", "model.encoder_layers=1", "model.decoder_layers=1",
    "train.save_every=1", "train.validate_every=1", "train.threads=1",
)  # fmt: skip
FULL = "standard output: cannot be used (No space left on device)"
CLOSED = "standard output is closed"
BENCH = ["bench", "layer_norm", "--tokens", "1", "--dim", "2", "--rounds", "1"]


@pytest.mark.parametrize(
    ("words", "state", "said"),
    [
        (["info"], "full", f"deepfast info: {FULL}\n"),
        (["info"], "closed", f"deepfast info: {CLOSED}\n"),
        (["info"], "unread", ""),
        # A table ends with its reader as text does.
        (BENCH, "unread", ""),
        (["--version"], "closed", f"deepfast: {CLOSED}\n"),
        (["mt", "score", "--help"], "closed", f"deepfast mt score: {CLOSED}\n"),
    ],
)
def test_results_that_cannot_be_written(output, capsys, words, state, said):
    output(state)
    assert main(words) == int(bool(said))
    assert capsys.readouterr().err == said


def test_errors_are_not_written_among_results(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["mt", "score", "none", "none"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("state", ["closed", "full"])
def test_training_goes_on_without_standard_output(output, tmp_path, monkeypatch, state):
    pytest.importorskip("sentencepiece")
    output(state)
    assert main([*TRAIN, f"output={tmp_path}"]) == 0
    assert (tmp_path / "average.pt").exists()
    # A run that is stopped keeps its exit code, where nobody reads.
    step = Trainer.train_step

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    output("unread")
    assert main([*TRAIN, f"output={tmp_path / 'stopped'}"]) == 143
    assert len(list((tmp_path / "stopped").glob("step-*"))) == 1
