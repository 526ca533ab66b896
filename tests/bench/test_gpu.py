"""The parts of `bench.gpu`: its processes and their journals, the results file, the clock."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench.gpu import __main__ as gpu
from bench.gpu import log, machine, page, profiling, results, stages, sweep, workers
from bench.gpu.clock import Bench, Clock, Variant
from deepfast.measure.rows import Row

ROOT = Path(__file__).parents[2]


# ---- processes and their journals ----------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
path = os.environ["DEEPFAST_JOURNAL"]
def write(**event):
    with open(path, "a") as file:
        file.write(json.dumps(event) + "\\n")
done = []
if os.path.exists(path):
    events = [json.loads(line) for line in open(path) if line.strip().endswith("}")]
    done = [event.get("end") for event in events]
for item in sys.argv[1:]:
    if item in done:
        continue
    write(begin=item)
    if item == "abort":
        print("this one aborts", flush=True)
        open(path, "a").write('{"half a li')
        os.abort()
    if item == "hang":
        time.sleep(60)
    write(end=item, outcome="ok", seconds=0.0, text="")
    if item == "exit":
        sys.exit(3)
write(finished=True)
"""


def play(*items, seconds=30.0, item_seconds=0.5):
    """Outcomes by item, the last event, and the problems, of a process with these items."""
    events = []
    problems = workers.run(
        [workers.Task("a task", [sys.executable, "-c", SCRIPT, *items])],
        lambda task, event: events.append(event), seconds=seconds,
        item_seconds=lambda item: item_seconds, environment=dict(os.environ),
    )  # fmt: skip
    ends = [event for event in events if "end" in event]
    assert len({event["end"] for event in ends}) == len(ends)
    return {event["end"]: event for event in ends}, events[-1], problems


def test_a_crash_and_a_hang_cost_one_item():
    found, last, problems = play("one", "abort", "two", "hang", "exit", "three")
    assert {name: event["outcome"] for name, event in found.items()} == {
        "one": "ok", "abort": "crashed", "two": "ok", "hang": "stopped", "exit": "ok",
        "three": "ok",
    }  # fmt: skip
    assert "exit status -6" in found["abort"]["text"]
    assert "this one aborts" in found["abort"]["text"]
    assert last["exit"] == 0
    assert problems == []


def test_out_of_time():
    found, _, problems = play("one", "hang", "two", seconds=1.0, item_seconds=60)
    assert {name: event["outcome"] for name, event in found.items()} == {
        "one": "ok", "hang": "stopped"
    }  # fmt: skip
    assert problems == ["a task: stopped: out of time"]


def test_a_process_that_cannot_start():
    problems = workers.run(
        [workers.Task("a task", [sys.executable, "-c", "raise SystemExit('no such thing')"])],
        lambda task, event: None, seconds=30, item_seconds=lambda item: 1,
        environment=dict(os.environ),
    )  # fmt: skip
    assert len(problems) == 1
    assert "no such thing" in problems[0]


KILLED = """
import os, sys
from pathlib import Path
from bench.gpu import results, workers
machine = {"device": "a device"}
found = results.Results(Path(sys.argv[1]), "abc", {"date": "now", "dry_run": True,
                                                   "machine": machine})
def take(task, event):
    if "end" in event:
        found.part("launches").setdefault("triton", {})[event["end"]] = event
workers.run([workers.Task("t", [sys.executable, "-c", sys.argv[2], "one", "hang"])], take,
            seconds=60, item_seconds=lambda item: 60, environment=dict(os.environ),
            tick=found.save)
"""


