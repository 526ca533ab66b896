"""Checkpoints, runs of sweeps in this process, and standard output that cannot be written."""

import contextlib
import os
import runpy
import signal
import sys
from types import SimpleNamespace

import pytest

from deepfast.mt.models import kind_of
from deepfast.mt.sweep import runs
from deepfast.mt.training.checkpoint import save_checkpoint


@pytest.fixture
def in_process(monkeypatch):
    """Makes the runs of a sweep in this process, one after the other, as theirs would."""

    def start(run, threads):
        run.write()
        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["one", str(run.folder)])
        with (
            open(run.folder / runs.LOG, "a") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            pytest.raises(SystemExit) as ended,
        ):
            runpy.run_module("deepfast.mt.sweep.one", run_name="__main__")
        signal.signal(signal.SIGTERM, before)
        return SimpleNamespace(poll=lambda: ended.value.code, kill=int, wait=int)

    monkeypatch.setattr(runs, "_start", start)


@pytest.fixture
def output(monkeypatch):
    """output("closed"), output("full") and output("unread"): standard output is closed, its disk
    is full, or nobody reads it."""

    def become(state):
        stream = None
        if state == "full":
            stream = open("/dev/full", "w")  # noqa: SIM115 -- main drops what is left in it
        if state == "unread":
            reader, writer = os.pipe()
            os.close(reader)
            stream = os.fdopen(writer, "w")
        monkeypatch.setattr(sys, "stdout", stream)

    return become


@pytest.fixture
def save(tmp_path):
    """save(model, vocabulary) writes a checkpoint file and returns its path."""

    def write(model, vocabulary=b"none"):
        content = {"kind": kind_of(model.config), "config": vars(model.config),
                   "model": model.state_dict(), "vocabulary": vocabulary}  # fmt: skip
        save_checkpoint(tmp_path / "model.pt", content)
        return str(tmp_path / "model.pt")

    return write
