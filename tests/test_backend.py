"""Choosing a backend: the order, the reasons, the override, the record."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from deepfast import backend, ops, rule
from deepfast.backend import BackendError
from deepfast.cases import sizes
from deepfast.cases.case import tuple_of

DTYPES = list(backend.DTYPES)


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.delenv("DEEPFAST_BACKEND", raising=False)
    backend.forget()
    yield
    backend.forget()


@pytest.mark.parametrize("op", backend.OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_backend_is_the_default_on_a_cpu(op, dtype):
    assert backend.choose(op, None, "cpu", dtype)[0] == "cpu"


@pytest.mark.parametrize("op", backend.OPS)
def test_every_backend_not_chosen_has_a_reason_or_comes_later(op):
    reasons = backend.explain(op, "cpu", torch.float32)
    names = tuple(reasons)
    assert names == tuple(b for b in backend.BACKENDS if b in names)
    left_out = set() if op == "attention" else {"varlen", "sdpa"}
    assert set(backend.BACKENDS) - set(names) == left_out
    chosen = backend.choose(op, None, "cpu", torch.float32)[0]
    before = names[: names.index(chosen)]
    assert all(isinstance(reasons[name], str) and reasons[name] for name in before)
    assert reasons[chosen] is None


def test_reasons_say_what_is_wrong():
    assert "on cpu, not cuda" in backend.why_unable("attention", "cuda", "cpu", torch.float32)
    assert "compute in float32" in backend.why_unable("boundary", "cuda", "cuda", torch.float64)
    assert "on cuda, not cpu" in backend.why_unable("layer_norm", "cpu", "cuda", torch.float32)
    assert "torch.int32" in backend.why_unable("layer_norm", "cpu", "cpu", torch.int32)
    with pytest.raises(BackendError, match=r"expected an op of layer_norm.*got 'softmax'"):
        backend.why_unable("softmax", "cpu", "cpu", torch.float32)


def test_triton_is_no_default(monkeypatch):
    """In the interpreter it runs on request; on a GPU it is the default."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.why_unable("layer_norm", "triton", "cpu", torch.float32) is None
    assert (
        "interpreter is for tests" in backend.explain("layer_norm", "cpu", torch.float32)["triton"]
    )
    assert "compute in float32" in backend.why_unable("layer_norm", "triton", "cpu", torch.float64)
    for op in backend.OPS:
        assert backend.why_unable(op, "triton", "cuda", torch.bfloat16) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "on cpu, not cuda" in backend.why_unable("layer_norm", "triton", "cpu", torch.float32)


