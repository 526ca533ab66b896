"""DLCL against the specification: every form, depth, width and dtype."""

import itertools

import pytest
import torch

from deepfast.nn import DLCL, DepthHistory
from tests.depth.forms import NORMS, WEIGHTS, form, normed

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


@pytest.mark.parametrize(("layers", "dim", "norm", "weight"), GRID)
def test_agrees(tolerances, chain, ran, layers, dim, norm, weight):
    c = chain(layers, dim, backend="cpu", **form(norm, weight, dim))
    with ran("boundary", "cpu"):
        c.compare(tolerances, torch.float32)


@pytest.mark.parametrize("block", [1, 3, 8, 1000])
@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_agrees_with_any_block(tolerances, chain, ran, norm, weight, block):
    c = chain(20, 33, block=block, backend="cpu", **form(norm, weight, 33))
    with ran("boundary", "cpu"):
        c.compare(tolerances, torch.float32)


@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_agrees_on_the_reference_backend(tolerances, chain, ran, norm, weight):
    c = chain(11, 17, block=4, backend="reference", **form(norm, weight, 17))
    with ran("boundary", "reference"):
        c.compare(tolerances, torch.float32)


@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_agrees_in_float64(tolerances, chain, backend, norm, weight):
    c = chain(13, 17, block=4, backend=backend, **form(norm, weight, 17))
    c.compare(tolerances, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_agrees_in_16_bits(tolerances, chain, backend, dtype, norm, weight):
    c = chain(13, 65, tokens=40, block=4, backend=backend, **form(norm, weight, 65))
    c.compare(tolerances, dtype)


PATTERNS = [
    {"window": 1}, {"window": 5}, {"window": 50}, {"dilation": 2}, {"dilation": 7},
    {"period": 3}, {"window": 9, "dilation": 3}, {"window": 6, "dilation": 2, "period": 4},
]  # fmt: skip


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("options", PATTERNS, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_agrees_within_a_pattern(tolerances, chain, norm, options, softmax):
    weight = WEIGHTS[len(str(options)) % 3]
    c = chain(19, 17, block=4, softmax=softmax, **form(norm, weight, 17), **options)
    got = c.compare(tolerances, torch.float32)
    outside = torch.ones(20, 20, dtype=torch.bool)
    for row, sources in enumerate(c.dlcl.pattern):
        outside[row, list(sources)] = False
    assert got["weight"][outside].eq(0).all()
    assert c.dlcl.effective_weight()[outside].eq(0).all()


@pytest.mark.parametrize("init", ["average", "one", "identity"])
@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_agrees_for_every_init(tolerances, chain, norm, init, learnable, softmax):
    options = normed(norm) | {"init": init, "learnable": learnable, "softmax": softmax}
    c = chain(9, 17, block=4, **options)
    got = c.compare(tolerances, torch.float32)
    assert ("weight" in got) == learnable


@pytest.mark.parametrize("norm", NORMS[:-1])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_agrees_with_a_normalised_embedding(tolerances, chain, backend, norm, weight):
    options = form(norm, weight, 17) | {"normalize_embedding": True, "backend": backend}
    chain(9, 17, block=4, **options).compare(tolerances, torch.float32)


def test_agrees_over_many_tokens(tolerances, chain):
    """Kernels take tokens in chunks, each with its own partial sums."""
    for norm, weight in FORMS:
        options = form(norm, weight, 37) | {"tokens": 333, "block": 3}
        chain(7, 37, **options).compare(tolerances, torch.float32)


@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_gradcheck(backend, norm, weight):
    dlcl = DLCL(4, 3, backend=backend, eps=0.1, **form(norm, weight, 3)).double()
    with torch.no_grad():
        for p in dlcl.parameters():
            p.copy_(torch.randn_like(p))
    y = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def f(y, *params):
        # gradcheck runs backward many times through one forward pass.
        history = DepthHistory(block=2, inplace=False)
        x = dlcl(y, history)
        for factor in range(1, 5):
            x = dlcl(torch.sin(x * factor), history)
        return x

    assert torch.autograd.gradcheck(f, (y, *dlcl.parameters()))


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize(("norm", "weight"), FORMS)
def test_gradients_in_place_are_the_same_bits(chain, backend, norm, weight, block):
    c = chain(14, 17, block=block, backend=backend, **form(norm, weight, 17))
    inplace = c.run(c.engine, torch.float32)
    c.inplace = False
    kept = c.run(c.engine, torch.float32)
    assert all(torch.equal(inplace[name], kept[name]) for name in kept)


KINDS = ["large mean", "huge", "tiny", "constant rows", "zero"]


# Cases of post-norm where nothing can be compared are left out. A large embedding hides all other
# states, and the gradients of its weights are zero up to rounding. The gradient of a constant row's
# norm is rounding times 1 / sqrt(eps).
EXTREMES = [(norm, kind) for norm in ("pre", "pre rms") for kind in KINDS]
EXTREMES += [(norm, kind) for norm in ("post", "post rms") for kind in ("tiny", "zero")]


@pytest.mark.parametrize(("norm", "kind"), EXTREMES)
def test_agrees_on_extreme_values(tolerances, chain, backend, norm, kind):
    # Many tokens, so that the rounding of a few means has little weight.
    options = normed(norm) | {"normalize_embedding": True, "backend": backend}
    c = chain(6, 65, tokens=60, block=2, **options)
    n = c.embedding
    c.embedding = {
        "large mean": n * 0.05 + 1000, "huge": n * 1e12, "tiny": n * 1e-12,
        "constant rows": n[:, :1].expand_as(n), "zero": n * 0,
    }[kind].contiguous()  # fmt: skip
    c.compare(tolerances, torch.float32)


# ---- init and the weights themselves -----------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_init(softmax):
    row = torch.arange(1.0, 6).view(-1, 1)
    lower = torch.ones(5, 5).tril()
    expected = {"average": lower / row, "one": lower, "identity": torch.eye(5)}
    for init, weight in expected.items():
        got = DLCL(4, 3, init=init, softmax=softmax).effective_weight()
        if softmax and init == "one":
            weight = lower / row
        torch.testing.assert_close(got.detach(), weight, atol=1e-6, rtol=0)


def test_init_within_a_pattern():
    got = DLCL(5, 3, window=3, dilation=2, init="average").effective_weight()
    assert got[4].tolist() == [0, 0, 0.5, 0, 0.5, 0]
    got = DLCL(5, 3, period=2, init="average").effective_weight()
    assert got[3].tolist() == [0, 0, 0, 1, 0, 0]


def test_group_channels_take_turns():
    dlcl = DLCL(2, 7, weight="group", groups=3)
    with torch.no_grad():
        dlcl.weight.copy_(torch.arange(3.0).expand(3, 3, 3))
    assert dlcl.effective_weight()[2, 1].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_parameter_shapes(weight):
    dlcl = DLCL(4, 6, **form("pre", weight, 6))
    extra = {"scalar": (), "group": (5,), "vector": (6,)}[weight]
    assert dlcl.weight.shape == (5, 5, *extra)
    assert dlcl.norm_weight.shape == dlcl.norm_bias.shape == (5, 6)
    assert DLCL(4, 6, norm=None).norm_weight is None
    assert DLCL(4, 6, norm_kind="rms").norm_bias is None


def test_state_dict_round_trip():
    a, b = DLCL(3, 4), DLCL(3, 4, init="one")
    b.load_state_dict(a.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("block", [1, 3, None])
def test_identity_equals_the_plain_stack(backend, weight, block):
    options = form(None, weight, 17) | {"init": "identity", "learnable": False}
    dlcl = DLCL(9, 17, backend=backend, **options)
    scales = torch.randn(9, 17, requires_grad=True)
    y = torch.randn(3, 17, requires_grad=True)
    history, x, plain = DepthHistory(block=block), None, y
    x = dlcl(y, history)
    for scale in scales:
        x, plain = dlcl(torch.tanh(x * scale), history), torch.tanh(plain * scale)
    assert torch.equal(x, plain)
    got = torch.autograd.grad(x.square().sum(), (y, scales))
    want = torch.autograd.grad(plain.square().sum(), (y, scales))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
