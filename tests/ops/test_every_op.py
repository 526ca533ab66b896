"""All ops agree with float64; strides, threads and gradients that are not wanted change nothing."""

from functools import partial
from itertools import combinations, product

import pytest
import torch

from deepfast.cases import ops, stacks
from deepfast.cases.case import Rows, tuple_of
from deepfast.cases.sizes import LISTED, Sizes
from tests.ops.cases import EVERY, HERE, PRODUCTS, ROWS, Call, P, assert_agrees, equal, results

EVERY_OP = pytest.mark.parametrize("name", EVERY)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

FP32, BF16, FP16, FP64 = DTYPES
# Rows with and without whole vectors, with several kinds of tail; rows of more than 8192 channels.
SIZES = {
    "small": (Sizes(5, 17, 32, 20), {"cpu": (FP32, BF16), "reference": (BF16, FP64)}),
    "few": (Sizes(5, 17, 32, 20, 9), {"cpu": (FP16, FP64)}),
    "one": (Sizes(1, 1, 8, 36), {"cpu": (FP32,)}),
    "more": (Sizes(70, 255, 64, 33, 9), {"cpu": (BF16,)}),
    "wide": (Sizes(2, 9001, 8192, 129, 9), {"cpu": (FP32,)}),
}
"""By name the sizes of the calls, and for each backend the dtypes that they run in."""

# The weights or states of these would be large at wide rows. Of a norm of one channel only rounding
# would be compared. The stacks have no plain form to compare the reference with.
LEFT_OUT = {(op, "wide") for op in LISTED if op not in ops.KERNELS}
LEFT_OUT |= {(op, which) for op in stacks.KERNELS for which in ("one", "reference")}
CALLS = [
    (op, by, size, dtype)
    for op in LISTED
    for size, (_, dtypes) in SIZES.items()
    for by in HERE
    for dtype in dtypes.get(by, ())
    if LEFT_OUT.isdisjoint({(op, size), (op, by)})
]
CALLS += [
    pytest.param(op, "triton", "few", FP16, marks=pytest.mark.slow)
    for op in LISTED
    if "triton" in HERE
]


@pytest.mark.parametrize(("op", "by", "size", "dtype"), CALLS, ids=str)
def test_agrees(op, by, size, dtype):
    """Forward and backward with float64, and at small sizes to the bit with another run."""
    for case in LISTED[op](SIZES[size][0]):
        assert_agrees(case, by, dtype, runs=1 + (size == "small"))


EXTREMES = {
    "a large mean": lambda x: x * 0.05 + 1000,
    "huge": lambda x: x * 1e15,
    "tiny": lambda x: x * 1e-15,
    "constant rows": lambda x: x[:, :1].expand_as(x) * 100,
    "zero": lambda x: x * 0,
    "one outlier": lambda x: x + 1e4 * (torch.arange(x.shape[1]) == 3),
    "far from zero": lambda x: x * 3 + 9 * x.sign(),
}
"""Values that sums of squares, variances and exponentials must survive."""
SOME = ("a large mean", "huge", "tiny")
AT_EXTREMES = {
    "layer_norm": (partial(ops.layer_norm, residual=False), (500, 8191), EXTREMES),
    "rms_norm": (partial(ops.rms_norm, residual=False), (64,), EXTREMES),
    "relu": (partial(ops.activation, kind="relu", p=P), (130,), EXTREMES),
    "gelu": (partial(ops.activation, kind="gelu", p=P), (130,), EXTREMES),
    "depth_mix": (partial(ops.depth_mix, count=3), (130,), SOME),
    "depth_attention": (partial(ops.depth_attention, count=5, hops=2), (70,), SOME),
}


@pytest.mark.parametrize("name", AT_EXTREMES)
@pytest.mark.parametrize("by", HERE)
def test_agrees_on_extreme_values(by, name):
    make, dims, kinds = AT_EXTREMES[name]
    # Triton's interpreter is slow.
    rows, dims, kinds = (5, (33,), SOME) if by == "triton" else (9, dims, kinds)
    for dim, kind in product(dims, kinds):
        case = make(kind, Rows((rows,), dim))
        for operand in case.operands.values():
            if operand.x.shape == (rows, dim):
                operand.x = EXTREMES[kind](operand.x)
        assert_agrees(case, by, runs=1)


FP32_RESULTS = {"depth_attention": (1,), "linear_cross_entropy": (0,), "peephole_lstm": (2,)}
"""Which results of an op have the compute dtype, as its statistics have."""


