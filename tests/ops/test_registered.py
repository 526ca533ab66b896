"""The ops under torch's own machinery: dispatch, fake tensors, autocast, FLOP counts, traces."""

import contextlib
import re

import pytest
import torch
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from deepfast import ops
from deepfast.cases.case import tuple_of
from deepfast.launches import LAUNCHES
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, TransformerEncoder
from tests.kernels.agreement import ABSENT, numbers
from tests.ops.cases import EVERY, NAMES, RMS, ROWS, Call, D, T, equal, results

# test_graphs.py compiles the ops.
CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"


@pytest.mark.parametrize("name", EVERY)
def test_opcheck(name):
    opcheck(*Call(name).operator(), test_utils=CHECKS)


@pytest.mark.parametrize("name", [n for n, launch in LAUNCHES.items() if launch.op != "attention"])
def test_opcheck_of_the_compiled_launches(name):
    given = numbers(name, T=T, D=D, **ABSENT.get(name, {}))
    opcheck(getattr(torch.ops.deepfast, name), tuple(given.values()), test_utils=CHECKS[::2])


@pytest.mark.parametrize("name", [*NAMES, *RMS])
def test_the_operator_is_the_function(name):
    """Eager code bypasses the dispatcher and gives the same bits."""
    c = Call(name)
    operator, arguments = c.operator()
    count = len(c.run(*c.leaves))
    direct = results(lambda *_: tuple_of(operator(*arguments))[:count], c.leaves)
    assert equal(direct, results(c.run, c.leaves))


@pytest.mark.parametrize("name", [*NAMES, *RMS])
def test_autocast(name):
    """It casts the operands of matrix products, and not the parameters of a norm or a gate. Ops
    without a matrix product leave their operands as they are."""
    c = Call(name, p=0.0)
    operator, arguments = c.operator()
    with torch.autocast("cpu", torch.bfloat16):
        out = tuple_of(operator(*arguments))
        public = c.run(*c.leaves)
    cast = torch.float32 if name in ROWS else torch.bfloat16
    expected = c.run(*c.case.leaves(cast, cast).values())
    assert [o.dtype for o in public] == [o.dtype for o in expected]
    assert equal(public, expected)
    assert equal(out[: len(public)], public)
    out[0].float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in c.leaves)


@pytest.mark.parametrize("name", EVERY)
def test_flops(name):
    """Matrix products count, elementwise work does not, as in torch."""
    c = Call(name, "reference", 0.0)
    with FlopCounterMode(display=False) as counter:
        loss = sum(o.sum() for o in c.run(*c.leaves))
        forward = counter.get_total_flops()
        loss.backward()
    assert (forward, counter.get_total_flops() - forward) == c.case.flops


def test_flops_of_a_stack():
    """Each pair of layers counts once forward and twice backward."""
    layers = 12
    dlcl, history = DLCL(layers, D, backend="cpu"), DepthHistory()
    x = torch.randn(T, D, requires_grad=True)
    pairs = (layers + 1) * (layers + 2) // 2
    with FlopCounterMode(display=False) as counter:
        for _ in range(layers + 1):
            x = torch.tanh(dlcl(x, history))
        assert counter.get_total_flops() == 2 * pairs * T * D
        x.sum().backward()
    assert counter.get_total_flops() == 6 * pairs * T * D


TRANSFORMS = [
    (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode"),
    (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "expected derivatives by torch"),
]


@pytest.mark.parametrize("name", NAMES)
def test_other_derivatives_are_an_error(name):
    """Forward mode would give tangents of zero."""
    c = Call(name, "reference", 0.0)
    x, *rest = (t.detach() for t in c.leaves)
    for transform, error in TRANSFORMS:
        with pytest.raises(NotImplementedError, match=rf"^[a-z_]+: {error}"):
            transform(lambda x: c.run(x, *rest)[0], x)


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


NODES = "attention boundary boundary_parameters feed_forward pack unpack layer_norm"


def test_traces_show_each_node_by_its_name():
    encoder = TransformerEncoder(2, D, 2, 32)
    x, mask = torch.randn(2, 5, D, requires_grad=True), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    connection, history = AttentionResiduals(2, D), DepthHistory()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        y = encoder(x, mask)
        for _ in range(3):
            y = connection(y, history)
        ops.layer_norm(y, None, None).sum().backward()
    found = {event.name.split(": ")[-1] for event in profiled.events()}
    torchs = r"aten::|torch::|\w+Backward0$|detach$"
    found = {name for name in found if not re.match(torchs, name)}
    assert all(name.startswith("deepfast::") for name in found), found
    for node in NODES.split():
        assert {f"deepfast::{node}", f"deepfast::{node}Backward"} <= found, node
