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


# ---- what a run decides --------------------------------------------------------------------------


def table_module():
    from bench.gpu import table

    return table


def a_run(**changes):
    """Results of a GPU on which everything passed; cuda is faster at 512, triton at 1024."""
    fine = {"status": "ok", "passed": 9, "failed": [], "skipped": []}
    groups = (
        "layer_norm", "activation", "depth_mix", "depth_attention", "boundary", "attention",
        "stacks",
    )  # fmt: skip
    rows = [
        {"what": f"LN {which}, T=9, D={D}, bf16", "variant": f"deepfast, {by}",
         "median_seconds": s}
        for which in ("forward", "backward")
        for D, by, s in ((512, "cuda", 1), (512, "triton", 2), (1024, "cuda", 3),
                         (1024, "triton", 2), (4096, "triton", 1))
    ]  # fmt: skip
    return {
        "dry_run": False, "complete": True, "tests": dict.fromkeys(groups, fine),
        "sections": {"layer_norm": {"rows": rows}},
    } | changes  # fmt: skip


def test_a_run_decides_between_the_backends():
    table = table_module()
    ops = ("layer_norm", "depth_mix", "boundary")
    # An op without a kernel in CUDA C++ is not proved there.
    more = ("layer_norm", "activation", "depth_mix", "depth_attention", "boundary", "attention")
    assert table.proved(a_run()) == {"cuda": ops, "triton": more}
    assert table.shapes(a_run()) == {"layer_norm": ((512, "cuda"), (1024, "triton"))}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_what_did_not_pass_is_not_proved(outcome):
    table, run = table_module(), a_run()
    told = [{"test": "tests/gpu/test_boundary.py::test_launchers[cuda-dtype0]"}]
    run["tests"]["boundary"] = run["tests"]["boundary"] | {outcome: told}
    triton = ("layer_norm", "activation", "depth_mix", "depth_attention", "boundary", "attention")
    assert table.proved(run) == {"cuda": ("layer_norm", "depth_mix"), "triton": triton}
    del run["tests"]["depth_mix"]
    left = ("layer_norm", "activation", "depth_attention", "attention")
    assert table.proved(run)["triton"] == left


def test_a_crash_proves_nothing():
    table = table_module()
    for status in ("failed, exit status -6", "failed, exit status 1", "stopped: out of time"):
        run = a_run()
        run["tests"]["layer_norm"] = run["tests"]["layer_norm"] | {"status": status}
        for ops in table.proved(run).values():
            assert "layer_norm" not in ops
    found = table.proved(a_run(sanitizer={"memcheck": "ok", "racecheck": "exit 9:"}))
    assert found["cuda"] == ()
    assert found["triton"]


def test_the_table_is_written_between_its_markers(tmp_path, monkeypatch, capsys):
    from deepfast import backend

    table = table_module()
    source = table.BACKEND.read_text()
    changed = table.rewrite(source, a_run())
    outside = [t for part in changed.split(table.BEGIN) for t in part.split(table.END)]
    assert outside[0] + outside[2] == source.split(table.BEGIN)[0] + source.split(table.END)[1]
    names = {}
    exec(outside[1], {}, names)
    assert names["SHAPES"] == table.shapes(a_run())
    monkeypatch.setattr(backend, "SHAPES", names["SHAPES"])
    for dim, name in ((1, "cuda"), (512, "cuda"), (513, "triton"), (9999, "triton")):
        assert backend.measured("layer_norm", torch.bfloat16, dim) == name
    assert backend.measured("layer_norm", torch.float32, 512) is None
    assert backend.measured("boundary", torch.bfloat16, 512) is None
    path = tmp_path / "dry.json"
    path.write_text(json.dumps(a_run(dry_run=True)))
    assert table.main([str(path)]) == 1
    assert "expected a complete run" in capsys.readouterr().err
    assert table.BACKEND.read_text() == source


def test_what_is_measured_decides_between_two_defaults(monkeypatch):
    from deepfast import backend

    monkeypatch.setattr(backend, "PROVED", {"cuda": ("layer_norm",), "triton": ("layer_norm",)})
    monkeypatch.setattr(backend, "SHAPES", {"layer_norm": ((512, "triton"), (1024, "cuda"))})
    monkeypatch.setattr(backend, "refusal", lambda *_: None)
    monkeypatch.setattr(backend, "_launchers", lambda *_: None)
    backend._resolve.cache_clear()
    try:
        for dim, name in ((512, "triton"), (513, "cuda")):
            assert backend.choose("layer_norm", None, "cuda", torch.bfloat16, dim)[0] == name
        # The measurement does not matter for a backend on request or another dtype.
        assert backend.choose("layer_norm", "cuda", "cuda", torch.bfloat16, 512)[0] == "cuda"
        assert backend.choose("layer_norm", None, "cuda", torch.float32, 512)[0] == "cuda"
    finally:
        backend._resolve.cache_clear()