def test_rocm_is_refused(monkeypatch):
    """There a GPU is of type cuda, too."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    for op in backend.OPS:
        chosen = backend.choose(op, None, "cuda:0", torch.bfloat16)[0]
        assert chosen == ("sdpa" if op == "attention" else "reference")
        reason = backend.why_unable(op, "triton", "cuda:0", torch.bfloat16)
        assert reason == "the Triton kernels are for CUDA, and this torch is for ROCm 6.4"


def test_the_rule_is_in_the_order_of_the_backends():
    for op in backend.OPS:
        names = [backend for name, backend in rule.TABLE if name == op]
        assert names == [by for by in backend.BACKENDS if by in names]
        assert names


@pytest.mark.parametrize(("op", "dtype", "size", "name"), [
    ("layer_norm", torch.bfloat16, 8192, "triton"),
    ("layer_norm", torch.float32, None, "triton"),
    ("layer_norm", torch.float16, 16385, "reference"),
    ("attention", torch.float16, 512, "triton"),
    ("attention", torch.float16, 513, "sdpa"),
    ("attention", torch.float32, 64, "sdpa"),
])  # fmt: skip
def test_the_rule_decides_on_a_gpu(monkeypatch, op, dtype, size, name):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert backend.chosen(op, None, "cuda:0", dtype, size) == name
    if name == "triton":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        reason = backend.explain(op, "cuda:0", dtype, size)["triton"]
        assert "for compute capability 8.0 or newer; request it" in reason


@pytest.mark.parametrize(("kilobytes", "most"), [(227, 2048), (160, 2048), (99, 1024)])
def test_the_rule_gives_the_boundary_in_cuda_what_fits_shared_memory(monkeypatch, kilobytes, most):
    found = SimpleNamespace(shared_memory_per_block_optin=kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert rule.why_not("boundary", "cuda", [0], torch.bfloat16, most) is None
    said = rule.why_not("boundary", "cuda", [0], torch.bfloat16, most + 1)
    assert said == f"deepfast/rule.py lists it only for sizes up to {most}, got {most + 1}"


@pytest.mark.parametrize("missing", ["compiler", "Python.h"])
def test_triton_without_a_c_compiler_is_refused(monkeypatch, tmp_path, missing):
    """Nothing is launched to find out."""
    monkeypatch.delenv("CC", raising=False)
    if missing == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        said = "Triton compiles C at a first launch: expected gcc, clang or the program in CC"
    else:
        monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
        said = f"Triton compiles C at a first launch: expected Python's headers in {tmp_path}"
    assert backend.explain("layer_norm", "cuda", torch.bfloat16)["triton"] == said
    with pytest.raises(BackendError, match="Triton compiles C at a first launch"):
        backend.choose("layer_norm", "triton", "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("variable", "argument"), [("cpu", None), ("reference", None), ("cpu", "reference")]
)
def test_an_argument_comes_before_the_override(monkeypatch, variable, argument):
    monkeypatch.setenv("DEEPFAST_BACKEND", variable)
    with backend.record() as seen:
        for calls in sizes.KERNELS.values():
            case = next(calls.listed(sizes.QUICK["cpu"]))
            leaves = case.leaves(torch.float32, torch.float32)
            results = tuple_of(case.run(**leaves, backend=argument))
            sum(y.sum() for y in results).backward()
    assert set(seen) == {(op, argument or variable) for op in backend.OPS}


def test_the_override_refuses_with_the_reason(monkeypatch):
    monkeypatch.setenv("DEEPFAST_BACKEND", "varlen")
    for op in {*backend.OPS} - {"attention"}:
        case = next(sizes.KERNELS[op].listed(sizes.QUICK["cpu"]))
        with pytest.raises(BackendError, match=f"varlen is torch's attention, not {op}"):
            case.run(**case.leaves(torch.float32, torch.float32))


def test_an_unknown_override_is_an_error(monkeypatch):
    monkeypatch.setenv("DEEPFAST_BACKEND", "fast")
    message = r"layer_norm: DEEPFAST_BACKEND: expected one of cuda, triton, .*ref.*got 'fast'"
    with pytest.raises(BackendError, match=message):
        ops.layer_norm(torch.randn(3, 4), None, None)


def test_records_see_their_blocks_and_end_with_an_exception():
    x = torch.randn(3, 4)
    ops.layer_norm(x, None, None)
    with contextlib.suppress(KeyError), backend.record() as outer:
        with backend.record() as inner:
            ops.layer_norm(x, None, None, backend="reference")
        ops.layer_norm(x, None, None, backend="cpu")
        raise KeyError
    ops.layer_norm(x, None, None)
    assert inner == [("layer_norm", "reference")]
    assert outer == [("layer_norm", "reference"), ("layer_norm", "cpu")]
    assert not backend._records


def test_the_reference_serves_on_any_device():
    for op in ("layer_norm", "depth_mix", "activation", "boundary", "linear_cross_entropy"):
        assert backend.chosen(op, None, torch.device("mps"), torch.float32) == "reference"


FORKS = """
import os
import deepfast.nn, deepfast.ops
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
child = os.fork()
if child == 0:
    torch.ones(1 << 22).add_(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        torch.set_num_threads(2)
        return torch.full((1 << 20,), float(i)).add_(1)

loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
assert sum(len(batch) for batch in loader) == 4
"""


@pytest.mark.slow
def test_importing_starts_no_threads(python):
    """Children forked after the import run parallel loops; with threads in their parent they hang.

    A fork by hand, then those of a DataLoader.
    """
    said = python("-c", FORKS, timeout=60, OMP_NUM_THREADS="2").stderr
    assert "OMP_THREAD_LIMIT" not in said


@pytest.mark.slow
def test_a_limit_of_threads_warns(python):
    environment = {"OMP_NUM_THREADS": "2", "OMP_THREAD_LIMIT": "1"}
    said = python("-c", "import deepfast.backend", **environment).stderr
    assert "OMP_THREAD_LIMIT=1 limits parallel loops to 1 of 2 threads" in said


def test_an_environment_in_place_of_os_environ(monkeypatch):
    monkeypatch.setenv("DEEPFAST_BACKEND", "reference")
    monkeypatch.setattr(os, "environ", {})
    assert backend.requested_backend() is None
    monkeypatch.setattr(os, "environ", {"DEEPFAST_BACKEND": "cpu"})
    assert backend.requested_backend() == "cpu"
