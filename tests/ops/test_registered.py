"""The ops under torch's own machinery: dispatch, fake tensors, autocast, FLOP counts."""

import contextlib

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from deepfast import ops
from deepfast.cases.case import tuple_of
from deepfast.launches import LAUNCHES
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from tests.kernels.agreement import ABSENT, numbers
from tests.ops.cases import EVERY, NAMES, RMS, Call, D, P, T, equal, operator, results

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "p"),
    [*((name, P) for name in EVERY), *(pytest.param(name, 0.0, marks=SLOW) for name in EVERY)],
)
def test_opcheck(name, p):
    opcheck(*Call(name, "cpu", p).operator())


@pytest.mark.parametrize("name", [n for n, launch in LAUNCHES.items() if launch.op != "attention"])
def test_opcheck_of_the_compiled_launches(name):
    given = numbers(name, T=T, D=D, **ABSENT.get(name, {}))
    opcheck(operator(name), tuple(given.values()), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("name", [*NAMES, *RMS])
def test_the_operator_is_the_function(backend, name, p):
    """Eager code bypasses the dispatcher and gives the same bits."""
    c = Call(name, backend, p)
    operator, arguments = c.operator()
    count = len(c.run(*c.leaves))
    direct = results(lambda *_: tuple_of(operator(*arguments))[:count], c.leaves)
    assert equal(direct, results(c.run, c.leaves))


FULL, HALF = torch.float32, torch.bfloat16
AUTOCAST = {
    "norm_linear": [HALF, HALF],
    "feed_forward": [HALF, HALF],
    "attention": [HALF],
    "peephole_lstm": [HALF, HALF, FULL],
}
"""The dtypes of an op's results under bf16 autocast, where they are not fp32. Ops without a matrix
product leave their inputs as they are."""


@pytest.mark.parametrize("name", [*NAMES, *RMS])
def test_autocast_of_the_operator(backend, name):
    c = Call(name, backend, 0.0)
    operator, arguments = c.operator()
    with torch.autocast("cpu", torch.bfloat16):
        out = tuple_of(operator(*arguments))
        public = c.run(*c.leaves)
    expected = AUTOCAST.get(operator.name().split("::")[1], [FULL] * len(public))
    assert [o.dtype for o in public] == expected
    for a, b in zip(out, public, strict=False):
        assert torch.equal(a, b)
    out[0].float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in c.leaves)


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith("feed_forward")])
def test_flops(name):
    """Matrix products count, elementwise work does not, as in torch."""
    c = Call(name, "reference", 0.0)
    with FlopCounterMode(display=False) as counter:
        loss = sum(o.sum() for o in c.run(*c.leaves))
        forward = counter.get_total_flops()
        loss.backward()
    assert (forward, counter.get_total_flops() - forward) == c.case.flops


@pytest.mark.parametrize("layers", [3, 12])
def test_flops_of_a_stack(layers):
    """Each pair of layers counts once forward and twice backward, for any block size."""
    dlcl, history = DLCL(layers, D, backend="cpu"), DepthHistory()
    x = torch.randn(T, D, requires_grad=True)
    pairs = (layers + 1) * (layers + 2) // 2
    with FlopCounterMode(display=False) as counter:
        for _ in range(layers + 1):
            x = torch.tanh(dlcl(x, history))
        assert counter.get_total_flops() == 2 * pairs * T * D
        x.sum().backward()
    assert counter.get_total_flops() == 6 * pairs * T * D


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode"),
        (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "expected derivatives by torch"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_other_derivatives_are_an_error(name, transform, error):
    """Forward mode would give tangents of zero."""
    c = Call(name, "reference", 0.0)
    x, *rest = (t.detach() for t in c.leaves)
    with pytest.raises(NotImplementedError, match=rf"^[a-z_]+: {error}"):
        transform(lambda x: c.run(x, *rest)[0], x)


@pytest.mark.parametrize(
    ("name", "run"),
    {
        "rms_norm": lambda x: ops.rms_norm(x, None),
        "attention_residual": lambda x: ops.attention_residual([x], torch.ones(D)),
        "AttentionResiduals": lambda x: AttentionResiduals(2, D)(x, DepthHistory()),
    }.items(),
)
def test_the_error_names_what_was_called(name, run):
    with pytest.raises(NotImplementedError, match=f"^{name}: forward-mode"):
        torch.func.jvp(run, (torch.ones(2, D),), (torch.ones(2, D),))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FlopCounterMode])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("power", [1, 2])
def test_a_penalty_on_gradients_never_leaves_out_the_op(name, mode, power):
    """Tensors below the op also get gradients on other paths, which alone would be wrong. The
    gradient of a linear loss is constant, and its penalty must not vanish either."""
    c, below = Call(name, "reference", 0.0), torch.ones((), requires_grad=True)
    x, *rest = c.leaves

    def penalty():
        loss = sum(o.pow(power).sum() for o in c.run(x * below, *rest))
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), below)

    with mode(), pytest.raises(RuntimeError, match=rf"{name}: double backward .*\(create_graph="):
        penalty()
