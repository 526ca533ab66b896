"""How the compiled library is built, and what it may be made of."""

import re
from pathlib import Path

import pytest
import torch

from deepfast import backend, build
from deepfast.build import CSRC, BuildError


def test_kernels_use_no_standard_templates():
    """The linker may replace a portable inline std template by one built for AVX-512."""
    # Only types, which produce no code.
    types = {"align_val_t", "conditional_t", "integer_sequence", "make_integer_sequence"}
    allowed = {"stdint.h", "string.h", "new", "utility", "immintrin.h"}
    # No kernel includes op.h.
    headers = {*(CSRC / "cpu").glob("*.h")} - {CSRC / "cpu" / "op.h"}
    for path in [*(CSRC / "cpu").glob("*_kernel.cpp"), *headers]:
        code = re.sub(r"//.*", "", path.read_text())
        assert set(re.findall(r"std::(\w+)", code)) <= types, path
        assert set(re.findall(r"#include <(\S+)>", code)) <= allowed, path
        assert '"op.h"' not in code, path


def test_only_kernels_are_compiled_for_an_instruction_set():
    """Other code, and code for the machine that compiles it, would crash on an older processor."""
    text = build.ninja_file("g++", "target.so", Path("build"))
    assert "-march" not in text
    objects = re.findall(r"^build (\w+)\.o: compile .*\n  flags = (.*)", text, re.MULTILINE)
    sets = {name: name.rpartition("_kernel_")[2] for name, _ in objects if "_kernel_" in name}
    assert set(sets.values()) == set(build.INSTRUCTION_SETS)
    for name, flags in objects:
        wanted = build.INSTRUCTION_SETS[sets.get(name, "portable")]
        assert re.findall(r"(?<!\S)-m\S+", flags) == wanted, name


# From the weakest to the strongest; this process runs the strongest that the processor has.
LEVELS = backend.build_info().get("instruction_sets", "portable").split("+")
CHOSEN = backend.build_info().get("cpu", LEVELS[0])

# Tests of every kernel and every dtype. The other tests take the level of this process.
TESTS = ["ops/test_every_op.py", "ops/test_activation.py", "ops/test_depth_mix.py"]
TESTS += ["ops/test_attention.py", "ops/test_dropout.py", "kernels/test_every_launch.py"]
TESTS += ["depth/test_engine.py"]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS[: LEVELS.index(CHOSEN)])
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
    assert all(word in done.stderr for word in ["got sse9", *LEVELS])


@pytest.mark.parametrize(("wish", "torch_cuda", "nvcc", "reason"), [
    ("", None, "13.0", "has no CUDA"),
    ("", "13.0", None, "no nvcc was found"),
    ("", "12.8", "13.0", "nvcc has CUDA 13.0, but torch was built with CUDA 12.8"),
    ("0", "13.0", "13.0", "DEEPFAST_BUILD_CUDA=0"),
    ("", "13.0", "13.0", None),
    ("1", "13.0", "13.1", None),
    ("1", None, "13.0", BuildError("DEEPFAST_BUILD_CUDA=1, but torch .* has no CUDA")),
    ("yes", "13.0", "13.0", BuildError("expected 0, 1 or unset")),
])  # fmt: skip
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
def test_an_nvcc_that_is_none_leaves_cuda_out(tmp_path, says):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    assert "does not behave like nvcc" in build.why_not_this_nvcc(str(nvcc), "13.0")


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
    assert re.search("-shared .* -lcudart_static", text)
    monkeypatch.setattr(build, "why_no_cuda", lambda: "there is none")
    without = build.ninja_file("g++", "target.so", Path("build"))
    assert "cuda " not in without
    assert "there is none" in without
