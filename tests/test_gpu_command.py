"""`make gpu` without a GPU: its dry run runs every stage at toy sizes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import __main__ as gpu
from bench.gpu import launches, machine, stages
from bench.gpu.sections import BENCH, SECTIONS, SMOKE
from deepfast.launches import LAUNCHES

ROOT = Path(__file__).parents[1]


def command(folder, stage, *options, cwd=ROOT):
    """A stage of a dry run in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--dry-run", "--output", str(folder),
         "--stage", stage, *options],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(cwd)}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the four stages leave behind, each run by a command of its own: about two minutes."""
    folder = tmp_path_factory.mktemp("results")
    copies = tmp_path_factory.mktemp("copies")
    for stage in stages.STAGES:
        done = command(folder, stage, "--copies", str(copies))
        assert done.returncode == 0, done.stdout + done.stderr
    (data,), (told,) = folder.glob("*.json"), folder.glob("*.md")
    assert sorted(path.name for path in copies.iterdir()) == [data.name, told.name]
    (record,) = json.loads(data.read_text())["sources"].values()
    return record, told.read_text()


def test_separate_stages_add_up(run):
    record, told = run
    assert [list(r["stages"]) for r in record["runs"]] == [[name] for name in stages.STAGES]
    assert all(s["status"] == "ok" for r in record["runs"] for s in r["stages"].values())
    for head in ("Each launch once", "Tests", "Targets", "compute-sanitizer", *SECTIONS):
        assert f"## {head}" in told
    assert "its numbers mean nothing" in told


def test_every_launch_runs(run):
    found = run[0]["launches"]
    assert set(found["triton"]) == set(LAUNCHES)
    assert set(found["cuda"]) == set(launches.names("cuda")) < set(found["triton"])
    assert {r["outcome"] for by in found.values() for r in by.values()} == {"ok"}
    assert run[0]["profile"]["memcheck of cuda, 1 of 1"]["launches"] == len(found["cuda"])


def test_every_section_has_numbers_and_no_errors(run):
    record, _ = run
    assert tuple(record["sections"]) == tuple(SECTIONS)
    for name, section in record["sections"].items():
        assert section["status"] == "ok"
        assert section["errors"] == []
        assert section["rows"], name
        for row in section["rows"]:
            assert row["median_seconds"] > 0
            assert (row["nbytes"] is None) == (row["fraction_of_copy"] is None)
        if name.startswith("sweep"):
            assert any("fastest is" in note for note in section["notes"])


def test_every_target_is_measured(run):
    targets = [t for s in run[0]["sections"].values() for t in s["targets"]]
    names = " ".join(t["what"] for t in targets)
    mixing = ("depth mix forward", "depth mix pull", "stack and sum", "DenseFormer")
    for part in ("LN forward", "LN backward", *mixing, "SDPA and varlen", "over the residual"):
        assert part in names
    assert all(t["value"] is not None for t in targets)


def test_the_training_step_comes_first():
    assert SMOKE == ("copy", "training ratio")
    assert BENCH[0] == "training"


def test_tests_run(run):
    (found,) = run[0]["tests"].values()
    assert found["passed"] == found["collected"] > 0
    assert found["failed"] == found["skipped"] == []


def test_every_gpu_test_is_run():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    found = set(stages.test_files(dry=False))
    assert files < found
    assert "tests/memory/test_count.py" in found


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# ---- a copy of the tree --------------------------------------------------------------------------


def test_a_copy_without_git_and_links(tmp_path, monkeypatch):
    # A few tests are enough.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k op_in_float32")
    kept = ("bench", "csrc", "deepfast", "kernels", "tests")
    for name in kept:
        shutil.copytree(
            ROOT / name, tmp_path / name, symlinks=True,
            ignore=lambda folder, names: {n for n in names if Path(folder, n).is_symlink()}
            | {"__pycache__", "results"},
        )  # fmt: skip
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert not (tmp_path / "deepfast" / "kernels").exists()
    # These tests need no emulator, which would have to be compiled.
    done = command(
        tmp_path / "out", "tests", "--tests", "tests/gpu/test_activation.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    (record,) = json.loads(path.read_text())["sources"].values()
    assert record["tests"]["tests/gpu/test_activation.py"]["passed"] > 0
    assert record["runs"][0]["machine"]["commit"] is None


def test_a_file_in_place_of_the_link(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "deepfast").mkdir()
    (tmp_path / "deepfast" / "kernels").write_text("../kernels")
    machine.link_kernels(tmp_path)
    machine.link_kernels(tmp_path)
    assert (tmp_path / "deepfast" / "kernels" / "__init__.py").exists()


def test_compiles_for_the_named_architecture(monkeypatch):
    class Build:
        CUDA_ARCHITECTURES = ("80", "90")

        @staticmethod
        def compile_ops(target):
            assert target == machine.OPS

    monkeypatch.setattr(machine, "module", lambda path: Build)
    machine.compile_ops(["89"])
    assert Build.CUDA_ARCHITECTURES == ("89",)
