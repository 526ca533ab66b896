"""DLCL against its equation in plain torch: every form, depth, width, pattern and dtype."""

import itertools

import pytest
import torch

from deepfast.nn import DLCL, DepthHistory
from deepfast.reference.depth_mix import dlcl as specification
from tests.depth.stack import NORMS, WEIGHTS, Stack, agree, assert_rounded_once, form, results
from tests.nn.written_out import shaken
from tests.specifications.connections import PlainHistory, applied_weight

FORMS = list(itertools.product(NORMS, WEIGHTS))
DEPTHS, WIDTHS = [1, 2, 7, 33, 100], [1, 17, 64, 255, 512]
# Each depth with each width, and every day with two; the form changes from one pair to the next.
GRID = [
    pytest.param(
        layers, dim, *FORMS[i % len(FORMS)],
        marks=() if (i + i // len(WIDTHS)) % len(WIDTHS) in (0, 2) else pytest.mark.exhaustive,
    )
    for i, (layers, dim) in enumerate(itertools.product(DEPTHS, WIDTHS))
]  # fmt: skip
PATTERNS = [
    {"window": 1}, {"window": 5}, {"window": 50}, {"dilation": 2}, {"dilation": 7},
    {"period": 3}, {"window": 9, "dilation": 3}, {"window": 6, "dilation": 2, "period": 4},
]  # fmt: skip
OPTIONS = [
    {}, *PATTERNS, {"normalize_embedding": True}, {"softmax": True},
    *({"softmax": True} | pattern for pattern in PATTERNS[1::3]),
    {"init": "one"}, {"init": "identity"}, {"learnable": False},
    {"init": "identity", "learnable": False},
]  # fmt: skip


@pytest.mark.parametrize(("layers", "dim", "norm", "weight"), GRID)
def test_agrees(tolerances, ran, layers, dim, norm, weight):
    stack = Stack("dlcl", layers, dim, backend="cpu", **form(norm, weight, dim))
    with ran("boundary", "cpu"):
        agree(tolerances, stack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_agrees_in_16_bits(tolerances, backend, norm, weight, block, dtype):
    stack = Stack("dlcl", 13, 65, backend=backend, **form(norm, weight, 65))
    agree(tolerances, stack, dtype, tokens=40, block=block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dlcl", "attnres", "relu"])
def test_sums_in_16_bits_are_rounded_once(backend, name, dtype):
    assert_rounded_once(name, backend, dtype)


@pytest.mark.parametrize("block", [1, 3, 4, 8, 1000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("norm", NORMS)
def test_agrees_with_options(tolerances, ran, backend, norm, weight, options, block):
    stack = Stack("dlcl", 11, 17, backend=backend, **form(norm, weight, 17) | options)
    with torch.no_grad():
        # Nearly linear layers: behind saturated ones rounding errors grow from layer to layer, and
        # then the errors of any two ways to compute a stack differ by more than the rule allows.
        stack.scales *= 0.3
    with ran("boundary", backend):
        got = agree(tolerances, stack, block=block)
    assert ("depth.weight" in got) == options.get("learnable", True)
    outside = torch.ones(12, 12, dtype=torch.bool)
    for row, sources in enumerate(stack.depth.pattern):
        outside[row, list(sources)] = False
    assert stack.depth.effective_weight()[outside].eq(0).all()
    assert "depth.weight" not in got or got["depth.weight"][outside].eq(0).all()
    # In float64 both forms round alike, so the errors of one are no measure of the other's: the
    # gradient of a weight before a norm, which it cannot change, is nothing but their rounding.
    y, stack = torch.randn(3, 17, dtype=torch.float64), stack.double()
    got, want = (results(stack, h, y, y) for h in (DepthHistory(block=block), stack.plain()))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_specification(norm, weight, options):
    m, states = shaken(DLCL(7, 17, **form(norm, weight, 17) | options)).double(), []
    w, plain = applied_weight(m, m.weight), PlainHistory(m)
    for row in range(8):
        y = torch.randn(3, 17, dtype=torch.float64)
        states.append(y)
        x = specification(
            states, row, w, norm=m.norm, norm_weight=m.norm_weight, norm_bias=m.norm_bias,
            normalize_embedding=m.normalize_embedding, eps=m.eps, rms=m.norm_type == "rms",
        )  # fmt: skip
        torch.testing.assert_close(x, plain.push(y), rtol=1e-12, atol=1e-12)


def test_agrees_over_many_tokens(tolerances):
    """Kernels take tokens in chunks, each with its own partial sums."""
    for norm, weight in FORMS:
        agree(tolerances, Stack("dlcl", 7, 37, **form(norm, weight, 37)), tokens=333, block=3)


# Cases of post-norm where nothing can be compared are left out. A large embedding hides all other
# states, and the gradients of its weights are zero up to rounding. The gradient of a constant row's
# norm is rounding times 1 / sqrt(eps).
VALUES = {
    "tiny": lambda n: n * 1e-12,
    "zero": lambda n: n * 0,
    "large mean": lambda n: n * 0.05 + 1000,
    "huge": lambda n: n * 1e12,
    "constant rows": lambda n: n[:, :1].expand_as(n).contiguous(),
}
EXTREMES = [(norm, kind) for norm in ("pre", "pre rms") for kind in VALUES]
EXTREMES += [(norm, kind) for norm in ("post", "post rms") for kind in ("tiny", "zero")]


@pytest.mark.parametrize(("norm", "kind"), EXTREMES)
def test_agrees_on_extreme_values(tolerances, backend, norm, kind):
    # Many tokens, so that the rounding of a few means has little weight.
    stack = Stack("dlcl", 6, 65, normalize_embedding=True, backend=backend, **form(norm))
    agree(tolerances, stack, y=VALUES[kind](torch.randn(60, 65)), block=2)


@pytest.mark.parametrize("softmax", [False, True])
def test_init(softmax):
    row = torch.arange(1.0, 6).view(-1, 1)
    lower = torch.ones(5, 5).tril()
    average = lower / row
    expected = {"average": average, "one": lower, "identity": torch.eye(5)}
    for init, weight in expected.items():
        got = DLCL(4, 3, init=init, softmax=softmax).effective_weight()
        want = average if softmax and init == "one" else weight
        torch.testing.assert_close(got.detach(), want, atol=1e-6, rtol=0)


def test_the_weights_themselves():
    got = DLCL(5, 3, window=3, dilation=2, init="average").effective_weight()
    assert got[4].tolist() == [0, 0, 0.5, 0, 0.5, 0]
    got = DLCL(5, 3, period=2, init="average").effective_weight()
    assert got[3].tolist() == [0, 0, 0, 1, 0, 0]
    dlcl = DLCL(2, 7, weight_type="group", groups=3)
    with torch.no_grad():
        dlcl.weight.copy_(torch.arange(3.0).expand(3, 3, 3))
    assert dlcl.effective_weight()[2, 1].tolist() == [0, 1, 2, 0, 1, 2, 0]
