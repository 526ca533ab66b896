"""Depth connections against their equations in float64: every form, backend and push."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from deepfast import backend as backends
from deepfast.depth.push import OutNorm
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, TransformerEncoder
from tests.depth.stack import CONNECTIONS, DIM, NORMS, WEIGHTS, Stack, assert_accurate, form, leaf
from tests.specifications.connections import PlainHistory

FORMS = [
    *(("dlcl", options) for options in (
        {}, {"window": 1}, {"window": 5}, {"window": 50}, {"dilation": 2}, {"dilation": 7},
        {"period": 3}, {"window": 9, "dilation": 3}, {"window": 6, "dilation": 2, "period": 4},
        {"normalize_embedding": True}, {"softmax": True}, {"softmax": True, "window": 5},
        {"softmax": True, "dilation": 2}, {"init": "identity", "learnable": False},
    )),
    *(("attnres", options) for options in (
        {"scale": 0.5, "norm_affine": True}, {"window": 1}, {"window": 3, "norm_affine": True},
        {"score_function": "relu"}, {"score_function": "relu", "window": 2, "scale": 2.0},
        {"score_function": "relu", "block": 2}, {}, {"block": 1}, {"block": 2}, {"block": 5},
    )),
]  # fmt: skip
OUT_NORMS = [None, "layer", "no bias", "bare", "rms"]


def norm_of(kind, dim):
    """The norm of a row: an RMS norm, which has no bias, or a layer norm, "bare" without weight."""
    if kind is None:
        return None
    weight, bias = leaf(dim, dtype=torch.float64), leaf(dim, dtype=torch.float64)
    bias = bias if kind == "layer" else None
    return OutNorm(None if kind == "bare" else weight, bias, 1e-3, rms=kind == "rms")


def chain(stack, history, y, residual, dropout_p, strided, **call):
    """A sum over what all pushes return."""
    total, rest = 0.0, None
    for k in range(stack.depth.rows):
        # The layer's output and the gradient it gets back have strides.
        y = torch.cat((y, y), -1)[..., y.shape[-1] :] if strided else y
        p = dropout_p if k else 0.0
        x = stack.push(y, history, residual=rest, dropout_p=p, seed=11 * k, **call)
        x, n = x if call["out_norm"] else (x, x)
        assert (x is None) != call["return_x"]
        total = total + n + (0 if x is None else 0.5 * x)
        if k + 1 < stack.depth.rows:
            y, rest = stack.layer(k, n), n if residual else None
    return total


PUSHES = st.fixed_dictionaries(
    {
        "dropout_p": st.sampled_from([0.0, 0.3]),
        "residual": st.booleans(),
        "out_norm": st.sampled_from(OUT_NORMS),
        "return_x": st.booleans(),
        "strided": st.booleans(),
    }
)


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
@settings(max_examples=6)
@given(
    kind=st.tuples(st.sampled_from(NORMS), st.sampled_from(WEIGHTS), st.integers(1, 3)),
    frozen=st.sampled_from([(), (), (0,), (1,), (0, 2), (0, 1, 2)]),
    size=st.tuples(st.integers(1, 22), st.integers(1, 70) | st.sampled_from([255, 600])),
    lead=st.sampled_from([(1,), (3,), (9,), (70,), (), (2, 3), (2, 1, 3), (0,), (2, 0)]),
    block=st.sampled_from([None, 1, 2, 3, 4, 8, 1000]),
    push=PUSHES,
)
def test_is_the_equation(ran, backend, name, options, kind, frozen, size, lead, block, push):
    torch.manual_seed(0)
    (norm, weight, reads), (layers, dim) = kind, size
    if name == "dlcl":
        options = form(norm, weight, dim) | options
    else:
        options, norm = options | {"reads": reads}, None
        layers = math.ceil(layers / reads)
    # A post-norm row has its own norm. The embedding alone may have another, and all rows do not.
    out_norm = norm_of(None if norm and norm.startswith("post") else push["out_norm"], dim)
    push |= {"out_norm": out_norm, "return_x": push["return_x"] or out_norm is None}
    stack = Stack(name, layers, dim, backend=backend, eps=1e-3, **options).double()
    for i, p in enumerate(stack.depth.parameters()):
        p.requires_grad_(p.requires_grad and i not in frozen)
    y = leaf(*lead, dim, dtype=torch.float64)
    leaves = [y, *stack.parameters(), *(out_norm or ())[:2]]
    leaves = [p for p in leaves if p is not None and p.requires_grad]
    found, dout = [], torch.randn_like(y)
    with ran(stack.depth.pass_kind.op, backend):
        for history in (DepthHistory(block=block), stack.plain()):
            out = chain(stack, history, y, **push)
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert_close(*found, rtol=1e-9, atol=1e-9)


# ---- accuracy ------------------------------------------------------------------------------------

SIZES = [(1, 17, 3), (7, 37, 333), (33, 255, 3), (13, 65, 40), (100, 64, 3), (7, 512, 3)]
ACCURACY = [(norm, weight) for norm in NORMS for weight in WEIGHTS]


@pytest.mark.parametrize("kind", ACCURACY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_accurate(tolerances, dtype, kind):
    """The size and the block change from one kind to the next. Kernels take many tokens in chunks,
    each with its own partial sums."""
    number = ACCURACY.index(kind)
    sizes = {torch.bfloat16: (13, 65, 40), torch.float16: (5, 37, 333)}
    layers, dim, tokens = sizes.get(dtype, SIZES[5 * number % 6])
    stack = Stack("dlcl", layers, dim, **form(*kind, dim))
    assert_accurate(tolerances, stack, dtype, tokens=tokens, block=[3, 1, 8, 4][number % 4])


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
def test_is_accurate_on_extreme_values(tolerances, backend, norm, kind):
    # Many tokens, so that the rounding of a few means has little weight.
    stack = Stack("dlcl", 6, 65, normalize_embedding=True, backend=backend, **form(norm))
    assert_accurate(tolerances, stack, y=VALUES[kind](torch.randn(60, 65)), block=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dlcl", "attnres", "relu"])
def test_sums_in_16_bits_are_rounded_once(backend, name, dtype):
    """Rows of states, and the gradients of the states, are those in float64 rounded once."""
    make, own = CONNECTIONS[name]
    own = own | ({"norm": None} if make is DLCL else {})
    m = make(11, 8, backend=backend, **own)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p))
    assert_rounded_once(m, *torch.randn(2, 12, 6, 8).to(dtype))
    if make is DLCL:
        # In fp16 some sums pass the largest number and come back.
        m.weight.data.sign_()
        assert_rounded_once(m, *torch.full((2, 12, 6, 8), 4e4, dtype=dtype))


def assert_rounded_once(m, y, g):
    pushed, history = [x.clone().requires_grad_() for x in y], DepthHistory(block=3)
    xs = [m(x, history) for x in pushed]
    grads = torch.autograd.grad(xs, pushed, list(g))
    exact, plain = y.double().requires_grad_(), PlainHistory(m, torch.float64)
    rows = torch.stack([plain.push(x) for x in exact])
    (dy,) = torch.autograd.grad(rows, exact, g.double())
    for got, want in ((xs, rows), (grads, dy)):
        # A sum in fp32 may lie on the other side of the middle between two numbers of 16 bits.
        assert_close(torch.stack(got), want.to(y.dtype), rtol=torch.finfo(y.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("server", ["cuda", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_whole_encoder_agrees(request, server):
    """All kernels for a GPU together, with dropout: the masks are the reference's. Without a GPU
    Triton's run in its interpreter, where they take seconds, and CUDA's are emulated."""
    if server == "cuda":
        request.getfixturevalue("emulated")
    if reason := backends.why_unable("boundary", server, "cpu", torch.float32):
        pytest.skip(reason)
    outputs = {}
    # Where attention is torch's, so is the mask on its weights.
    attention_dropout = 0.0 if server in backends.SDPA else 0.2
    for name in (server, "reference"):
        torch.manual_seed(5)
        encoder = TransformerEncoder(
            3, 16, 2, 24, dropout=0.2, attention_dropout=attention_dropout, backend=name
        )
        x = torch.randn(3, 5, 16, requires_grad=True)
        padding = torch.arange(5) >= torch.tensor([[5], [2], [4]])
        with backends.record() as seen:
            y = encoder(x, padding)
            grads = torch.autograd.grad(y.square().sum(), [x, *encoder.parameters()])
        # Where CUDA C++ has no kernel, Triton's run.
        served = ("boundary", "attention") if name == "cuda" else backends.OPS
        assert set(seen) == {(op, name if op in served else "triton") for op, _ in seen}
        outputs[name] = [y, *grads]
    assert_close(*outputs.values(), rtol=2e-4, atol=2e-4)


# ---- the parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_init(softmax):
    lower = torch.ones(5, 5).tril()
    average = lower / torch.arange(1.0, 6).view(-1, 1)
    expected = {"average": average, "one": lower, "identity": torch.eye(5)}
    for init, weight in expected.items():
        dlcl = DLCL(4, 3, init=init, softmax=softmax)
        want = average if softmax and init == "one" else weight
        assert_close(dlcl.effective_weight().detach(), want, atol=1e-6, rtol=0)
    assert not DLCL(4, 3, learnable=False).weight.requires_grad
    # A softmax is a mean.
    assert not AttentionResiduals(5, DIM).query.any()


@pytest.mark.parametrize("options", [o for name, o in FORMS if name == "attnres"], ids=str)
def test_mean_weights(options):
    """Each row's sum of sources, weighed for each of the tokens: here a single one."""
    m = Stack("attnres", 5, **options).depth.double()
    v, history, states = torch.randn(6, 1, DIM, dtype=torch.float64), DepthHistory(), []
    means = m.mean_weights(list(v))
    for x, continues in zip(v, m.continues, strict=True):
        states.append(x + states[-1] if continues else x)
    for row, x in enumerate(v):
        assert_close(m(x, history), (means[row].unsqueeze(-1) * torch.cat(states)).sum(0, True))
        assert not means[row, row + 1 :].any()


def test_a_half_precision_query_is_scaled_in_fp32():
    m, history = AttentionResiduals(2, DIM, scale=100.0).half(), DepthHistory()
    with torch.no_grad():
        m.query.fill_(1000)
    assert all(m(x, history).isfinite().all() for x in torch.randn(3, 3, DIM).half())
