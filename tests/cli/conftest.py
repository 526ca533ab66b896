"""Runs of sweeps in this process, and standard output that cannot be written."""

import contextlib
import os
import runpy
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from deepfast.mt.sweep import runs


@pytest.fixture
def in_process(monkeypatch):
    """Makes the runs of a sweep in this process, one after the other, as theirs would."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

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
    yield
    torch.set_num_threads(threads)


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
