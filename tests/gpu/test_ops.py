"""Ops on a GPU: the calls of `deepfast.cases`, and their first use."""

import time

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases import check
from deepfast.cases.sizes import KERNELS, LISTED, QUICK, THOROUGH, typical, widths
from deepfast.selfcheck import store

REAL = torch.cuda.is_available()
pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def calls():
    """An op, a backend, odd sizes or "typical" ones, and a dtype. On a CPU the self-check's tests
    have the others."""
    if not REAL:
        return [("layer_norm", "triton", QUICK["cpu"], torch.float32)]
    return [
        (op, by, size, dtype)
        for op in LISTED
        for by in ("triton", *["cuda"] * (op in backend.IN_CUDA))
        for size in (QUICK["cuda"], *THOROUGH["cuda"], *["typical"] * (op in KERNELS))
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("op", "by", "size", "dtype"), calls(), indirect=["by"])
def test_op(by, device, op, size, dtype):
    """As near to float64 as the rule says; 20 runs are alike to the bit."""
    cases = (
        (typical(op, width, "cuda", tokens=256) for width in widths(op, "cuda"))
        if size == "typical"
        else LISTED[op](size)
    )
    for case in cases if REAL else [next(cases)]:
        assert check.fault(case, by, dtype, device, runs=20 if REAL else 2) is None


# Triton's compiler takes part.
@pytest.mark.skipif(not REAL, reason="needs a CUDA device")
def test_first_use(device, tmp_path, monkeypatch, caplog):
    """From cold caches a result in five seconds, without other processes; then a capture."""
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "first-use")
    for variable in ("DEEPFAST_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    backend.forget()
    x = torch.randn(8192, 520, device=device, requires_grad=True)
    state, start = torch.cuda.get_rng_state(), time.perf_counter()
    y = ops.layer_norm(x, None, None)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 5
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.testing.assert_close(y, F.layer_norm(x, (520,)))
    assert "layer_norm" in "".join(store.of(torch.device("cuda", x.get_device())).lines())
    assert not caplog.records
    narrow, graph = x.detach()[:, :264].contiguous(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.layer_norm(narrow, None, None)
    graph.replay()
    torch.testing.assert_close(y, F.layer_norm(narrow, (264,)))
    assert "cannot be checked in the capture of a CUDA graph" in caplog.text
    backend.forget()
