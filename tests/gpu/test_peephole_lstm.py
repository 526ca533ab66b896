"""peephole_lstm on a GPU."""

import pytest
import torch

from deepfast import backend, ops

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Steps, sentences, channels.
SIZES = [(30, 64, 512), (9, 33, 100)] if torch.cuda.is_available() else [(2, 3, 20)]


@pytest.fixture
def by(device):
    """Only Triton has kernels for it."""
    reason = backend.refusal("peephole_lstm", "triton", device, torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return "triton"


def some_lengths(T, B):
    return (torch.arange(B) * 7 + T) % (T + 1)


def inputs(twins, T, B, H):
    return {
        "f": twins.Stored(torch.randn(T, B, 4 * H)),
        "weight": twins.Stored(torch.randn(H, 4 * H) / H**0.5),
        "peephole": twins.Computed(torch.randn(3, H)),
        "h0": twins.Stored(torch.randn(B, H)), "c0": twins.Computed(torch.randn(B, H)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_launcher(by, tolerances, twins, device, size, reverse, dtype):
    T, B, H = size
    given = inputs(twins, *size) | {
        "lengths": some_lengths(T, B), "reverse": reverse, "h": twins.Result((T, B, H)),
        "h_last": twins.Result((B, H)), "c_last": twins.Result((B, H), stored=False),
        "c": twins.Result((T, B, H), stored=False), "gates": twins.Result((T, B, 4 * H)),
    }  # fmt: skip
    twins.assert_alike(
        tolerances, by, "peephole_lstm", "peephole_lstm_forward", given, dtype, device
    )


def recurrence(reverse):
    def function(f, weight, peephole, h0, c0, backend):
        lengths = some_lengths(*f.shape[:2]).to(f.device)
        return ops.peephole_lstm(
            f, weight, peephole, h0=h0, c0=c0, lengths=lengths, reverse=reverse, backend=backend
        )

    return function


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_op(by, tolerances, twins, device, size, reverse, dtype):
    given, function = inputs(twins, *size), recurrence(reverse)
    twins.assert_op_alike(tolerances, by, "peephole_lstm", function, given, dtype, device)


def test_20_runs_are_alike_to_the_bit(by, twins, device):
    given, repeats = inputs(twins, *SIZES[-1]), 20 if device == "cuda" else 1
    twins.assert_repeatable(by, recurrence(True), given, torch.bfloat16, device, repeats)


def test_the_host_does_not_wait(by, twins, device, unsynchronised):
    """Lengths stay on the device."""
    T, B, H = SIZES[-1]
    f, weight = (
        torch.randn(s, device=device, requires_grad=True) for s in ((T, B, 4 * H), (H, 4 * H))
    )
    peephole, lengths = torch.ones(3, H, device=device), some_lengths(T, B).to(device)

    def step():
        h, _, _ = ops.peephole_lstm(f, weight, peephole, lengths=lengths, backend=by)
        return torch.autograd.grad(h.sum(), (f, weight))

    step()
    with unsynchronised():
        grads = step()
    assert all(torch.isfinite(g).all() for g in grads)
