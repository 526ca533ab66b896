"""DLCL against the specification: every form, depth, width and dtype."""

import itertools

import pytest
import torch

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory

NORMS = ["pre", "post", "pre rms", "post rms", None]
WEIGHTS = ["scalar", "group", "vector"]
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


def normed(norm):
    """The arguments for one of NORMS."""
    where, _, kind = (norm or "").partition(" ")
    return {"norm": where or None, "norm_kind": kind or "layer"}


def form(norm, weight, dim):
    groups = max(1, min(5, dim - 1)) if weight == "group" else None
    return normed(norm) | {"weight": weight, "groups": groups}


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


# ---- what a caller sees ------------------------------------------------------------------------


def test_bit_identical_on_any_number_of_threads(chain, threads):
    c = chain(12, 37, tokens=333, block=4, weight="vector")
    with threads(1):
        one = c.run(c.engine, torch.float32)
    for n in (2, 2, 3):
        with threads(n):
            got = c.run(c.engine, torch.float32)
        assert all(torch.equal(got[name], one[name]) for name in one)


def test_gradients_keep_the_dtype_of_their_input(backend):
    dlcl = DLCL(2, 5, backend=backend)
    y = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    history = DepthHistory()
    x = dlcl(torch.tanh(dlcl(y, history)), history)
    assert x.dtype == torch.bfloat16
    x.sum().backward()
    assert y.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in dlcl.parameters())


def test_weights_in_16_bits(backend):
    dlcl = DLCL(2, 5, backend=backend).bfloat16()
    y, history = torch.randn(3, 5, requires_grad=True), DepthHistory()
    x = dlcl(torch.tanh(dlcl(y, history)), history)
    x.sum().backward()
    assert x.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 for p in dlcl.parameters())


@pytest.mark.parametrize("kind", [DLCL, AttentionResiduals])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["float32", "autocast"])
def test_autocast(backend, kind, first, states):
    """Whatever the embedding is, and though layers end with a product in 16 bits."""
    m = kind(2, 5, states=states, backend=backend)
    y, history = torch.randn(3, 5, dtype=first, requires_grad=True), DepthHistory()
    with torch.autocast("cpu", torch.bfloat16):
        x = m(y, history)
        x = m(x @ torch.eye(5), history)
        x = m(x @ torch.eye(5), history, residual=x)
    dtype = {"float32": torch.float32, "autocast": torch.bfloat16}[states]
    assert history.state.states.dtype == x.dtype == dtype
    x.sum().backward()
    assert y.grad.dtype == first


def test_a_residual_stream_keeps_its_precision_under_autocast():
    dlcl, y = DLCL(2, 5), torch.randn(3, 5)

    def run():
        history = DepthHistory()
        x = dlcl(y, history)
        for _ in range(2):
            x = dlcl(x + torch.tanh(x), history)
        return x

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 1, 3, 5)])
def test_any_leading_dimensions(backend, shape):
    dlcl = DLCL(2, 5, backend=backend)
    y = torch.randn(shape, requires_grad=True)

    def run(y):
        history = DepthHistory()
        return dlcl(torch.tanh(dlcl(y, history)), history)

    x = run(y)
    assert torch.equal(x.view(-1, 5), run(y.view(-1, 5)))
    x.sum().backward()
    assert y.grad.shape == shape


