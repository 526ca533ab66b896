"""The kernels of layer-norm and RMS norm: options, numbers that are not ordinary, and tiles."""

import pytest
import torch

from tests.kernels.agreement import agree

OP, FP32 = "layer_norm", torch.float32
RMS = {"rms": True, "mean": None}


@pytest.mark.each_value
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("without", [(), ("residual", "dsum", "dresidual"), ("weight", "bias")])
@pytest.mark.parametrize("rms", [{}, RMS], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_options(tolerances, poison, kernels, direction, rms, without, p):
    given = dict.fromkeys(without) | rms | {"dropout_p": p}
    if direction == "forward" and p == 0 and "residual" in given:
        given["sum"] = None
    agree(tolerances, kernels, f"layer_norm_{direction}", FP32, T=5, D=100, **given)


@pytest.mark.parametrize("wanted", ["dx", "dresidual", "dweight", "dbias"])
def test_one_gradient(tolerances, kernels, wanted):
    absent = {"dx", "dresidual", "dweight", "dbias"} - {wanted}
    agree(tolerances, kernels, "layer_norm_backward", FP32, T=5, D=33, **dict.fromkeys(absent))


def normalised(kernels, x, sum=None, **dropout):
    y, (mean, rstd) = torch.empty_like(x), torch.empty(2, len(x))
    kernels(OP).layer_norm_forward(
        x=x, eps=1e-5, rms=False, sum=sum, y=y, mean=mean, rstd=rstd, **dropout
    )
    return y


def test_large_mean_and_constant_rows(kernels):
    x = 1e4 + torch.randn(5, 100)
    x[2] = 7.1
    y = normalised(kernels, x, dropout_p=0.0)
    exact = torch.nn.functional.layer_norm(x.double(), (100,))
    assert (y - exact).abs().max() < 1e-3
    assert not y[2].any()


def test_dropped_elements_are_zero(kernels):
    s = torch.empty(4, 64)
    normalised(kernels, torch.full((4, 64), torch.inf), s, dropout_p=1.0, seed=torch.tensor(1))
    assert not s.any()


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
