"""How runs are started, ended and kept. A script stands for the process that trains."""

import itertools
import os
import signal
import sys
import threading
import time

import pytest

from deepfast.mt.sweep import runs as module
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Run, make_runs
from deepfast.mt.training import load_recipe

SCRIPT = """
import json, os, pathlib, re, signal, sys, time
path = pathlib.Path(sys.argv[1])
folder, name = path.parent, path.parent.name
def stop(number, frame):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
def say(sign):
    with open(folder.parent / "events", "a") as events:
        places = (os.environ.get(x) for x in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"))
        print(sign + name, *places, file=events)
say("+")
time.sleep(float(re.search("lr: (.*)", path.read_text())[1]))
say("-")
found = {"best_nll": 2.5, "average_nll": None, "test_bleu": None}
(folder / "result.json").write_text(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(module, "TRAIN", (sys.executable, "-S", str(path)))


@pytest.fixture
def make(tmp_path):
    """make("a", "b") are two runs; their learning rate is the time that they take."""

    def runs(*names, seconds=0.01, seed=1, more=()):
        own = [f"optim.lr={seconds}", f"train.seed={seed}", *more]
        recipes = (load_recipe("phrases-small", [*own, f"output={tmp_path / n}"]) for n in names)
        return list(map(Run, map(Point, names), recipes))

    return runs


def events(tmp_path):
    path = tmp_path / "events"
    return path.read_text().splitlines() if path.exists() else []


def test_a_finished_run_is_not_made_again(make, tmp_path, capsys):
    # Where the ids of a text are kept is no setting.
    for more in ([], ["data.cache=elsewhere"]):
        runs = make("b", seed=2, more=more) + make("a", more=more)
        make_runs(runs, 1)
        found = {"best_nll": 2.5, "average_nll": None, "test_bleu": None, "nll": 2.5}
        assert [run.found for run in runs] == [{"seed": 2} | found, {"seed": 1} | found]
    # All first seeds run before any second one.
    assert [line[:2] for line in events(tmp_path)] == ["+a", "-a", "+b", "-b"]
    assert capsys.readouterr().out == "a, seed 1: dev NLL 2.5\nb, seed 2: dev NLL 2.5\n"
    make_runs(make("c"), 0)
    assert len(events(tmp_path)) == 4


def test_jobs_at_once_share_the_cores_and_the_gpus(make, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    make_runs(make("a", "b", "c", "d", seconds=0.4, more=["train.device=cuda"]), 2)
    lines = events(tmp_path)
    running = itertools.accumulate(1 if line[0] == "+" else -1 for line in lines)
    assert max(running) == 2
    started = [line.split() for line in lines if line[0] == "+"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {words[1] for words in started} == {threads}
    assert sorted(words[2] for words in started) == ["3", "3", "5", "5"]
    assert {words[2] for words in started[:2]} == {"3", "5"}
    # A run that is alone has all cores, and one that names its device keeps it.
    make_runs(make("e", more=["train.device=cuda:1"]), 1)
    assert events(tmp_path)[-1].split() == ["-e", "None", "3,5"]


def test_a_signal_ends_all_processes(make, tmp_path):
    def send():
        while len(events(tmp_path)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    runs = make("a", "b", "c", seconds=60)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make_runs(runs, 2)
    assert time.monotonic() - started < 30
    assert [(run.folder / "saved").exists() for run in runs] == [True, True, False]
    assert [run.found for run in runs] == [None] * 3


def test_an_error_after_a_run_leaves_no_process(make):
    def each():
        raise OSError("no space left")

    started = time.monotonic()
    # The first run ends while the second one runs.
    with pytest.raises(OSError, match="no space"):
        make_runs([*make("a"), *make("b", seconds=60)], 2, each)
    assert time.monotonic() - started < 30
