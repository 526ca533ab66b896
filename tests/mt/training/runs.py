"""What tests of whole runs share: their metrics and files, and how to strike in a step."""

import errno
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from deepfast.mt.models.checkpoint import read_run
from deepfast.mt.models.checkpoint_folder import read_tensors
from deepfast.mt.training import load_checkpoint
from deepfast.mt.training.trainer import Trainer

TIMES = ("seconds", "source_tokens_per_second", "target_tokens_per_second", "memory_bytes")


def rows(folder, event=None):
    """The metrics of a run without what differs from run to run: times and memory."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return [row for row in kept if event in (None, row["event"])]


def names(folder):
    """The checkpoints of a run."""
    return sorted(p.name for p in Path(folder).iterdir()
                  if p.suffix == ".pt" or p.name.startswith("step-"))  # fmt: skip


def files_of(folder):
    """The content of every file."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def _numbers(value):
    """One value, or those of all layers; a layer that is frozen has none."""
    values = value if isinstance(value, list) else [value]
    return [math.nan if x is None else x for x in values]


def assert_losses_agree(one, other):
    """Losses, gradient norms and validations of two runs, to rounding."""
    for expected, got in zip(rows(one), rows(other), strict=True):
        assert (got["event"], got["step"]) == (expected["event"], expected["step"])
        for key in expected:
            if key in ("loss", "nll", "accuracy") or key.startswith("grad_norm"):
                near = pytest.approx(_numbers(expected[key]), rel=1e-5, nan_ok=True)
                assert _numbers(got[key]) == near, (key, got, expected)


def tensors(path):
    """The tensors of a checkpoint; of a step also the optimizer's."""
    if path.is_file():
        return load_checkpoint(path)["model"]
    table = read_run(path)["tensors"]
    found = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape, _) in table.items()}
    read_tensors(path, table, found)
    return found


def _written(step):
    """The table and the files of a step's tensors."""
    return read_run(step)["tensors"], [p.read_bytes() for p in sorted(step.glob("*.distcp"))]


def assert_same_runs(one, other):
    """Metrics, and the tensors of all checkpoints, to the bit."""
    assert rows(one) == rows(other)
    assert names(one) == names(other)
    for name in names(one):
        a, b = Path(one, name), Path(other, name)
        # Files are compared faster. Several ranks may divide the same tensors in another way.
        if a.is_file() or _written(a) != _written(b):
            torch.testing.assert_close(tensors(b), tensors(a), rtol=0, atol=0, equal_nan=True)


def at_step(monkeypatch, step, action, model=torch.nn.Module):
    """Calls `action(trainer)` before the given optimizer step of a model of this class."""
    original = Trainer.train_step

    def train_step(self):
        if self.step + 1 == step and isinstance(self.model, model):
            action(self)
        original(self)

    monkeypatch.setattr(Trainer, "train_step", train_step)


class Killed(BaseException):
    """The error that ends a test's run; nothing may catch it."""


def die(*args):
    raise Killed


def interrupt(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def full_disk(trainer):
    """When a checkpoint is written, after the metrics before it."""
    metrics = os.stat(os.path.join(trainer.recipe.output, "metrics.jsonl"))

    def fsync(descriptor):
        if not os.path.samestat(os.fstat(descriptor), metrics):
            raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = fsync
