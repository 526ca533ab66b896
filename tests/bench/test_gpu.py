"""`make gpu` without a GPU: its dry run, its results and its clock."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("xdist")

from bench.gpu import __main__ as gpu
from bench.gpu import launches, machine, page, plugin, sections, sweep
from bench.gpu.clock import Bench, Variant
from bench.gpu.results import Run
from bench.gpu.sections import SECTIONS
from deepfast.launches import LAUNCHES
from deepfast.selfcheck.store import digest

ROOT = Path(__file__).parents[2]


def dry_run(folder, *options, seconds=600.0) -> int | None:
    """The exit status of a dry run; None where it was ended after these seconds."""
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--output", str(folder), *options]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return None


def written(folder) -> Run:
    return Run(str(folder / "dry-run.jsonl"), digest(), True, 1.0)


@pytest.mark.exhaustive
def test_a_dry_run(tmp_path):
    words = ["--stage", "tests", "--tests", "tests/gpu/test_ops.py::test_the_reference_draws_alike"]
    assert dry_run(tmp_path, *words, "--copies", str(tmp_path.parent)) == 0
    found = [(x["stage"], x["outcome"]) for x in written(tmp_path).lines("item")]
    assert found == [("tests", "passed")]
    told = (tmp_path / "dry-run.md").read_text()
    assert "## tests" in told
    assert "its numbers mean nothing" in told
    assert (tmp_path.parent / "dry-run.jsonl").exists()


@pytest.mark.parametrize("again", [False, True])
def test_what_passed_is_left_out(run, monkeypatch, again):
    """Unless it is asked for; what failed runs again."""
    commands = []
    monkeypatch.setattr(
        gpu.Stage, "start", lambda self, command, **more: commands.append(command) or (0, "", "")
    )
    for item, outcome in (("one", "passed"), ("two", "failed"), ("three", "skipped")):
        run.write("item", stage="tests", item=item, outcome=outcome)
    real = replace(run, dry=False)
    stage = gpu.Stage("tests", real, gpu.arguments(["--again"] * again))
    stage.pytest(["file"], 1)
    left = {word for word in commands[0] if word.startswith("--deselect")}
    assert left == (set() if again else {"--deselect=one", "--deselect=three"})


@pytest.mark.exhaustive
def test_a_dry_run_that_is_cut_off_goes_on(tmp_path):
    """Ended at 20 random times it leaves files that parse, and no item runs again that passed."""
    times, run = random.Random(0), written(tmp_path)
    for _ in range(20):
        dry_run(tmp_path, seconds=times.uniform(3.0, 8.0))
        lines = Path(run.path).read_bytes().splitlines() if Path(run.path).exists() else []
        # A write that is cut off leaves half of the last line.
        assert all(isinstance(json.loads(line), dict) for line in lines[:-1])
        page_of = tmp_path / "dry-run.md"
        assert not page_of.exists() or page_of.read_text().startswith("# dry run")
    start = time.perf_counter()
    assert dry_run(tmp_path) == 0
    print(f"the last run took {time.perf_counter() - start:.0f} s")
    passed = Counter((x["stage"], x["item"]) for x in run.lines("item"))
    assert set(passed.values()) == {1}
    assert [x["stage"] for x in run.lines("run")][-len(gpu.STAGES) :] == list(gpu.STAGES)
    assert all(x["status"] == "ok" for x in run.lines("run"))
    for by in ("cuda", "triton"):
        for name in launches.names(by):
            assert f"bench/gpu/launches.py::test_launch[{by}-{name}]" in run.done("right")
    found = run.lines("row")
    assert {x["section"] for x in found} == set(SECTIONS) - {"curves"}
    assert all(x["median_seconds"] > 0 for x in found if x["seconds"])
    assert {x["what"].partition(",")[0] for x in run.lines("curve")} == {
        "deepfast", "a read in torch",
    }  # fmt: skip
    assert all(x["value"] is not None for x in run.lines("target"))
    wanted = " ".join(x["what"] for x in run.lines("target"))
    mixing = ("depth mix forward", "depth mix pull", "stack and sum", "DenseFormer")
    for part in ("LN forward", "LN backward", *mixing, "SDPA and varlen", "over the residual"):
        assert part in wanted
    told = (tmp_path / "dry-run.md").read_text()
    named = set(SECTIONS) - {"curves"}
    assert all(f"## {name}" in told for name in (*named, "Curves", "profile"))


ITEMS = """
import os, time, pytest
def test_one(): pass
def test_aborts(): os.abort()
def test_hangs(): time.sleep(60)
def test_two(): pass
def test_fails(): raise ValueError("this one fails")
"""


@pytest.mark.exhaustive
def test_a_crash_and_a_hang_cost_one_item(tmp_path):
    (tmp_path / "test_items.py").write_text(ITEMS)
    run = Run(str(tmp_path / "results.jsonl"), "abc", True, 3.0)
    subprocess.run(
        [*gpu.pytest_command(), "-n", "1", str(tmp_path / "test_items.py")],
        cwd=ROOT, env=os.environ | run.variable() | {plugin.STAGE: "tests"}, timeout=300,
        capture_output=True,
    )  # fmt: skip
    found = {x["item"].rpartition("::")[2]: x for x in run.lines("item")}
    assert {name: x["outcome"] for name, x in found.items()} == {
        "test_one": "passed", "test_aborts": "failed", "test_hangs": "failed",
        "test_two": "passed", "test_fails": "failed",
    }  # fmt: skip
    assert "crashed" in found["test_hangs"]["text"]
    assert "this one fails" in found["test_fails"]["text"]
    assert [item.rpartition("::")[2] for item in run.done("tests")] == ["test_one", "test_two"]


def test_stages_and_files():
    assert list(gpu.STAGES)[:6] == ["build", "right", "ratio", "copy", "workload", "curves"]
    assert set(sections.STAGES) < set(gpu.STAGES)
    assert list(sections.STAGES["ratio"])[:2] == ["copy", "training ratio"]
    assert set(launches.names("cuda")) < set(launches.names("triton")) <= set(LAUNCHES)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files | {"tests/memory/test_count.py"} <= set(gpu.test_files(dry=False))


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# ---- results and the clock -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return Run(str(tmp_path / "results.jsonl"), "abc", True, 1.0)


def test_results_of_other_sources_stay_apart_and_the_last_line_holds(run):
    Run(run.path, "def", True, 1.0).write("item", stage="tests", item="old", outcome="passed")
    for item, outcome in (("a", "failed"), ("a", "passed"), ("b", "passed"), ("b", "failed")):
        run.write("item", stage="tests", item=item, outcome=outcome, text="", seconds=0.0)
    with Path(run.path).open("a") as file:
        file.write('{"half a li')
    assert run.done("tests") == ["a"]
    assert run.others() == ["def"]
    run.write("run", date="today", stage="tests", status="ok", seconds=1, clocks=None,
              machine={"device": "A device"})  # fmt: skip
    # What comes after half a line is not lost.
    assert len(run.lines("run")) == 1
    assert run.done("bench") == []
    assert "## tests\n\n2 items: 1 failed, 1 passed." in page.page(run)


def test_a_variant_that_raises_leaves_the_others(run):
    bench, made = Bench(run, "a section"), []

    def broken():
        raise RuntimeError("this one is broken")

    def known():
        return {x["variant"] for x in run.lines("row")}

    makers = {
        "whole": lambda: made.append(known()) or Variant(run=lambda: None),
        "made badly": broken, "runs badly": lambda: Variant(run=broken),
        "last": lambda: made.append(known()) or Variant(run=lambda: None),
    }  # fmt: skip
    assert list(bench.case("a case", makers)) == ["whole", "last"]
    # A row comes before the next variant is prepared, which may take minutes to compile.
    assert made == [set(), {"whole"}]
    assert len(bench.failed) == 2
    assert sum("this one is broken" in text for text in bench.failed) == 2
    assert "| a case | whole |" in "\n".join(page._sections(run))


def test_a_setting_reaches_the_kernel_and_ends():
    from deepfast.kernels import layer_norm, mix_rows

    tile, kernel, seen = layer_norm.forward_tile, mix_rows.mix_rows_dot_kernel, []

    class Kernel:
        arg_names = "x", "STAGES"

        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args, options))

    with sweep.setting("layer_norm", {"forward_tile": lambda *_: "another"}, {}):
        assert layer_norm.forward_tile(512, 2) == "another"
    assert layer_norm.forward_tile is tile
    changed = sweep._With(Kernel(), {"num_warps": 8, "STAGES": 1})
    changed[(3,)](1, num_warps=4, BD=64)
    changed[(3,)](1, 4, num_warps=4)
    by_name = (3,), (1,), {"num_warps": 8, "BD": 64, "STAGES": 1}
    assert seen == [by_name, ((3,), (1, 1), {"num_warps": 8})]
    with sweep.setting("mix_rows", {}, {"mix_rows_dot_kernel": {"STAGES": 1}}):
        assert mix_rows.mix_rows_dot_kernel.kernel is kernel
    assert mix_rows.mix_rows_dot_kernel is kernel


def test_what_ncu_prints_is_read():
    names = list(gpu.METRICS)
    head = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *names])
    units = ",".join(f'"{unit}"' for unit in ["", "", *["u"] * len(names)])
    values = ",".join(f'"{value}"' for value in ["0", "layer_norm_fwd_kernel", *range(len(names))])
    (found,) = gpu.kernels(f"==PROF== Connected\nok\n{head}\n{units}\n{values}\n")
    assert found == {"kernel": "layer_norm_fwd_kernel"} | {
        said: str(i) for i, said in enumerate(gpu.METRICS.values())
    }


def test_a_file_in_place_of_the_link(tmp_path):
    """In a copy of the tree without symbolic links."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "deepfast").mkdir()
    (tmp_path / "deepfast" / "kernels").write_text("../kernels")
    machine.link_kernels(tmp_path)
    machine.link_kernels(tmp_path)
    assert (tmp_path / "deepfast" / "kernels" / "__init__.py").exists()


def test_compiles_for_the_named_architecture(monkeypatch):
    targets = []
    monkeypatch.setattr(machine.build, "CUDA_ARCHITECTURES", ("80", "90"))
    monkeypatch.setattr(machine.build, "compile_ops", targets.append)
    monkeypatch.setattr(machine.build, "why_no_cuda", lambda: None)
    machine.compile_ops(["89"])
    assert machine.build.CUDA_ARCHITECTURES == ("89",)
    assert targets == [machine.library.in_package(cuda=True)]
