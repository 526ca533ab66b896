"""`make gpu` without a GPU: its dry run, its results and its clock."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("xdist")

from bench.gpu import __main__ as gpu
from bench.gpu import launches, machine, page, plugin, sweep
from bench.gpu.clock import Bench, Variant
from bench.gpu.results import Run
from bench.gpu.sections import BENCH, SECTIONS, SMOKE
from deepfast.launches import LAUNCHES

ROOT = Path(__file__).parents[2]


def dry_run(folder, *options):
    """The lines of a dry run's results, and its page."""
    assert gpu.main(["--dry-run", "--output", str(folder), *options]) == 0
    lines = [json.loads(line) for line in (folder / "dry-run.jsonl").read_text().splitlines()]
    return lines, (folder / "dry-run.md").read_text()


@pytest.mark.exhaustive
def test_a_dry_run(tmp_path):
    words = ["--stage", "tests", "--tests", "tests/gpu/test_ops.py::test_the_reference_draws_alike"]
    lines, told = dry_run(tmp_path, *words, "--copies", str(tmp_path.parent))
    assert [(x["stage"], x["outcome"]) for x in lines if x["kind"] == "item"] == [
        ("tests", "passed")
    ]
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
    stage = gpu.Stage("tests", run, gpu.arguments(["--dry-run", *["--again"] * again]))
    stage.pytest(["file"], 1)
    left = {word for word in commands[0] if word.startswith("--deselect")}
    assert left == (set() if again else {"--deselect=one", "--deselect=three"})


@pytest.mark.exhaustive
def test_every_stage_of_a_dry_run(tmp_path):
    lines, told = dry_run(tmp_path)
    run = Run(str(tmp_path / "dry-run.jsonl"), lines[0]["sources"], True, 1.0)
    assert [x["stage"] for x in run.lines("run")] == list(gpu.STAGES)
    assert all(x["status"] == "ok" for x in run.lines("run"))
    for by in ("cuda", "triton"):
        for name in launches.names(by):
            assert f"bench/gpu/launches.py::test_launch[{by}-{name}]" in run.done("smoke")
    found = run.lines("row")
    assert {x["section"] for x in found} == set(SECTIONS)
    assert all(x["median_seconds"] > 0 for x in found if x["seconds"])
    assert all(x["value"] is not None for x in run.lines("target"))
    wanted = " ".join(x["what"] for x in run.lines("target"))
    mixing = ("depth mix forward", "depth mix pull", "stack and sum", "DenseFormer")
    for part in ("LN forward", "LN backward", *mixing, "SDPA and varlen", "over the residual"):
        assert part in wanted
    assert all(f"## {name}" in told for name in (*SECTIONS, "Targets", "profile"))


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
    assert SMOKE == ("copy", "training ratio")
    assert BENCH[0] == "training"
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

    runs = iter([None])
    makers = {
        "whole": lambda: made.append(known()) or Variant(run=lambda: None),
        "made badly": broken, "runs badly": lambda: Variant(run=broken),
        "runs once": lambda: made.append(known()) or Variant(run=lambda: next(runs)),
    }  # fmt: skip
    assert list(bench.case("a case", makers)) == ["whole"]
    # A row comes before the next variant is prepared, which may take minutes to compile.
    assert made == [set(), {"whole"}]
    assert len(bench.failed) == 3
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
    machine.compile_ops(["89"])
    assert machine.build.CUDA_ARCHITECTURES == ("89",)
    assert targets == [machine.library.in_package()]
