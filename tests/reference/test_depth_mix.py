"""The specification of depth mixing against the paper's formulas written out."""

import pytest
import torch
from torch import nn

from deepfast.reference.depth_mix import depth_mix, dlcl

COUNT, DIM = 4, 5


def states():
    return list(torch.randn(COUNT, 3, DIM, dtype=torch.float64))


def norms():
    """A layer-norm for each index, and its parameters stacked."""
    modules = [nn.LayerNorm(DIM).double() for _ in range(COUNT)]
    for m in modules:
        nn.init.normal_(m.weight)
        nn.init.normal_(m.bias)
    stacked = [torch.stack([getattr(m, name) for m in modules]) for name in ("weight", "bias")]
    return modules, *stacked


def test_scalar_weights():
    y, w = states(), torch.randn(COUNT, dtype=torch.float64)
    expected = torch.einsum("k,ktd->td", w, torch.stack(y))
    torch.testing.assert_close(depth_mix(y, w), expected)


def test_a_weight_per_channel():
    y, w = states(), torch.randn(COUNT, DIM, dtype=torch.float64)
    expected = torch.einsum("kd,ktd->td", w, torch.stack(y))
    torch.testing.assert_close(depth_mix(y, w), expected)


def test_normalised_sources():
    y, w = states(), torch.randn(COUNT, dtype=torch.float64)
    modules, gain, shift = norms()
    expected = sum(w[k] * modules[k](y[k]) for k in range(COUNT))
    torch.testing.assert_close(depth_mix(y, w, norm_weight=gain, norm_bias=shift), expected)


@pytest.mark.parametrize("normalize_embedding", [True, False])
@pytest.mark.parametrize("extra", [(), (DIM,)])
@pytest.mark.parametrize("row", range(COUNT))
def test_equation_8_pre_norm(row, extra, normalize_embedding):
    y, w = states(), torch.randn(COUNT, COUNT, *extra, dtype=torch.float64)
    modules, gain, shift = norms()
    if not normalize_embedding:
        modules[0] = nn.Identity()
    expected = sum(w[row, k] * modules[k](y[k]) for k in range(row + 1))
    got = dlcl(
        y, row, w, norm="pre", norm_weight=gain, norm_bias=shift,
        normalize_embedding=normalize_embedding,
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("normalize_embedding", [True, False])
@pytest.mark.parametrize("row", range(COUNT))
def test_equation_9_post_norm(row, normalize_embedding):
    y, w = states(), torch.randn(COUNT, COUNT, dtype=torch.float64)
    modules, gain, shift = norms()
    if not normalize_embedding:
        modules[0] = nn.Identity()
    expected = modules[row](sum(w[row, k] * y[k] for k in range(row + 1)))
    got = dlcl(
        y, row, w, norm="post", norm_weight=gain, norm_bias=shift,
        normalize_embedding=normalize_embedding,
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_rms_norms(norm):
    y, w = states(), torch.randn(COUNT, COUNT, dtype=torch.float64)
    _, gain, _ = norms()

    def rms(x, k):
        return nn.functional.rms_norm(x, (DIM,), gain[k], 1e-5) if k else x

    z = [rms(source, k) for k, source in enumerate(y)] if norm == "pre" else y
    expected = sum(w[2, k] * z[k] for k in range(3))
    expected = rms(expected, 2) if norm == "post" else expected
    got = dlcl(y, 2, w, norm=norm, norm_weight=gain, rms=True)
    torch.testing.assert_close(got, expected)


def test_no_norm():
    y, w = states(), torch.randn(COUNT, COUNT, dtype=torch.float64)
    expected = sum(w[2, k] * y[k] for k in range(3))
    torch.testing.assert_close(dlcl(y, 2, w, norm=None), expected)
