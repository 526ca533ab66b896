"""The compiled library: what it reports about itself, and how it is compiled."""

import platform
import re
from pathlib import Path

import pytest
import torch

from deepfast import availability, backend, build
from deepfast.build import BuildError

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"


def test_build_info():
    info = backend.build_info()
    assert set(info) >= {"compiler", "torch", "architecture", "instruction_sets", "cpu", "cuda"}
    assert info["architecture"] == platform.machine()
    assert info["cpu"] in info["instruction_sets"].split("+")
    assert "portable" in info["instruction_sets"].split("+")


def test_kernels_use_no_standard_templates():
    """The linker may replace a portable inline std template by one built for AVX-512."""
    # Only types, which produce no code.
    types = "align_val_t", "conditional_t", "integer_sequence", "make_integer_sequence"
    headers = {"stdint.h", "string.h", "new", "utility", "immintrin.h", "cstdint"}
    kernel_headers = ("exp.h", "normal.h", "panels.h", "rows.h", "simd.h", "transpose.h")
    for path in [*(CSRC / "cpu").glob("*_kernel.cpp"), *(CSRC / "cpu" / h for h in kernel_headers)]:
        code = re.sub(r"//.*", "", path.read_text())
        assert set(re.findall(r"std::(\w+)", code)) <= set(types), path
        assert set(re.findall(r"#include <(\S+)>", code)) <= headers, path


def test_only_kernels_are_compiled_for_an_instruction_set():
    """Other code, and code for the machine that compiles it, would crash on an older processor."""
    text = build.ninja_file("g++", "target.so", Path("build"))
    assert "-march" not in text
    objects = re.findall(r"^build (\w+)\.o: compile .*\n  flags = (.*)", text, re.MULTILINE)
    compiled = {name.rpartition("_kernel_")[2] for name, _ in objects if "_kernel_" in name}
    assert compiled == set(build.INSTRUCTION_SETS)
    for name, flags in objects:
        isa = name.rpartition("_kernel_")[2] if "_kernel_" in name else "portable"
        assert re.findall(r"(?<!\S)-m\S+", flags) == build.INSTRUCTION_SETS[isa], name


# From the weakest to the strongest; this process runs the strongest that the processor has.
LEVELS = backend.build_info().get("instruction_sets", "portable").split("+")


def supported(level):
    """Whether the library has this level and this processor can run it."""
    chosen = backend.build_info().get("cpu", "none")
    return chosen in LEVELS and LEVELS.index(level) <= LEVELS.index(chosen)


# Tests of every kernel and every dtype. The other tests take the level of this process.
TESTS = ["ops/test_every_op.py", "ops/test_activation.py", "ops/test_depth_mix.py"]
TESTS += ["ops/test_attention.py", "ops/test_dropout.py", "kernels/test_every_launch.py"]
TESTS += ["depth/test_engine.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [n for n in LEVELS if supported(n) and n != backend.build_info().get("cpu")]
)
def test_instruction_set_agrees(python, level):
    """In its own process, forced to one level."""
    script = (
        "import sys, pytest\n"
        "from deepfast import backend\n"
        f"assert backend.build_info()['cpu'] == {level!r}\n"
        "options = ['-q', '-k', 'cpu', '-m', 'not slow', '-p', 'no:cacheprovider']\n"
        f"sys.exit(pytest.main([*options, *{[f'tests/{name}' for name in TESTS]!r}]))"
    )
    python("-c", script, DEEPFAST_CPU_CAPABILITY=level, timeout=900)


@pytest.mark.slow
def test_unknown_instruction_set_is_an_error(python):
    done = python("-m", "deepfast", "info", check=False, DEEPFAST_CPU_CAPABILITY="sse9")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("deepfast info: DEEPFAST_CPU_CAPABILITY: expected")
    assert "got sse9" in done.stderr
    assert all(level in done.stderr for level in LEVELS)