def test_strides_change_nothing(backend):
    dlcl = DLCL(2, 19, backend=backend)
    y = torch.randn(12, 19)
    wide = torch.randn(12, 40)
    wide[:, 5:24] = y
    every_other = torch.randn(24, 19)
    every_other[::2] = y

    def run(y):
        y, history = y.detach().requires_grad_(), DepthHistory(block=1)
        x = dlcl(y, history)
        for _ in range(2):
            # The layer's output and the gradient it gets back are strided too.
            x = dlcl(torch.cat((x, x), 1)[:, 19:].tanh(), history)
        return x, torch.autograd.grad(x.square().sum(), y)[0]

    expected = run(y)
    for view in (wide[:, 5:24], every_other[::2], y.t().contiguous().t()):
        assert all(torch.equal(a, b) for a, b in zip(run(view), expected, strict=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("shape", [(0, 17), (2, 0, 17)])
def test_no_tokens(backend, norm, weight, shape):
    dlcl = DLCL(5, 17, backend=backend, **form(norm, weight, 17))
    y, history = torch.randn(shape, requires_grad=True), DepthHistory(block=2)
    x = dlcl(y, history)
    for _ in range(5):
        x = dlcl(torch.tanh(x), history)
    x.sum().backward()
    assert x.shape == y.grad.shape == shape
    assert all(p.grad.eq(0).all() for p in dlcl.parameters())


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


def test_a_state_outside_the_window_is_not_read(backend):
    """NaN in a source that is not read reaches neither a later row nor a gradient."""
    dlcl = DLCL(9, 5, window=3, backend=backend)
    ys = [torch.randn(4, 5) for _ in range(10)]
    bad = 2
    ys[bad][1, 1] = torch.nan
    for y in ys:
        y.requires_grad_()
    history = DepthHistory(block=4)
    xs = [dlcl(y, history) for y in ys]
    assert [bool(x.isnan().any()) for x in xs] == [bad <= row < bad + 3 for row in range(10)]
    torch.stack([x for row, x in enumerate(xs) if not bad <= row < bad + 3]).sum().backward()
    for k, y in enumerate(ys):
        assert k == bad or torch.isfinite(y.grad).all(), k
    column = torch.arange(10) == bad
    assert torch.isfinite(dlcl.weight.grad[:, ~column]).all()
    assert torch.isfinite(dlcl.norm_weight.grad[~column]).all()
    # Rows that never read the bad state get a finite gradient for it: exactly zero.
    assert dlcl.weight.grad[bad + 3 :, bad].eq(0).all()


@pytest.mark.parametrize(
    "trainable", list(itertools.product([True, False], repeat=3))[:-1], ids=str
)
@pytest.mark.parametrize("norm", NORMS[:-1])
def test_frozen_parameters(chain, backend, norm, trainable):
    c = chain(9, 17, block=4, backend=backend, **normed(norm))
    full = c.run(c.engine, torch.float32)
    # RMS norms have no bias.
    for p, flag in zip(c.dlcl.parameters(), trainable, strict=False):
        p.requires_grad_(flag)
    got = c.run(c.engine, torch.float32)
    names = [n for n, p in c.dlcl.named_parameters() if p.requires_grad]
    assert set(got) == {"out", "embedding", "scales", *names}
    for name in got:
        assert torch.equal(got[name], full[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "both"}, "norm must be one of .*got 'both'"),
        ({"norm_kind": "batch"}, "norm_kind must be one of .*got 'batch'"),
        ({"weight": "matrix"}, "weight must be one of"),
        ({"init": "zero"}, "init must be one of"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, got 0"),
        ({"num_layers": 1.5}, "num_layers must be a whole number of at least 1, got 1.5"),
        ({"dim": 0}, "dim must be a whole number of at least 1, got 0"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window": 2.5}, "window must be a whole number of at least 1, got 2.5"),
        ({"dilation": 0}, "dilation must be a whole number of at least 1, got 0"),
        ({"softmax": "no"}, "softmax must be True or False, got 'no'"),
        ({"eps": -1.0}, "eps must be a number of at least 0, got -1.0"),
        ({"period": 0}, "period must be a whole number of at least 1"),
        ({"weight": "group"}, r"weight='group' needs groups, from 1 to 4, got None$"),
        ({"groups": 2}, "groups=2 needs weight='group', got weight='scalar'$"),
        ({"weight": "group", "groups": 5}, "groups must be between 1 and 4, got 5"),
    ],
)
def test_refuses_options(change, message):
    with pytest.raises(ValueError, match=message):
        DLCL(**({"num_layers": 2, "dim": 4} | change))


@pytest.mark.parametrize(
    ("y", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "must be a tensor, got list"),
        (torch.ones(3, 5), {}, ValueError, r"must be \(..., 4\), got \(3, 5\)"),
        (torch.ones(3, 4, device="meta"), {}, ValueError, "the input must be on cpu, got meta"),
        (torch.ones(3, 4), {"residual": torch.ones(2, 4)}, ValueError, "residual must have"),
        (torch.ones(3, 4), {"dropout_p": 1.5}, ValueError, "between 0 and 1"),
        (torch.ones(3, 4), {"dropout_p": -0.5}, ValueError, "between 0 and 1"),
        (torch.ones(3, 4), {"dropout_p": 0.5, "seed": 1.5}, TypeError, "DLCL: seed must be an int"),
        (torch.ones(3, 4).int(), {}, RuntimeError, "torch.int32"),
    ],
)
def test_refuses_inputs(y, options, error, message):
    with pytest.raises(error, match=message):
        DLCL(2, 4)(y, DepthHistory(), **options)


def test_refuses_a_history_of_another_kind():
    with pytest.raises(TypeError, match="history must be a DepthHistory, got list"):
        DLCL(2, 4)(torch.ones(3, 4), [])
