"""activation on a GPU."""

import pytest
import torch

from deepfast import ops
from deepfast.reference.activation import KINDS
from deepfast.reference.dropout import dropout_mask

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if torch.cuda.is_available():
    SHAPES = [(8192, 2048), (1024, 16384)]
    ODD = [(1023, 255), (257, 1000), (3, 1), (0, 512)]
    LARGE = (524_800, 4096)
else:
    SHAPES, ODD, LARGE = [(5, 32)], [(3, 17), (0, 16)], (96, 8)
SEED = torch.tensor(3 << 40)


@pytest.fixture
def by(device):
    """Only Triton has kernels for it."""
    pytest.importorskip("triton")
    return "triton"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def check(tolerances, by, twins, T, F, kind, dtype, device, apart=0):
    options = {
        "bias": twins.Computed(torch.randn(F)), "kind": kind, "dropout_p": 0.3, "seed": SEED
    }  # fmt: skip
    h = twins.Stored(torch.randn(T, F), apart)
    given = {"h": h, **options, "out": twins.Result((T, F))}
    twins.assert_alike(tolerances, by, "activation", "activation_forward", given, dtype, device)
    dout = twins.Stored(torch.randn(T, F), apart)
    # For relu it stands for a result, zeros included.
    saved = twins.Stored(h.x.relu() if kind == "relu" else h.x, apart)
    given = {
        "dout": dout, "saved": saved, **options, "dh": twins.Result((T, F)),
        "dbias": twins.Result((F,), stored=False),
    }  # fmt: skip
    twins.assert_alike(tolerances, by, "activation", "activation_backward", given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "F"), SHAPES)
def test_launchers(by, tolerances, twins, device, T, F, kind, dtype):
    check(tolerances, by, twins, T, F, kind, dtype, device)


@pytest.mark.parametrize(("T", "F"), ODD)
def test_launchers_at_odd_sizes(by, tolerances, twins, device, T, F, kind):
    check(tolerances, by, twins, T, F, kind, torch.bfloat16, device, apart=3)


def dropped(kind):
    """The op with dropout, as `twins` calls it."""
    return lambda h, bias, backend: ops.activation(
        h, kind, bias=bias, dropout_p=0.1, training=True, seed=5, backend=backend
    )


def operands(twins):
    h, bias = torch.randn(SHAPES[0]), torch.randn(SHAPES[0][1])
    return {"h": twins.Stored(h), "bias": twins.Computed(bias)}


def test_op_in_float32(by, tolerances, twins, device, kind):
    given = operands(twins)
    twins.assert_op_alike(tolerances, by, "activation", dropped(kind), given, torch.float32, device)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_feed_forward(tolerances, twins, device, kind, p, dtype):
    """Where only ReLU follows the first product, the product applies it."""
    (T, F), D = SHAPES[0], SHAPES[0][1] // 4

    def function(backend, **operands):
        return ops.feed_forward(
            **operands, activation=kind, activation_dropout_p=p, training=True, activation_seed=5,
            backend=backend,
        )[0]  # fmt: skip

    given = {
        "x": twins.Stored(torch.randn(T, D)), "norm_weight": twins.Computed(torch.randn(D)),
        "norm_bias": twins.Computed(torch.randn(D)),
        "up": twins.Stored(torch.randn(F, D) / D**0.5), "up_bias": twins.Computed(torch.randn(F)),
        "down": twins.Stored(torch.randn(D, F) / F**0.5), "down_bias": twins.Stored(torch.randn(D)),
    }  # fmt: skip
    got, plain, exact = (
        twins.on_the_cpu(function, given, by, dtype, kind, where)
        for by, kind, where in (
            ("triton", dtype, device), ("reference", dtype, device),
            ("reference", torch.float64, "cpu"),
        )
    )  # fmt: skip
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def test_runs_are_alike_to_the_bit(by, twins, device, kind):
    given = operands(twins)
    repeats = 20 if device == "cuda" else 1
    twins.assert_repeatable(by, dropped(kind), given, torch.bfloat16, device, repeats)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(by, device, kind, dtype):
    T, F = SHAPES[0]
    h = torch.ones(T, F, dtype=dtype, device=device)
    seed = SEED.to(device)
    out = ops.activation(h, kind, dropout_p=0.3, training=True, seed=seed, backend=by)
    assert torch.equal(out.cpu() != 0, dropout_mask(int(SEED), T, F, 0.3) != 0)


def test_more_than_2_31_elements(by, room, device, kind):
    room(14)
    T, F = LARGE
    h = torch.empty(T, F, dtype=torch.bfloat16, device=device).normal_()
    out = ops.activation(h, kind, backend=by)
    # Elements are independent, so the last rows and those around element 2^31 are enough.
    around = min(2**31 // F, T - 40)
    for rows in (slice(T - 32, T), slice(around - 8, around + 8)):
        assert torch.equal(out[rows], ops.activation(h[rows].clone(), kind, backend=by))
