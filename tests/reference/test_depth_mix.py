"""The specification of DLCL against the paper's formulas written out."""

import pytest
import torch
from torch import nn

from deepfast.reference.depth_mix import dlcl

COUNT, DIM = 4, 5


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("normalize_embedding", [True, False])
@pytest.mark.parametrize("extra", [(), (DIM,)])
@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize("row", range(COUNT))
def test_equations_8_and_9(row, norm, extra, normalize_embedding, rms):
    y = list(torch.randn(COUNT, 3, DIM, dtype=torch.float64))
    w = torch.randn(COUNT, COUNT, *extra, dtype=torch.float64)
    gain, shift = torch.randn(2, COUNT, DIM, dtype=torch.float64)

    def normalised(x, k):
        if k == 0 and not normalize_embedding:
            return x
        if rms:
            return nn.functional.rms_norm(x, (DIM,), gain[k], 1e-5)
        return nn.functional.layer_norm(x, (DIM,), gain[k], shift[k], 1e-5)

    z = [normalised(x, k) if norm == "pre" else x for k, x in enumerate(y)]
    expected = sum(w[row, k] * z[k] for k in range(row + 1))
    expected = normalised(expected, row) if norm == "post" else expected
    norms = {"norm": norm, "norm_weight": gain, "norm_bias": None if rms else shift, "rms": rms}
    got = dlcl(y, row, w, **norms, normalize_embedding=normalize_embedding)
    torch.testing.assert_close(got, expected)
