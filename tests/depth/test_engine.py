"""Depth connections against their equations in float64: every form, backend and push."""

import math
import random

import pytest
import torch
from torch.testing import assert_close

from deepfast import backend as backends
from deepfast.cases.case import Rows
from deepfast.cases.stacks import boundary
from deepfast.depth.push import OutNorm
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, TransformerEncoder
from tests.depth.stack import CONNECTIONS, DIM, Stack, leaf
from tests.ops.cases import assert_agrees
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


NORMS = ["pre", "post", "pre rms", "post rms", None]
WEIGHTS = ["scalar", "group", "vector"]


def form(norm, weight="scalar", dim=DIM):
    """The options of a DLCL: where its norms are, of which kind, and the shape of its weights."""
    where, _, kind = (norm or "").partition(" ")
    groups = max(1, min(5, dim - 1)) if weight == "group" else None
    norms = {"norm": where or None, "norm_type": kind or "layer"}
    return norms | {"weight_type": weight, "groups": groups}


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


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_is_the_equation(ran, backend, name, options, number):
    """With sizes, norms, blocks and kinds of push at random."""
    draw = random.Random(f"{backend} {name} {options} {number}").choice
    layers, dim = draw(range(1, 23)), draw([*range(1, 71), 255, 600])
    lead = draw([(1,), (3,), (9,), (70,), (), (2, 3), (2, 1, 3), (0,), (2, 0)])
    norm, out_norm = draw(NORMS), draw([None, "layer", "no bias", "bare", "rms"])
    if name == "dlcl":
        options = form(norm, draw(WEIGHTS), dim) | options
    else:
        options, norm = options | {"reads": draw([1, 2, 3])}, None
        layers = math.ceil(layers / options["reads"])
    # A post-norm row has its own norm. The embedding alone may have another, and all rows do not.
    out_norm = norm_of(None if norm and norm.startswith("post") else out_norm, dim)
    call = {"out_norm": out_norm, "return_x": out_norm is None or draw([True, False])}
    push = {
        "residual": draw([True, False]),
        "strided": draw([True, False]),
        "dropout_p": draw([0.0, 0.3]),
    }
    stack = Stack(name, layers, dim, backend=backend, eps=1e-3, **options).double()
    frozen = draw([(), (), (0,), (1,), (0, 2), (0, 1, 2)])
    for i, p in enumerate(stack.depth.parameters()):
        p.requires_grad_(p.requires_grad and i not in frozen)
    y = leaf(*lead, dim, dtype=torch.float64)
    leaves = [y, *stack.parameters(), *(out_norm or ())[:2]]
    leaves = [p for p in leaves if p is not None and p.requires_grad]
    found, dout = [], torch.randn_like(y)
    with ran(stack.depth.pass_kind.op, backend):
        for history in (DepthHistory(block=draw([None, 1, 2, 3, 4, 8, 1000])), stack.plain()):
            out = chain(stack, history, y, **push, **call)
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert_close(*found, rtol=1e-9, atol=1e-9)


# ---- accuracy ------------------------------------------------------------------------------------

VALUES = {
    "tiny": lambda n: n * 1e-12,
    "zero": lambda n: n * 0,
    "large mean": lambda n: n * 0.05 + 1000,
    "huge": lambda n: n * 1e12,
    "constant rows": lambda n: n[:, :1].expand_as(n) * 100,
}


@pytest.mark.skipif(not backends.compiled(), reason="needs the compiled ops")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", VALUES)
def test_is_accurate_on_extreme_values(norm, kind):
    """tests/ops/test_every_op.py has ordinary ones in every dtype."""
    for weight in ("scalar", "vector"):
        case = boundary(f"{weight}, {kind}", Rows((60,), 65), **form(norm, weight))
        for name, operand in case.operands.items():
            operand.x = VALUES[kind](operand.x) if name.startswith("y") else operand.x
        assert_agrees(case, "cpu")


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


def test_a_whole_encoder_agrees(emulated):
    """All kernels for a GPU together, with dropout: the masks are the reference's. CUDA's are
    emulated; where CUDA C++ has no kernel, Triton's run in its interpreter."""
    if reason := backends.why_unable("boundary", "cuda", "cpu", torch.float32):
        pytest.skip(reason)
    outputs = {}
    for name in ("cuda", "reference"):
        torch.manual_seed(5)
        encoder = TransformerEncoder(3, 16, 2, 24, dropout=0.2, backend=name)
        x = torch.randn(3, 5, 16, requires_grad=True)
        padding = torch.arange(5) >= torch.tensor([[5], [2], [4]])
        with backends.record() as seen:
            y = encoder(x, padding)
            grads = torch.autograd.grad(y.square().sum(), [x, *encoder.parameters()])
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
