"""`make cuda-check`: every CUDA kernel compiles for every architecture, without spills, and
bench/results/ptxas.md is of these kernels."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ptxas():
    path = Path(__file__).with_name("ptxas.py")
    spec = importlib.util.spec_from_file_location("ptxas", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_every_kernel_compiles_without_spills(ptxas):
    if ptxas.build.find_nvcc() is None:
        pytest.skip("no nvcc was found: the CUDA kernels are not compiled")
    version, architectures = ptxas.build.nvcc_facts(ptxas.build.find_nvcc())
    kernels, faults = ptxas.report(architectures)
    assert not faults, "\n" + "\n".join(faults)
    committed = (ROOT / "bench" / "results" / "ptxas.md").read_text()
    if f"nvcc {version}," in committed:
        rewrite = "python tests/cuda/ptxas.py --write bench/results/ptxas.md"
        assert committed == ptxas.table(version, kernels), rewrite


def test_spills_are_found(ptxas):
    """On a report in ptxas's format."""
    said = """
ptxas info    : Compiling entry function '_Z8a_kernelv' for 'sm_90'
ptxas info    : Function properties for _Z8a_kernelv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem
"""
    assert ptxas.read_report(said) == [
        {"kernel": "a_kernel", "sm": 90, "registers": 255, "stack": 16, "spills": 12}
    ]


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
