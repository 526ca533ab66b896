"""One run at a time in a folder."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepfast.mt.training import TrainingError, train
from deepfast.mt.training.run_folder import LOCK, only_run

fcntl = pytest.importorskip("fcntl")
REFUSED = rf"expected a folder that no other run uses, got one that process {os.getpid()} on "


def test_a_second_start_is_refused(make_recipe, tmp_path):
    folder = tmp_path / "new" / "run"
    recipe = make_recipe({"output": str(folder), "train.max_steps": 2})
    with only_run(folder):
        with pytest.raises(TrainingError, match=f"{folder}: {REFUSED}.* output=FOLDER"):
            train(recipe, quiet=True)
        assert [path.name for path in folder.iterdir()] == [LOCK]
    train(recipe, quiet=True)
    before = sorted(folder.iterdir())
    with only_run(folder), pytest.raises(TrainingError, match=REFUSED):
        train(make_recipe({"output": str(folder), "resume": True}), quiet=True)
    assert sorted(folder.iterdir()) == before
    assert LOCK not in [path.name for path in before]


@pytest.mark.exhaustive
def test_the_lock_ends_with_its_process(tmp_path):
    path = tmp_path / LOCK
    program = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    program += "print(file=f, flush=True); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(TrainingError, match="expected a folder that no other run uses"):
            only_run(tmp_path).__enter__()
        other.send_signal(signal.SIGKILL)
    assert path.exists()
    with only_run(tmp_path):
        assert str(os.getpid()) in path.read_text()
    assert not path.exists()


@pytest.mark.parametrize("method", ["unlink", "stat"])
def test_a_lock_that_cannot_be_removed_is_no_error_and_hides_none(tmp_path, monkeypatch, method):
    def read_only(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, only_run(tmp_path):
        patch.setattr(Path, method, read_only)

    def fail():
        with only_run(tmp_path):
            monkeypatch.setattr(Path, method, read_only)
            raise TrainingError("own error")

    with pytest.raises(TrainingError, match="own error"):
        fail()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(stream, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with only_run(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