def test_cuda_files():
    """Each launch that has CUDA kernels is registered once, at the end of its file."""
    registered = []
    for path in sorted((CSRC / "cuda").glob("*.cu")):
        text = path.read_text()
        names = re.findall(r'm\.impl\("(\w+)"', text)
        registered += names
        assert text.rindex("}  // namespace\n") < text.index("DEEPFAST_CUDA_OPS"), path
        # The emulator compiles csrc/cuda only; other headers are in csrc/common.
        assert not re.search(r"\basm\b|__shared__|atomic[A-Z]", text), path
    assert sorted(registered) == sorted(backend.CUDA)


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "nvcc", "reason"),
    [
        ("", None, "13.0", "has no CUDA"),
        ("", "13.0", None, "no nvcc was found"),
        ("", "12.8", "13.0", "nvcc has CUDA 13.0, but torch was built with CUDA 12.8"),
        ("0", "13.0", "13.0", "DEEPFAST_BUILD_CUDA=0"),
        ("", "13.0", "13.0", None),
        ("1", "13.0", "13.1", None),
        ("1", None, "13.0", BuildError("DEEPFAST_BUILD_CUDA=1, but torch .* has no CUDA")),
        ("yes", "13.0", "13.0", BuildError("expected 0, 1 or unset")),
    ],
)
def test_when_cuda_is_built(monkeypatch, tmp_path, wish, torch_cuda, nvcc, reason):
    monkeypatch.setenv("DEEPFAST_BUILD_CUDA", wish)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc and "/there/nvcc")
    monkeypatch.setattr(build, "nvcc_facts", lambda _: (nvcc, ["80", "90"]))
    (tmp_path / "libcudart_static.a").touch()
    monkeypatch.setattr(build, "cuda_libraries", lambda _: [tmp_path])
    if isinstance(reason, BuildError):
        with pytest.raises(BuildError, match=str(reason)):
            build.why_no_cuda()
    else:
        got = build.why_no_cuda()
        assert got == reason or reason in got


@pytest.mark.parametrize("says", ["exit 1", "echo no such thing", "echo release 13.0, V13"])
def test_an_nvcc_that_is_none_leaves_cuda_out(monkeypatch, tmp_path, says):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("DEEPFAST_BUILD_CUDA", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "find_nvcc", lambda: str(nvcc))
    assert "does not behave like nvcc" in build.why_no_cuda()


def test_the_build_with_cuda(monkeypatch):
    """One object of each .cu file, for every architecture; newer ones get PTX."""
    monkeypatch.setattr(build, "why_no_cuda", lambda: None)
    monkeypatch.setattr(build, "find_nvcc", lambda: "/there/nvcc")
    monkeypatch.setattr(build, "nvcc_facts", lambda _: ("13.0", ["80", "90", "100"]))
    monkeypatch.setattr(build, "cuda_libraries", lambda _: [Path("/there/lib64")])
    text = build.ninja_file("g++", "target.so", Path("build"))
    sources = {path.stem for path in (CSRC / "cuda").glob("*.cu")}
    assert sources == set(re.findall(r"^build (\w+)_cuda\.o: cuda ", text, re.MULTILINE))
    for code in ("sm_80", "sm_90", "sm_100", "compute_100"):
        assert text.count(f"code={code} ") == len(sources), code
    assert "-DDEEPFAST_CUDA=80+90+100" in text
    link = next(line for line in text.splitlines() if "-shared" in line)
    assert "-lcudart_static" in link
    monkeypatch.setattr(build, "why_no_cuda", lambda: "there is none")
    without = build.ninja_file("g++", "target.so", Path("build"))
    assert "cuda " not in without
    assert "there is none" in without


def test_a_device_that_is_too_old_is_told(monkeypatch):
    class Built:
        @staticmethod
        def build_info():
            return {"cuda": "80+90+100"}

    monkeypatch.setattr(availability, "C_OPS", Built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"card {i}")
    for second, reason in (((8, 0), None), ((7, 5), "card 1) has compute capability 7.5")):
        capabilities = [(9, 0), second]
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        got = backend.why_unable("boundary", "cuda", "cuda", torch.bfloat16)
        assert got == reason or reason in got
    assert backend.why_unable("boundary", "cuda", "cpu", torch.bfloat16) is not None
