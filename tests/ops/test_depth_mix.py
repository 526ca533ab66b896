"""deepfast.ops.depth_mix: every 16-bit value, and sources of one dimension."""

import pytest
import torch

from deepfast.ops import depth_mix

ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1 + 2**-9, 3.0, 2**-12])
@pytest.mark.parametrize("dim", [64, 1])
def test_agrees_on_every_16_bit_value(backend, dtype, factor, dim):
    """Loads and stores convert exactly as torch does: ties, subnormals, infinities, NaN."""
    x = ALL_BITS.view(dtype).view(-1, dim)
    got = depth_mix([x], torch.tensor([factor]), backend=backend)
    torch.testing.assert_close(got, (x.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_one_dimensional_sources(backend):
    sources = [torch.randn(8) for _ in range(3)]
    out = depth_mix(sources, torch.ones(3), norm_bias=torch.zeros(3, 8), backend=backend)
    exact = sum(torch.nn.functional.layer_norm(s, (8,)) for s in sources)
    torch.testing.assert_close(out, exact)
