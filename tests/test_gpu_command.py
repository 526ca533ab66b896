"""`make gpu` without a GPU: its dry run runs every step at toy sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
SECTIONS = (
    "copy", "layer_norm", "depth_mix", "boundary", "linear_cross_entropy", "launching", "mixing",
    "attention", "training",
)  # fmt: skip


def start(folder, *options):
    """A dry run in its own process."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bench.gpu",
            "--dry-run",
            "--output",
            str(folder),
            *options,
        ],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "OUT"} | {"OUT": str(folder / "out")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Exit status, output, results and page of a run of the tests, and of the benchmarks."""
    # tests/gpu itself runs without a GPU elsewhere; this tests the groups and their processes.
    parts = {"tests": ("--sections", "--tests", "activation", "elsewhere")}
    parts["sections"] = ("--tests",)
    started = {}
    for name, options in parts.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "out").mkdir()
        started[name] = folder, start(folder, *options)
    results = {}
    for name, (folder, process) in started.items():
        output, _ = process.communicate(timeout=1500)
        (data,), (page,) = folder.glob("*.json"), folder.glob("*.md")
        assert sorted(p.name for p in (folder / "out").iterdir()) == [data.name, page.name]
        results[name] = process.returncode, output, json.loads(data.read_text()), page.read_text()
    return results


def test_every_section_has_numbers_and_no_errors(runs):
    status, output, data, page = runs["sections"]
    assert status == 0, output
    assert data["complete"]
    assert tuple(data["sections"]) == SECTIONS
    for name, section in data["sections"].items():
        assert section["status"] == "ok", output
        assert section["errors"] == []
        assert name in ("copy", "launching") or section["rows"], name
        for row in section["rows"]:
            assert row["median_seconds"] > 0
            assert (row["nbytes"] is None) == (row["fraction_of_copy"] is None)
        if name != "launching":
            assert section["copy_gb_per_second"] > 0
    assert "its numbers mean nothing" in page


def test_every_target_is_measured(runs):
    targets = [t for s in runs["sections"][2]["sections"].values() for t in s["targets"]]
    names = " ".join(t["what"] for t in targets)
    mixing = ("depth mix forward", "depth mix pull", "stack and sum", "DenseFormer")
    for part in ("LN forward", "LN backward", *mixing, "SDPA and varlen", "over the residual"):
        assert part in names
    assert all(t["value"] is not None for t in targets)


def test_groups_of_tests_run(runs):
    status, output, data, _ = runs["tests"]
    assert status == 0, output
    assert set(data["tests"]) == {"activation", "elsewhere"}
    for name, group in data["tests"].items():
        assert group["status"] == "ok"
        assert group["failed"] == []
        # Those of other folders need a GPU.
        assert (group["passed"] > 0) == (name == "activation")
        assert bool(group["skipped"]) == (name == "elsewhere")


def test_every_gpu_test_is_of_a_group():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    groups = gpu_module().TEST_GROUPS
    assert sorted(file for names in groups.values() for file in names) == sorted(files)


def gpu_module():
    from bench.gpu import __main__ as gpu

    return gpu


def results_in(folder):
    head = {"date": "today", "command": "none", "dry_run": True, "machine": {"device": "none"}}
    return gpu_module().Results(folder, "none-today", head)


def test_a_section_that_raises_is_kept_and_reported(tmp_path, monkeypatch):
    """In a process; a clock without a device is an example of a benchmark that raises."""
    gpu = gpu_module()
    results = results_in(tmp_path)
    results.data["tests"] = {"copy": {"status": "failed", "failed": [{"test": "t", "text": ""}],
                                      "passed": 0, "skipped": []}}  # fmt: skip
    monkeypatch.setattr(
        gpu, "child_environment", lambda dry: os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    gpu.run_section(results, "copy", False, 60.0)
    data = json.loads((tmp_path / "none-today.json").read_text())
    section = data["sections"]["copy"]
    if not torch.cuda.is_available():
        assert section["status"].startswith("failed")
    assert section["tests_failed"] == ["t"]
    assert not gpu.succeeded(data)
    assert "Tests of these kernels failed" in (tmp_path / "none-today.md").read_text()


def test_a_section_out_of_time_is_stopped(tmp_path):
    gpu = gpu_module()
    results = results_in(tmp_path)
    gpu.run_section(results, "copy", True, 0.05)
    assert results.data["sections"]["copy"]["status"].startswith("stopped after")
    assert not gpu.succeeded(results.data)


def test_a_variant_that_raises_leaves_the_others(tmp_path):
    from bench.gpu.clock import Bench, Variant

    saved = []
    bench = Bench("cpu", saved.append)

    def broken():
        raise RuntimeError("this one is broken")

    makers = {"whole": lambda: Variant(run=lambda: None), "made badly": broken}
    makers["runs badly"] = lambda: Variant(run=broken)
    assert list(bench.case("a case", makers)) == ["whole"]
    assert [row["variant"] for row in saved[-1]["rows"]] == ["whole"]
    texts = [error["error"] for error in saved[-1]["errors"]]
    assert len(texts) == 2
    assert all("this one is broken" in text for text in texts)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_module().main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
