"""deepfast.ops.peephole_lstm: its steps, threads, and values that are not ordinary."""

import pytest
import torch

from deepfast.cases import sentences
from deepfast.ops import peephole_lstm
from tests.ops.cases import equal


def operands(T, B, H, dtype=torch.float32):
    shapes = (T, B, 4 * H), (H, 4 * H), (3, H), (B, H), (B, H)
    scales = 2, H**-0.5, 1, 1, 1
    return [(s * torch.randn(shape)).to(dtype) for s, shape in zip(scales, shapes, strict=True)]


def test_any_number_of_threads_gives_the_same_bits(threads):
    case = sentences.peephole_lstm("", 3, 23, 33, reverse=True, begun=True)
    leaves = case.leaves(torch.float32, torch.float32)
    # The weight's gradient is torch's product.
    wanted = [x for name, x in leaves.items() if name != "weight"]
    found = []
    for count in (1, 2, 5):
        with threads(count):
            out = case.run(**leaves, backend="cpu")
            found.append([*out, *torch.autograd.grad(sum(o.sum() for o in out), wanted)])
    assert all(equal(again, found[0]) for again in found)


def test_extreme_values(any_backend):
    """Gates that are exactly 0 or 1, and a NaN that stays in its sentence."""
    f = torch.zeros(2, 4, 12)
    f[:, 0], f[:, 1], f[0, 2, 0] = 1e30, -1e30, torch.nan
    weight, peephole = torch.eye(3).repeat(1, 4), torch.ones(3, 3)
    h, _, c = peephole_lstm(f, weight, peephole, backend=any_backend)
    assert torch.equal(c[0], torch.full((3,), 2.0))
    assert h[:, 1].eq(0).all()
    assert h[:, 2, 0].isnan().all()
    assert h[:, 3].eq(0).all()


def test_tiny_values_keep_their_digits(backend):
    """tanh(x) is x for tiny x."""
    f = torch.zeros(1, 1, 4 * 16)
    f[..., :16] = torch.logspace(-30, -2, 16)
    h, _, c = peephole_lstm(f, torch.zeros(16, 64), torch.zeros(3, 16), backend=backend)
    exact = f[0, 0, :16].double().tanh() / 2
    torch.testing.assert_close(c[0].double(), exact, rtol=3e-7, atol=0)
    torch.testing.assert_close(h[0, 0].double(), exact.tanh() / 2, rtol=6e-7, atol=0)


@pytest.mark.parametrize("begun", [False, True])
def test_no_steps(backend, begun):
    """The state stays as it was."""
    leaves = [x.requires_grad_() for x in operands(0, 3, 5)][: 5 if begun else 3]
    begin = dict(zip(("h0", "c0"), leaves[3:], strict=False))
    out = peephole_lstm(*leaves[:3], **begin, reverse=True, backend=backend)
    assert out[0].shape == (0, 3, 5)
    assert equal(out[1:], leaves[3:] if begun else torch.zeros(2, 3, 5))
    grads = torch.autograd.grad(sum(o.sum() for o in out), leaves)
    assert equal(grads, [*map(torch.zeros_like, leaves[:3]), *torch.ones(2, 3, 5)][: len(leaves)])
