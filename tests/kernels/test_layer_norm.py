"""The kernels of layer-norm and RMS norm against the launchers of the reference in float64."""

import pytest
import torch

from deepfast.reference import launchers as reference

OP = "layer_norm"
LOW = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(0, 64), (1, 1), (5, 17), (17, 64), (5, 100), (1, 255), (5, 512)]


def operands(T, D, dtype, *, p, residual, dsum, affine, rms=False):
    x, rest, dy, ds = (torch.randn(T, D).to(dtype) for _ in range(4))
    return {
        "x": x,
        "residual": rest if residual else None,
        "weight": 1 + 0.3 * torch.randn(D) if affine else None,
        "bias": torch.randn(D) if affine else None,
        "rms": rms,
        "dropout_p": p,
        "seed": torch.tensor(3 << 40) if p else None,
        "dy": dy,
        "dsum": ds if dsum else None,
    }


def run(launch, given, dtype, compute=torch.float32, rows=torch.empty):
    """Forward and backward on one set of operands; ``rows`` makes the operands' memory."""

    def storage(x):
        return None if x is None else rows(x.shape, dtype=dtype).copy_(x)

    x, residual, dy, dsum = (storage(given[n]) for n in ("x", "residual", "dy", "dsum"))
    weight, bias = (None if given[n] is None else given[n].to(compute) for n in ("weight", "bias"))
    rms, dropout = given["rms"], (given["dropout_p"], given["seed"])
    T, D = x.shape
    y, dx, dresidual = (rows((T, D), dtype=dtype) for _ in range(3))
    s = rows((T, D), dtype=dtype) if residual is not None or given["dropout_p"] else None
    mean, rstd = torch.empty(2, T, dtype=compute)
    mean = None if rms else mean
    dweight, dbias = torch.empty(2, D, dtype=compute)
    launch.layer_norm_forward(x, residual, weight, bias, 1e-5, rms, *dropout, s, y, mean, rstd)
    launch.layer_norm_backward(
        x if s is None else s, dy, dsum, weight, rms, mean, rstd, *dropout, dx, dresidual, dweight,
        dbias,
    )  # fmt: skip
    results = {
        "y": y, "mean": mean, "rstd": rstd, "dx": dx, "dresidual": dresidual, "dweight": dweight,
        "dbias": dbias, "sum": s,
    }  # fmt: skip
    return {name: value for name, value in results.items() if value is not None}


def strided(shape, dtype):
    """Rows as in a wider tensor: an odd distance apart."""
    return torch.empty(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]


def compare(tolerances, kernels, given, dtype, rows=torch.empty):
    got = run(kernels, given, dtype, rows=rows)
    plain = run(reference, given, dtype)
    exact = run(reference, given, torch.float64, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("rms", [False, True])
def test_agrees(tolerances, poison, kernels, rms, T, D, dtype):
    given = operands(T, D, dtype, p=0.3, residual=True, dsum=True, affine=True, rms=rms)
    compare(tolerances, kernels, given, dtype)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dsum", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_options(tolerances, poison, kernels, rms, p, residual, dsum, affine):
    options = {"p": p, "residual": residual, "dsum": dsum, "affine": affine, "rms": rms}
    given = operands(5, 100, torch.float32, **options)
    compare(tolerances, kernels, given, torch.float32)


@pytest.mark.parametrize("D", [17, 64])
def test_rows_apart(tolerances, poison, kernels, D):
    given = operands(5, D, torch.bfloat16, p=0.3, residual=True, dsum=True, affine=True)
    compare(tolerances, kernels, given, torch.bfloat16, rows=strided)


@pytest.mark.parametrize("rms", [False, True])
def test_many_tiles(tolerances, poison, kernels, rms):
    """More tiles than programs: the sums over tokens continue from tile to tile."""
    options = {"p": 0.0, "residual": False, "dsum": True, "affine": True, "rms": rms}
    given = operands(70, 512, torch.float32, **options)
    compare(tolerances, kernels, given, torch.float32)


@pytest.mark.parametrize("wanted", ["dx", "dresidual", "dweight", "dbias"])
def test_one_gradient(kernels, wanted):
    x, dy = torch.randn(2, 5, 33)
    mean, rstd, weight = torch.zeros(5), torch.ones(5), torch.randn(33)

    def gradient(launch):
        out = torch.full((5, 33) if wanted in ("dx", "dresidual") else (33,), torch.nan)
        outs = dict.fromkeys(("dx", "dresidual", "dweight", "dbias")) | {wanted: out}
        launch.layer_norm_backward(x, dy, None, weight, False, mean, rstd, 0.0, None, **outs)
        return out

    torch.testing.assert_close(gradient(kernels), gradient(reference))


def test_large_mean_and_constant_rows(kernels):
    x = 1e4 + torch.randn(5, 100)
    x[2] = 7.1
    y, (mean, rstd) = torch.empty(5, 100), torch.empty(2, 5)
    kernels.layer_norm_forward(x, None, None, None, 1e-5, False, 0.0, None, None, y, mean, rstd)
    exact = torch.nn.functional.layer_norm(x.double(), (100,))
    assert (y - exact).abs().max() < 1e-3
    assert not y[2].any()


def test_dropped_elements_are_zero(kernels):
    x = torch.full((4, 64), torch.inf)
    s, y, (mean, rstd) = torch.empty(4, 64), torch.empty(4, 64), torch.empty(2, 4)
    seed = torch.tensor(1)
    kernels.layer_norm_forward(x, None, None, None, 1e-5, False, 1.0, seed, s, y, mean, rstd)
    assert not s.any()


def test_two_runs_are_alike_to_the_bit(kernels):
    given = operands(37, 64, torch.bfloat16, p=0.3, residual=True, dsum=True, affine=True)
    first, second = (run(kernels, given, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [1, 16, 17, 100, 512, 1024, 4096, 8192])
def test_tiles_hold_whole_rows(D, itemsize):
    kernels = pytest.importorskip("deepfast.kernels.layer_norm")
    for tile in (kernels.forward_tile(D, itemsize), kernels.backward_tile(D, itemsize)):
        channels = tile.BA * tile.BC
        assert D <= channels < max(32, 2 * D)
        assert tile.BT >= 1
        for fused in (False, True):
            programs, registers = kernels.backward_residency(tile, fused)
            assert programs * registers * 32 * tile.num_warps <= 65536
