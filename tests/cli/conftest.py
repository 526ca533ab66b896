"""Runs of sweeps in this process, and standard output that cannot be written."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepfast.cli import main
from deepfast.mt.sweep import runs


@pytest.fixture
def in_process(monkeypatch):
    """Makes the runs of a sweep in this process, one after the other, as theirs would."""

    def start(command, stdout, **_):
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            code = main(command[3:])
        return SimpleNamespace(poll=lambda: code, returncode=code, kill=int, wait=int)

    streams = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=start, **streams))


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