def test_a_killed_command_keeps_what_it_had(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), SCRIPT],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    path, end = tmp_path / "a-device.json", time.monotonic() + 60
    while time.monotonic() < end and not (path.exists() and '"one"' in path.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = json.loads(path.read_text())["sources"]["abc"]
    assert list(record["launches"]["triton"]) == ["one"]
    assert "1 of 1 launches ran" in path.with_suffix(".md").read_text()


def test_shares_of_tests():
    groups = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"], ["d1"]]
    parts = [log.share(groups, i, 2) for i in range(2)]
    assert sorted(chain(*parts)) == sorted(chain(*groups))
    assert [len(part) for part in parts] == [4, 3]
    for group in groups:
        assert any(set(group) <= set(part) for part in parts)


# ---- the results file ----------------------------------------------------------------------------


def results_in(folder, digest="abc"):
    run = {"date": "today", "dry_run": True, "machine": {"device": "A device"}}
    return results.Results(folder, digest, run)


def row(variant, seconds, what="a case"):
    found = Row(what=what, variant=variant, seconds=[seconds]).as_dict()
    return found | {"fraction_of_copy": None}


def test_results_of_other_sources_stay_apart(tmp_path):
    for digest, variant in (("abc", "old"), ("def", "new")):
        found = results_in(tmp_path, digest)
        found.part("sections")["LN"] = {"status": "ok", "rows": [row(variant, 1.0)]}
        found.save(now=True)
    data = json.loads((tmp_path / "a-device.json").read_text())
    assert set(data["sources"]) == {"abc", "def"}
    told = (tmp_path / "a-device.md").read_text()
    assert "| new |" in told
    assert "| old |" not in told
    assert "other kernel sources" in told
    assert "abc" in told


def test_rows_of_separate_runs_add_up():
    old = {"rows": [row("a", 1.0), row("b", 2.0)], "notes": ["x"], "errors": ["raised"]}
    new = {"rows": [row("b", 3.0), row("c", 4.0)], "notes": ["x", "y"], "errors": []}
    found = results.merge(old, new)
    assert {r["variant"]: r["median_seconds"] for r in found["rows"]} == {"a": 1, "b": 3, "c": 4}
    assert found["notes"] == ["x", "y"]
    assert found["errors"] == []


def test_an_unreadable_file_is_kept_aside(tmp_path, capsys):
    (tmp_path / "a-device.json").write_text('{"device": ')
    results_in(tmp_path).save(now=True)
    assert "a-device.unreadable.json" in capsys.readouterr().out
    assert (tmp_path / "a-device.unreadable.json").read_text() == '{"device": '
    assert set(json.loads((tmp_path / "a-device.json").read_text())["sources"]) == {"abc"}


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    """Sections that are ok and files that passed; a failed one runs again."""
    started = []

    def run(self, tasks, take, item_seconds, seconds=0):
        started.extend(word for task in tasks for word in task.command)

    monkeypatch.setattr(stages.Stage, "run", run)
    options = gpu.arguments(["--dry-run", "--tests", "tests/a.py", "tests/b.py"])
    stage = stages.Stage(results_in(tmp_path), options, 60.0)
    stage.results.part("sections").update(copy={"status": "ok"}, mixing={"status": "crashed"})
    fine = {"collected": 3, "passed": 2, "failed": [], "skipped": ["c"], "seconds": 0.0}
    stage.results.part("tests").update({"tests/a.py": fine, "tests/b.py": fine | {"passed": 1}})
    stages.measure(stage, ("copy", "mixing"))
    stages.tests(stage)
    assert {"mixing", "tests/b.py"} <= set(started)
    assert not {"copy", "tests/a.py"} & set(started)
    options.again = True
    stages.measure(stage, ("copy", "mixing"))
    stages.tests(stage)
    assert {"copy", "tests/a.py"} <= set(started)


def test_a_proof_is_kept_and_told(tmp_path, monkeypatch):
    entry = {"errors": {"cuda": "wrong dx", "triton": None},
             "seconds": {"512": {"triton": 1e-5, "reference": 2e-5}}}  # fmt: skip
    proved = json.dumps({"source": "a file", "key": {}, "ops": {"layer_norm": {"float16": entry}}})
    calls = []

    def run(command, **options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, proved, "a line of the log")

    monkeypatch.setattr(stages.subprocess, "run", run)
    monkeypatch.setattr(machine, "proved", lambda: False)
    stage = stages.Stage(results_in(tmp_path), gpu.arguments([]), 60.0)
    stages.prove(stage)
    # Once in a command.
    stages.prove(stage)
    assert len(calls) == 1
    assert stage.problems == ["deepfast prove: exit status 1"]
    told = (tmp_path / "a-device.md").read_text()
    assert "layer_norm float16: cuda failed (wrong dx), triton is proved" in told
    assert "width 512: triton serves" in told
    assert "a line of the log" in told


# ---- measuring -----------------------------------------------------------------------------------


def test_a_variant_that_raises_leaves_the_others():
    saved = []
    bench = Bench("cpu", saved.append)

    def broken():
        raise RuntimeError("this one is broken")

    runs = iter([None])
    makers = {"whole": lambda: Variant(run=lambda: None), "made badly": broken}
    makers["runs badly"] = lambda: Variant(run=broken)
    makers["runs once"] = lambda: Variant(run=lambda: next(runs))
    assert list(bench.case("a case", makers)) == ["whole"]
    assert [row["variant"] for row in saved[-1]["rows"]] == ["whole"]
    texts = [error["error"] for error in saved[-1]["errors"]]
    assert len(texts) == 3
    assert sum("this one is broken" in text for text in texts) == 2


def test_a_variant_is_reported_when_it_has_run_once():
    told, made = [], []

    def maker(name):
        def make():
            made.append((name, list(told[-1]) if told else []))
            return Variant(run=lambda: None)

        return make

    rows, _ = Clock("cpu").measure(
        {name: maker(name) for name in "abc"}, seconds=0, rounds=(5, 5), report=told.append
    )
    # Before the next one is prepared, which may take minutes to compile.
    assert made == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]
    assert [len(row.seconds) for row in rows.values()] == [5, 5, 5]


def test_a_setting_reaches_the_kernel_and_ends():
    from deepfast.kernels import layer_norm, mix_rows

    tile, kernel, seen = layer_norm.forward_tile, mix_rows.mix_rows_dot_kernel, []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args, options))

    with sweep.setting("layer_norm", {"forward_tile": lambda *_: "another"}, {}):
        assert layer_norm.forward_tile(512, 2) == "another"
    assert layer_norm.forward_tile is tile
    sweep._With(Kernel(), {"num_warps": 8})[(3,)](1, num_warps=4, BD=64)
    assert seen == [((3,), (1,), {"num_warps": 8, "BD": 64})]
    with sweep.setting("mix_rows", {}, {"mix_rows_dot_kernel": {"STAGES": 1}}):
        assert mix_rows.mix_rows_dot_kernel.kernel is kernel
    assert mix_rows.mix_rows_dot_kernel is kernel


def test_what_ncu_prints_is_read():
    names = list(profiling.METRICS)
    head = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *names])
    units = ",".join(f'"{unit}"' for unit in ["", "", *["u"] * len(names)])
    values = ",".join(f'"{value}"' for value in ["0", "layer_norm_fwd_kernel", *range(len(names))])
    text = f"==PROF== Connected\nok\n{head}\n{units}\n{values}\n"
    (found,) = profiling.kernels(text)
    assert found["kernel"] == "layer_norm_fwd_kernel"
    assert [found[said] for said in profiling.METRICS.values()] == [
        str(i) for i in range(len(names))
    ]
    assert "layer_norm_fwd_kernel" in "\n".join(
        page._profile({"profile": {"ncu of triton": {"launches": 1, "kernels": [found]}}})
    )
