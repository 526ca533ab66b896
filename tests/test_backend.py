"""Choosing a backend: the order, the reasons, the override, the record."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from deepfast import availability, backend, ops, rule
from deepfast.backend import BackendError
from deepfast.cases import sizes
from deepfast.cases.case import tuple_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.delenv("DEEPFAST_BACKEND", raising=False)
    backend.forget()
    yield
    backend.forget()


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(*capabilities)``: the machine has GPUs of these compute capabilities."""

    def has(*capabilities, kilobytes=227):
        found = SimpleNamespace(shared_memory_per_block_optin=kilobytes << 10)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"card {i}")

    return has


@pytest.mark.parametrize("op", backend.OPS)
def test_the_compiled_ops_are_the_default_on_a_cpu(op):
    """Each backend that cannot serve has a reason."""
    for dtype in backend.DTYPES:
        reasons = backend.explain(op, "cpu", dtype)
        serving = [by for by, reason in reasons.items() if reason is None]
        assert serving == ["cpu", *["sdpa"] * (op == "attention"), "reference"]
        assert all(reasons[by] for by in reasons.keys() - serving)
        assert backend.choose(op, None, "cpu", dtype)[0] == "cpu"
    assert backend.chosen(op, None, torch.device("mps"), FP32) in ("sdpa", "reference")


