"""Ops on a GPU: the calls of `deepfast.cases`, dropout masks, and what the host waits for."""

import time

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases import check
from deepfast.cases.sentences import offsets
from deepfast.cases.sizes import KERNELS, LISTED, QUICK, THOROUGH, Sizes, typical, widths
from deepfast.reference.dropout import dropout, dropout_mask
from deepfast.selfcheck import store

pytestmark = pytest.mark.gpu

REAL = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16
SEED = torch.tensor(3 << 40)
T, D = (8192, 512) if REAL else (5, 32)


def calls(op, size):
    """Odd sizes, or typical ones."""
    torch.manual_seed(1)
    if size != "typical":
        yield from LISTED[op](size if REAL else Sizes(3, 7, 16, 12, 9))
    else:
        kind = "cuda" if REAL else "cpu"
        for width in widths(op, kind):
            yield typical(op, width, kind, tokens=256 if REAL else 2)


@pytest.mark.only_if(lambda by, op: by == "triton" or op in backend.IN_CUDA)
@pytest.mark.only_if(lambda op, size: size != "typical" or op in KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [QUICK["cuda"], *THOROUGH["cuda"], "typical"], ids=str)
@pytest.mark.parametrize("op", LISTED)
def test_op(by, device, op, size, dtype):
    """As near to float64 as the rule says; 20 runs are alike to the bit."""
    for case in calls(op, size):
        assert check.fault(case, by, dtype, device, runs=20 if REAL else 2) is None


# Triton's compiler needs a GPU.
@pytest.mark.only_if(lambda: REAL)
def test_first_use(device, tmp_path, monkeypatch, caplog):
    """From cold caches a result in five seconds, without other processes; then a capture."""
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "first-use")
    for variable in ("DEEPFAST_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    backend.forget()
    x = torch.randn(T, 520, device=device, requires_grad=True)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(by, device, dtype):
    x, seed = torch.ones(T, D, dtype=dtype, device=device), SEED.to(device)
    options = {"dropout_p": 0.3, "training": True, "seed": seed}
    expected = dropout_mask(int(SEED), T, D, 0.3) != 0
    # A dropped infinity leaves nothing.
    for value in (1, torch.inf):
        zeros = torch.zeros_like(x)
        s = ops.add_layer_norm(x * value, zeros, None, None, backend=by, **options)[1]
        assert torch.equal(s.cpu() != 0, expected)
        for kind in ("relu", "gelu"):
            out = ops.activation(x * value, kind, backend="triton", **options)
            assert torch.equal(out.cpu() != 0, expected)


def sentences(lengths, q, k, v, **options):
    """Attention by Triton over sentences of these lengths."""
    cu, longest = offsets(lengths, q.device), max(lengths)
    return ops.attention(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        backend="triton", **options,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [[20, 16, 31], [8]])
def test_dropout_mask_of_attention(device, lengths):
    """With equal scores and one-hot values the result shows the mask of each weight."""
    tokens, heads, width, p = sum(lengths), 2, 32, 0.3
    q = torch.zeros(tokens, heads, width, dtype=HALF, device=device)
    eye = torch.cat([torch.eye(width)[:n] for n in lengths])
    v = eye[:, None].expand(tokens, heads, width).to(q)
    o = sentences(lengths, q, q, v, dropout_p=p, seed=5)
    mask = dropout_mask(5, tokens * heads, width, p).view(tokens, heads, width)
    real = torch.cat([(torch.arange(width) < n).expand(n, width) for n in lengths])
    assert torch.equal(o.cpu() != 0, (mask != 0) & real[:, None])


def test_the_reference_draws_alike(device):
    x = torch.ones(17, 40)
    on_device = dropout(x.to(device), 0.3, SEED.to(device)).cpu()
    assert torch.equal(on_device, dropout(x, 0.3, SEED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_does_not_wait_and_holds_little(unsynchronised, device, dtype):
    """The weight may be fp32 beside 16-bit activations, as under autocast."""
    T, D, V = 2048, 512, 32000
    hidden = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) / D**0.5).requires_grad_()
    target = torch.randint(V, (T,), device=device)

    def run():
        loss = ops.linear_cross_entropy(
            hidden, weight, target, label_smoothing=0.1, backend="triton"
        )
        return torch.autograd.grad(loss, (hidden, weight))

    grads = run()
    with unsynchronised():
        run()
    del grads
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = run()
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    chunk = 256 * (V + 16) * hidden.element_size()
    cast = 0 if dtype == torch.float32 else V * D * 2
    # Besides, a product in fp32 of what hidden's gradient is scaled by.
    assert extra < chunk + cast + 4 * hidden.numel() + (1 << 21)


# On a CPU it is an error.
@pytest.mark.only_if(lambda: REAL)
def test_a_target_out_of_range_is_nan(device):
    hidden, weight = torch.randn(3, 8, device=device), torch.randn(40, 8, device=device)
    target = torch.tensor([1, 40, 2], device=device)
    assert ops.linear_cross_entropy(hidden, weight, target, backend="triton").isnan()


def test_a_recurrence_does_not_wait(device, unsynchronised):
    """Lengths stay on the device."""
    T, B, H = 9, 33, 100
    f, weight = (
        torch.randn(s, device=device, requires_grad=True) for s in ((T, B, 4 * H), (H, 4 * H))
    )
    peephole = torch.ones(3, H, device=device)
    lengths = (torch.arange(B) * 7 + T).to(device) % (T + 1)

    def step():
        h, _, _ = ops.peephole_lstm(f, weight, peephole, lengths=lengths, backend="triton")
        return torch.autograd.grad(h.sum(), (f, weight))

    step()
    with unsynchronised():
        grads = step()
    assert all(torch.isfinite(g).all() for g in grads)