@EVERY_OP
def test_dtypes_of_results(name):
    """Results and gradients have the dtype of what they belong to; statistics are fp32."""
    case = Call(name).case
    for leaves in (case.leaves(BF16, BF16), case.of_one_dtype(BF16)):
        out = tuple_of(case.run(**leaves, backend=None))
        wide = FP32_RESULTS.get(name.partition(",")[0], ())
        assert [o.dtype for o in out] == [FP32 if i in wide else BF16 for i in range(len(out))]
        grads = torch.autograd.grad([o.float().sum() for o in out], list(leaves.values()))
        assert [g.dtype for g in grads] == [x.dtype for x in leaves.values()]


@pytest.mark.parametrize("name", [*ROWS, *PRODUCTS])
def test_no_tokens(name):
    c = Call(name, lead=(2, 0))
    out = c.run(*c.leaves)
    sum(o.sum() for o in out).backward()
    assert all(o.shape[:2] == (2, 0) for o in out)
    assert all(x.grad.shape == x.shape and x.grad.eq(0).all() for x in c.leaves)


VIEWS = {
    "a slice of channels": lambda t: torch.cat((-t, t, -t), 1)[:, t.shape[1] : -t.shape[1]],
    "every other token": lambda t: t.repeat_interleave(2, 0)[::2],
    "two leading dimensions": lambda t: (
        t.view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1)
    ),
    "channels apart": lambda t: t.t().contiguous().t(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "depth_attention, scores"])
def test_strides_change_nothing(name, view):
    """Of the operands, and of the results' gradients."""
    c, view = Call(name, lead=12, dim=19), VIEWS[view]
    plain = c.run(*c.leaves)
    grads = [torch.randn(12, o[0].numel()) for o in plain]
    leaves = [view(x.detach()).requires_grad_() if x.shape == (12, 19) else x for x in c.leaves]
    out = c.run(*leaves)
    strided = [view(g).unflatten(-1, o.shape[1:]) for g, o in zip(grads, plain, strict=True)]
    got = [*out, *torch.autograd.grad(out, leaves, strided)]
    grads = [g.view(o.shape) for g, o in zip(grads, plain, strict=True)]
    expected = [*plain, *torch.autograd.grad(plain, c.leaves, grads)]
    assert equal([a.reshape(b.shape) for a, b in zip(got, expected, strict=True)], expected)


@pytest.mark.parametrize("name", [*ROWS, "attention"])
def test_bit_identical_on_any_number_of_threads(threads, name):
    c = Call(name, lead=333, dim=67)
    one = results(c.run, c.leaves)
    for n in (2, 2, 3):
        with threads(n):
            assert equal(results(c.run, c.leaves), one)


@EVERY_OP
def test_a_gradient_does_not_depend_on_which_others_are_wanted(name):
    """Each alone, all but one, and, where the gradients are few, in pairs."""
    c = Call(name)
    count = len(c.leaves)
    expected = results(c.run, c.leaves)[-count:]
    for size in {1, 2 if 2 < count < 7 else 1, max(1, count - 1)}:
        for wanted in combinations(range(count), size):
            leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(c.leaves)]
            got = results(c.run, leaves, [leaves[i] for i in wanted])[-size:]
            assert equal(got, [expected[i] for i in wanted])
    with torch.no_grad():
        assert not any(o.requires_grad for o in c.run(*c.leaves))


@EVERY_OP
def test_results_without_a_gradient(name):
    """One result alone is as with zeros for the others; none at all gives no gradient."""
    c = Call(name)
    out = c.run(*c.leaves)
    for i, o in enumerate(out if len(out) > 1 else ()):
        alone = o.square().sum()
        zeros = sum(other.sum() * 0 for j, other in enumerate(out) if j != i)
        got, want = (
            torch.autograd.grad(loss, c.leaves, retain_graph=True, materialize_grads=True)
            for loss in (alone, alone + zeros)
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    sum(torch._C._functions.UndefinedGrad()(o).sum() for o in out).backward()
    assert all(x.grad is None for x in c.leaves)


@EVERY_OP
def test_a_second_backward(name):
    """The same bits where the graph was retained, also from gradients that are expanded; an error
    where it was not."""
    c = Call(name)
    out = c.run(*c.leaves)
    rows = [torch.rand(o.shape[-1:]).expand(o.shape) for o in out]
    first = torch.autograd.grad(out, c.leaves, rows, retain_graph=True)
    assert equal(first, torch.autograd.grad(out, c.leaves, [row.contiguous() for row in rows]))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, c.leaves, rows)


@EVERY_OP
def test_on_the_meta_device(name):
    c = Call(name, p=0.0 if name == "attention" else P)
    leaves = [x.detach().to("meta").requires_grad_() for x in c.leaves]
    with torch.device("meta"):
        out = c.run(*leaves)
    out[0].sum().backward()
    assert all(x.grad.is_meta and x.grad.shape == x.shape for x in leaves)