@pytest.mark.parametrize(("op", "by", "device", "dtype", "words"), [
    ("attention", "cuda", "cpu", FP32, "on cpu, not cuda"),
    ("attention", "varlen", "cuda", FP32, "takes bfloat16 and float16"),
    ("boundary", "varlen", "cuda", BF16, "varlen is torch's attention, not boundary"),
    ("boundary", "cuda", "cuda", FP64, "compute in float32"),
    ("layer_norm", "triton", "cpu", FP32, "on cpu, not cuda"),
    ("layer_norm", "triton", "cuda", FP64, "compute in float32"),
    ("layer_norm", "cpu", "cuda", FP32, "on cuda, not cpu"),
    ("layer_norm", "cpu", "cpu", torch.int32, "torch.int32"),
])  # fmt: skip
def test_reasons_say_what_is_wrong(monkeypatch, op, by, device, dtype, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert words in backend.why_unable(op, by, device, dtype)
    monkeypatch.setenv("DEEPFAST_BACKEND", by)
    with pytest.raises(BackendError, match=f"{op}: backend '{by}' cannot serve .*{words}"):
        backend.choose(op, None, device, dtype)


def test_an_unknown_name_is_an_error(monkeypatch):
    with pytest.raises(BackendError, match=r"expected an op of layer_norm.*got 'softmax'"):
        backend.why_unable("softmax", "cpu", "cpu", FP32)
    monkeypatch.setenv("DEEPFAST_BACKEND", "fast")
    message = r"layer_norm: DEEPFAST_BACKEND: expected one of cuda, triton, .*ref.*got 'fast'"
    with pytest.raises(BackendError, match=message):
        ops.layer_norm(torch.randn(3, 4), None, None)


def test_triton_is_no_default_in_its_interpreter(monkeypatch):
    """It serves every op on a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.why_unable("layer_norm", "triton", "cpu", FP32) is None
    assert "interpreter is for tests" in backend.explain("layer_norm", "cpu", FP32)["triton"]
    for op in backend.OPS:
        assert backend.why_unable(op, "triton", "cuda", BF16) is None


def test_rocm_is_refused(gpu, monkeypatch):
    """There a GPU is of type cuda, too."""
    gpu((9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for op in backend.OPS:
        chosen = backend.choose(op, None, "cuda:0", BF16)[0]
        assert chosen == ("sdpa" if op == "attention" else "reference")
        reason = backend.why_unable(op, "triton", "cuda:0", BF16)
        assert reason == "the Triton kernels are for CUDA, and this torch is for ROCm 6.4"


@pytest.mark.parametrize(("op", "dtype", "size", "name"), [
    ("layer_norm", BF16, 8192, "triton"),
    ("layer_norm", FP32, None, "triton"),
    ("layer_norm", FP16, 16385, "reference"),
    ("attention", FP16, 512, "triton"),
    ("attention", FP16, 513, "sdpa"),
    ("attention", FP32, 64, "sdpa"),
])  # fmt: skip
def test_the_rule_decides_on_a_gpu(gpu, op, dtype, size, name):
    pytest.importorskip("triton")
    gpu((9, 0))
    assert {op for op, _ in rule.TABLE} == backend.OPS.keys()
    assert backend.chosen(op, None, "cuda:0", dtype, size) == name
    if name == "triton":
        gpu((7, 5))
        reason = backend.explain(op, "cuda:0", dtype, size)["triton"]
        assert "for compute capability 8.0 or newer; request it" in reason


@pytest.mark.parametrize(("kilobytes", "most"), [(227, 2048), (160, 2048), (99, 1024)])
def test_the_rule_gives_the_boundary_in_cuda_what_fits_shared_memory(gpu, kilobytes, most):
    gpu((8, 0), kilobytes=kilobytes)
    assert rule.why_not("boundary", "cuda", [0], BF16, most) is None
    said = rule.why_not("boundary", "cuda", [0], BF16, most + 1)
    assert said == f"deepfast/rule.py lists it only for sizes up to {most}, got {most + 1}"


def test_each_gpu_must_be_new_enough(gpu, monkeypatch):
    built = SimpleNamespace(build_info=lambda: {"cuda": "80+90+100"})
    monkeypatch.setattr(availability, "C_OPS", built)
    gpu((9, 0), (8, 0))
    assert backend.why_unable("boundary", "cuda", "cuda", BF16) is None
    gpu((9, 0), (7, 5))
    said = backend.why_unable("boundary", "cuda", "cuda", BF16)
    assert said == "cuda:1 (card 1) has compute capability 7.5, kernels need 8.0"


@pytest.mark.parametrize("missing", ["compiler", "Python.h"])
def test_triton_without_a_c_compiler_is_refused(monkeypatch, tmp_path, missing):
    """Nothing is launched to find out."""
    monkeypatch.delenv("CC", raising=False)
    if missing == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        said = "expected gcc, clang or the program in CC"
    else:
        monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
        said = f"expected Python's headers in {tmp_path}"
    reason = backend.explain("layer_norm", "cuda", BF16)["triton"]
    assert reason == f"Triton compiles C at a first launch: {said}"


@pytest.mark.parametrize("argument", [None, "cpu"])
def test_an_argument_comes_before_the_override(monkeypatch, argument):
    """In every op, forward and backward."""
    monkeypatch.setenv("DEEPFAST_BACKEND", "reference")
    with backend.record() as seen:
        for calls in sizes.KERNELS.values():
            case = next(calls.listed(sizes.QUICK["cpu"]))
            results = tuple_of(case.run(**case.leaves(FP32, FP32), backend=argument))
            sum(y.sum() for y in results).backward()
    assert set(seen) == {(op, argument or "reference") for op in backend.OPS}


def test_records_see_their_blocks_and_end_with_an_exception():
    x = torch.randn(3, 4)
    with contextlib.suppress(KeyError), backend.record() as outer:
        with backend.record() as inner:
            ops.layer_norm(x, None, None, backend="reference")
        ops.layer_norm(x, None, None, backend="cpu")
        raise KeyError
    ops.layer_norm(x, None, None)
    assert inner == [("layer_norm", "reference")]
    assert outer == [("layer_norm", "reference"), ("layer_norm", "cpu")]


FORK = """
import os
import deepfast.nn, deepfast.ops
import torch

torch.set_num_threads(2)
child = os.fork()
if child == 0:
    torch.ones(1 << 22).add_(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_importing_starts_no_threads(python):
    """A child that is forked after the import runs parallel loops; with threads in its parent it
    hangs. So a limit of threads is read from the environment."""
    assert "OMP" not in python("-c", FORK, timeout=60, OMP_NUM_THREADS="2").stderr
    limited = {"OMP_NUM_THREADS": "2", "OMP_THREAD_LIMIT": "1"}
    said = python("-c", "import deepfast.backend", **limited).stderr
    assert "OMP_THREAD_LIMIT=1 limits parallel loops to 1 of 2 threads" in said
