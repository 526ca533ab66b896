"""`make gpu` without a GPU: its rows, its processes, and its dry run."""

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("xdist")

from bench.gpu import __main__ as gpu
from bench.gpu.rows import Rows, table

PROGRAM = """
import os, pathlib, sys, time
from bench.gpu import rows
rows.ITEM_SECONDS = 3
rows.torch.cuda.synchronize = rows.torch.cuda.empty_cache = lambda: None
def fail():
    raise ValueError("this one fails")
items = {"one": dict, "crash": os.abort, "hang": lambda: time.sleep(60), "fail": fail, "two": dict}
made = rows.Rows(pathlib.Path(sys.argv[1]))
made.measure("stage", (("what", form, run) for form, run in items.items()))
"""


def test_which_rows_are_measured(tmp_path, monkeypatch):
    """Those that are missing; in a later command also the errors, and with ``again`` all."""
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr("bench.gpu.rows.digest", lambda: "other kernels")
    Rows(path).add("stage", "what", "changed", note="ok")
    monkeypatch.undo()
    first = Rows(path)
    first.add("stage", "what", "good", seconds=2e-3, nbytes=4e6)
    path.write_bytes(path.read_bytes() + b'{"half a li')
    first.add("stage", "what", "bad", error="it failed", seconds=1e-3)
    later = Rows(path, since=1e12)
    forms = ("good", "bad", "missing", "changed")
    for rows, lacking in (
        (first, {"missing", "changed"}),
        (later, {"bad", "missing", "changed"}),
        (Rows(path, since=1e12, again=True), {*forms}),
    ):
        assert {form for form in forms if rows.lacks("stage", "what", form)} == lacking
    told = table(later.read())
    assert "2.0000 ms   1.000 of the first  2 GB/s" in told
    assert "0.500 of the first  ERROR it failed" in told


def test_no_memory_of_a_row_counts_in_the_next(tmp_path):
    """A step that refers to itself lives until Python collects cycles."""
    left = []

    def leave():
        step = torch.nn.Identity()
        step.itself = step
        left.append(weakref.ref(step))
        return {"alive": left[0]() is not None}

    gc.disable()
    try:
        items = [("what", form, leave) for form in "ab"]
        Rows(tmp_path / "rows.jsonl", dry=True).measure("stage", items)
    finally:
        gc.enable()
    rows = Rows(tmp_path / "rows.jsonl").read()
    assert [row["alive"] for row in rows.values()] == [True, False]


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_one_row(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    command = [sys.executable, "-c", PROGRAM, str(rows.path)]
    assert gpu.run(command, rows, 300) is None
    ended = "its process ended before it was done"
    failed = "ValueError: this one fails"
    expected = {"one": None, "crash": ended, "hang": ended, "fail": failed, "two": None}
    assert {form: row.get("error") for (_, _, form), row in rows.read().items()} == expected
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert "stopped after 1 s" in gpu.run(command, rows, 1)


@pytest.mark.slow
def test_a_dry_run(tmp_path):
    """Every row of every stage is measured, and none in a second run."""
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--output", str(tmp_path)]
    for more in ([], ["--stage", "curves"]):
        done = subprocess.run([*command, *more], cwd=gpu.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "dry-run.jsonl").read_text().split("\n")
    found = [tuple(json.loads(line)["key"]) for line in lines if line]
    again = found.pop()
    assert again == found[found.index(("curves", "the stage", "deepfast"))]
    assert {stage for stage, *_ in found} == {*gpu.STAGES}
    kinds = {(stage, form) for stage, _, form in found}
    for stage in ("copy", "workload", "ratio", "curves"):
        assert any(form.startswith("deepfast") for of, form in kinds if of == stage)
    assert {("copy", "deepfast, cuda"), ("copy", "torch.compile")} < kinds


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
