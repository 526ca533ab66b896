"""Ops on a GPU: the calls of `deepfast.cases`, their first use, and what the host waits for."""

import time

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases import check
from deepfast.cases.sizes import KERNELS, LISTED, QUICK, THOROUGH, typical, widths
from deepfast.selfcheck import store

REAL = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not REAL, reason="needs a CUDA device")
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


@NEEDS_GPU  # Triton's compiler does.
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


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_holds_little(device, dtype):
    """The weight may be fp32 beside 16-bit activations, as under autocast."""
    T, D, V = 2048, 512, 32000
    hidden = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) / D**0.5).requires_grad_()
    target = torch.randint(V, (T,), device=device)

    def run():
        options = {"label_smoothing": 0.1, "backend": "triton"}
        loss = ops.linear_cross_entropy(hidden, weight, target, **options)
        return torch.autograd.grad(loss, (hidden, weight))

    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = run()
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    chunk = 256 * (V + 16) * hidden.element_size()
    cast = 0 if dtype == torch.float32 else V * D * 2
    # Besides, a product in fp32 of what hidden's gradient is scaled by.
    assert extra < chunk + cast + 4 * hidden.numel() + (1 << 21)


@NEEDS_GPU  # On a CPU it is an error.
def test_a_target_out_of_range_is_nan(device):
    hidden, weight = torch.randn(3, 8, device=device), torch.randn(40, 8, device=device)
    target = torch.tensor([1, 40, 2], device=device)
    assert ops.linear_cross_entropy(hidden, weight, target, backend="triton").isnan()


def test_a_recurrence_does_not_wait(device, unsynchronised):
    """Lengths stay on the device."""
    T, B, H = 9, 33, 100
    f, weight = (
        torch.randn(s, device=device).requires_grad_() for s in ((T, B, 4 * H), (H, 4 * H))
    )
    peephole, lengths = torch.ones(3, H, device=device), torch.arange(B, device=device) % (T + 1)

    def step():
        h, _, _ = ops.peephole_lstm(f, weight, peephole, lengths=lengths, backend="triton")
        return torch.autograd.grad(h.sum(), (f, weight))

    step()
    with unsynchronised():
        step()
