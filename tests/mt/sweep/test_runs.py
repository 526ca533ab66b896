"""How runs are started, ended and kept. A script stands for the process that trains."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from deepfast.mt.sweep import runs as module
from deepfast.mt.sweep.runs import Processes, Run, compare, run_all
from deepfast.mt.training import load_recipe

SCRIPT = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
recipe = json.loads((folder / "settings.json").read_text())
layers = recipe["model"]["encoder_layers"]
def stop(number, frame):
    (folder / "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
with open(folder.parent / "events", "a") as events:
    events.write(f"+{layers} {os.environ.get('OMP_NUM_THREADS')}\\n")
time.sleep(recipe["optim"]["lr"])
if (folder.parent / "broken").exists():
    print("one thing", "data: no text", sep="\\n")
    sys.exit(1)
with open(folder.parent / "events", "a") as events:
    events.write(f"-{layers}\\n")
found = {"seed": 1, "process_bytes": layers * 100, "steps": 1, "parameters": layers, "curve": [],
         "seconds": 1}
(folder / "result.json").write_text(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(module, "PROCESS", (sys.executable, "-S", str(path)))


@pytest.fixture
def make(tmp_path):
    def runs(*layers, seconds=0.01):
        recipe = load_recipe("phrases-small", ["model.dim=8", f"optim.lr={seconds}"])
        return [
            Run(f"{count} layers", replace(recipe, model=recipe.model | {"encoder_layers": count}),
                tmp_path / str(count))
            for count in layers
        ]  # fmt: skip

    return runs


def events(tmp_path):
    path = tmp_path / "events"
    return path.read_text().splitlines() if path.exists() else []


def most_at_once(lines):
    count = most = 0
    for line in lines:
        count += 1 if line[0] == "+" else -1
        most = max(most, count)
    return most


def collect(runs, **options):
    found = []
    run_all(runs, lambda run, result: found.append((run.name, result)), Processes(**options))
    return found


def test_a_finished_run_is_not_made_again(make, tmp_path):
    first = collect(make(1, 2))
    assert [name for name, _ in first] == ["1 layers", "2 layers"]
    assert collect(make(1, 2)) == first
    assert len(events(tmp_path)) == 4
    assert most_at_once(events(tmp_path)) == 1


def test_other_settings_are_refused_before_anything_starts(make, tmp_path):
    collect(make(1))
    other = make(2, 1, seconds=0.02)
    with pytest.raises(
        ValueError,
        match=r"/1: expected a run with the same settings, got other "
        r"settings \(optim.lr 0.01 -> 0.02\); choose another folder with --output",
    ):
        collect(other)  # fmt: skip
    assert len(events(tmp_path)) == 2
    (tmp_path / "1" / "settings.json").unlink()
    with pytest.raises(ValueError, match="got a result without settings"):
        collect(make(1))


def test_a_run_that_fails_is_a_result_and_is_made_again(make, tmp_path):
    (tmp_path / "broken").touch()
    ((_, found),) = collect(make(1))
    assert found["failed"] == "exit 1: data: no text"
    (tmp_path / "broken").unlink()
    ((_, found),) = collect(make(1))
    assert "failed" not in found


def test_jobs_at_once_share_the_cores(make, tmp_path):
    collect(make(1, 2, 3, 4, seconds=0.4), jobs=2)
    assert most_at_once(events(tmp_path)) == 2
    threads = {line.split()[1] for line in events(tmp_path) if line[0] == "+"}
    assert threads == {str(max(1, module.cores() // 2))}
    collect(make(5), threads=3)
    assert events(tmp_path)[-2] == "+5 3"


def test_as_many_jobs_as_the_memory_holds(make, tmp_path):
    # Each run takes 100 bytes a layer. The deepest is measured first, alone.
    collect(make(1, 2, 3, 4, seconds=0.4), jobs=4, memory=850)
    lines = events(tmp_path)
    assert lines[0].startswith("+4")
    assert lines[1] == "-4"
    assert most_at_once(lines) == 2


def test_a_run_that_does_not_fit_is_not_started(make, tmp_path):
    found = dict(collect(make(1, 2), jobs=2, memory=150))
    assert "failed" not in found["2 layers"]
    assert found["1 layers"]["failed"] == "not started: a run took 200 B, more than 150 B"
    # A deeper run than any so far is measured, alone.
    assert "failed" not in dict(collect(make(3), memory=150))["3 layers"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_processes(make, tmp_path, number):
    def send():
        while len(events(tmp_path)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    runs = make(1, 2, 3, seconds=60)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        collect(runs, jobs=2)
    assert time.monotonic() - started < 30
    assert [(run.folder / "saved").exists() for run in runs] == [True, True, False]
    assert not any((run.folder / "result.json").exists() for run in runs)


def test_runs_under_nohup_ignore_a_closed_terminal(make):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reported = []

    def report(run, found):
        os.kill(os.getpid(), signal.SIGHUP)
        reported.append(found)

    try:
        run_all(make(1, 2), report, Processes())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(reported) == 2


def test_an_error_while_reporting_leaves_no_process(make):
    def report(run, found):
        raise OSError("no space left")

    started = time.monotonic()
    # The first run is reported while the second one runs.
    with pytest.raises(OSError, match="no space"):
        run_all([*make(1), *make(2, seconds=60)], report, Processes(jobs=2))
    assert time.monotonic() - started < 30


def test_a_comparison_is_written_as_it_grows(make, monkeypatch, capsys):
    """Every line once before any line twice, and at the end also after an interrupt."""
    monkeypatch.setattr(module, "EVERY", -1)
    first, second, third, fourth = make(1, 2, 3, 4)
    lines, written = {"a": [first, third], "b": [second, fourth]}, []
    monkeypatch.setattr(module, "in_words", lambda found: "done")
    results = compare(lines, Processes(), written.append)
    assert [[len(own) for own in found.values()] for found in written] == [
        [1, 0], [1, 1], [2, 1], [2, 2], [2, 2],
    ]  # fmt: skip
    assert results == written[-1]
    assert [list(own) for own in results.values()] == [[first, third], [second, fourth]]
    assert capsys.readouterr().out.splitlines()[0] == "1 layers, seed 1: done"

    def stopped(runs, report, processes):
        report(first, {"seed": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "EVERY", 60)
    monkeypatch.setattr(module, "run_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(lines, Processes(), written.append)
    assert written[-1] == {"a": {first: {"seed": 1}}, "b": {}}
