"""linear_cross_entropy on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if torch.cuda.is_available():
    ROWS = [(256, 32000), (255, 50257), (17, 128256), (3, 1), (0, 512)]
    SIZES, LARGE = [(2048, 512, 32000), (333, 100, 50257)], (24_576, 100_000)
else:
    ROWS, SIZES, LARGE = [(3, 40), (2, 17), (0, 16)], [(9, 16, 33)], (6, 40)
IGNORED = -100


@pytest.fixture
def by(device):
    """Only Triton has kernels for it."""
    pytest.importorskip("triton")
    return "triton"


def labels(T, V):
    target = torch.randint(V, (T,))
    target[1::5] = IGNORED
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "V"), ROWS)
# Apart, or with an end on 16 bytes.
@pytest.mark.parametrize("apart", [3, 8])
def test_launcher(by, tolerances, twins, device, T, V, dtype, apart):
    given = {
        "logits": twins.Stored(3 * torch.randn(T, V), apart),
        "target": labels(T, V),
        "label_smoothing": 0.1, "ignore_index": IGNORED, "write_grad": True,
        "loss": twins.Result((T,), stored=False), "nll": twins.Result((T,), stored=False),
    }  # fmt: skip
    twins.assert_alike(
        tolerances, by, "linear_cross_entropy", "cross_entropy", given, dtype, device
    )


def inputs(twins, T, D, V):
    return {
        "hidden": twins.Stored(torch.randn(T, D)),
        "weight": twins.Stored(torch.randn(V, D) / D**0.5),
    }


def loss_of(target):
    def function(hidden, weight, backend):
        return ops.linear_cross_entropy(
            hidden, weight, target.to(hidden.device), label_smoothing=0.1, backend=backend
        )

    return function


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_op(by, tolerances, twins, device, size, dtype):
    T, _, V = size
    given, function = inputs(twins, *size), loss_of(labels(T, V))
    twins.assert_op_alike(tolerances, by, "linear_cross_entropy", function, given, dtype, device)


def test_20_runs_are_alike_to_the_bit(by, twins, device):
    T, _, V = SIZES[0]
    given, function = inputs(twins, *SIZES[0]), loss_of(labels(T, V))
    repeats = 20 if device == "cuda" else 1
    twins.assert_repeatable(by, function, given, torch.bfloat16, device, repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_waits_and_little_is_held(by, unsynchronised, device, dtype):
    """The weight may be fp32 beside 16-bit activations, as under autocast."""
    T, D, V = SIZES[0]
    hidden = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) / D**0.5).requires_grad_()
    target = labels(T, V).to(device)

    def run():
        loss = ops.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, backend=by)
        return torch.autograd.grad(loss, (hidden, weight))

    grads = run()
    with unsynchronised():
        run()
    if device == "cuda":
        del grads
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = run()
        extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        chunk = 256 * (V + 16) * hidden.element_size()
        cast = 0 if dtype == torch.float32 else V * D * 2
        # Besides, a product in fp32 of what hidden's gradient is scaled by.
        assert extra < chunk + cast + 4 * hidden.numel() + (1 << 21)


def test_a_target_out_of_range_is_nan(by, device):
    hidden, weight = torch.randn(3, 8, device=device), torch.randn(40, 8, device=device)
    if device == "cpu":
        pytest.skip("on a CPU it is an error")
    target = torch.tensor([1, 40, 2], device=device)
    assert ops.linear_cross_entropy(hidden, weight, target, backend=by).isnan()


def test_more_than_2_31_elements(by, tolerances, room, device):
    """One launch over more logits than an int32 counts."""
    room(8)
    T, V = LARGE
    x = torch.empty(T, V, dtype=torch.bfloat16, device=device).normal_()
    rows = slice(T - 3, T)
    exact = x[rows].double().cpu().requires_grad_()
    target = torch.randint(V, (T,), device=device)
    losses = torch.empty(2, T, device=device)
    _, launch = backend.choose("linear_cross_entropy", by, x.device.type, x.dtype)
    launch.cross_entropy(x, target, 0.0, IGNORED, True, *losses)
    expected = F.cross_entropy(exact, target[rows].cpu(), reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), exact)
    expected = expected.detach()
    plain = expected.float()
    tolerances.assert_accurate(losses[0, rows].cpu(), plain, expected, torch.float32, "loss")
    tolerances.assert_accurate(x[rows].cpu(), grad.bfloat16(), grad, torch.bfloat16, "dlogits")
