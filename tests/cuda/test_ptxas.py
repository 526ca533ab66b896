"""`make cuda-check`: every CUDA kernel compiles for every architecture, without spills, and
bench/results/ptxas.md is of these kernels."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ptxas.py")
# What a change may add to the committed registers before a test fails.
MORE_REGISTERS = 8


@pytest.fixture(scope="module")
def ptxas():
    spec = importlib.util.spec_from_file_location("ptxas", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(request, ptxas, tmp_path_factory):
    """One run of ptxas.py over all kernels; over two files if the table is of these sources."""
    if ptxas.build.find_nvcc() is None:
        pytest.skip("no nvcc was found: the CUDA kernels are not compiled")
    path = tmp_path_factory.mktemp("ptxas") / "report.json"
    command = [sys.executable, PROGRAM, "--json", path]
    if not request.config.getoption("all_cases"):
        command.append("--changed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_no_kernel_has_a_fault(report):
    assert not report["faults"], "\n" + "\n".join(report["faults"])


@pytest.mark.exhaustive
def test_the_table_is_of_these_kernels(report, ptxas):
    rewrite = "python tests/cuda/ptxas.py --write bench/results/ptxas.md"
    committed = {
        tuple(row[:2]): row
        for row in ptxas.read_table(ptxas.TABLE.read_text())
        if row[1] in report["architectures"]
    }
    found = {tuple(row[:2]): row for row in report["rows"]}
    assert set(found) == set(committed), f"{ptxas.TABLE.name} is not of these kernels; {rewrite}"
    if report["version"] not in ptxas.TABLE.read_text():
        pytest.skip(f"the table is of another nvcc than {report['version']}")
    column = ptxas.COLUMNS.index("registers")
    for key, row in found.items():
        most = int(committed[key][column]) + MORE_REGISTERS
        assert int(row[column]) <= most, f"{key}: {row[column]} registers, at most {most}"


@pytest.mark.exhaustive
def test_every_kernel_is_launched(report, ptxas):
    """A kernel that no case launches would not be tested."""
    column = ptxas.COLUMNS.index("threads")
    idle = sorted({row[0] for row in report["rows"] if row[column] == "-"})
    assert not idle


def test_faults_are_found(ptxas):
    """On a report in ptxas's format."""
    said = """
ptxas info    : Compiling entry function '_Z1aIfEvv_kernel' for 'sm_90'
ptxas info    : Function properties for _Z1aIfEvv_kernel
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem
"""
    (found,) = (m.groupdict() for m in ptxas.REPORT.finditer(said))
    assert found["sm"] == "90"
    assert (found["stack"], found["stores"], found["loads"]) == ("16", "4", "8")
    assert found["registers"] == "255"


def test_names_are_short(ptxas):
    for name, expected in {
        "void deepfast::(anonymous namespace)::a_fwd_kernel<deepfast::bf16, 8, true>(X)":
            "a_fwd_kernel<bf16,8,1>",
        "void deepfast::_GLOBAL__N__1::a_fwd_kernel<deepfast::bf16, (int)8, (bool)1>(X)":
            "a_fwd_kernel<bf16,8,1>",
        "deepfast::(anonymous namespace)::b_kernel(float const*, long)": "b_kernel",
        "deepfast::c(int)": None,
    }.items():  # fmt: skip
        assert ptxas.short(name) == expected
