"""Mistakes with a connection and its history raise an error of one sentence and change nothing."""

import math

import pytest
import torch
from torch import nn

from deepfast.backend import BackendError
from deepfast.depth.push import OutNorm
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm
from tests.depth.stack import CONNECTIONS, DIM, EACH, TOKENS, Stack, history, leaf

WHOLE = "must be an integer of at least 1, got"
OPTIONS = [
    (DLCL, {"norm": "both"}, "norm must be one of .*got .both"),
    (DLCL, {"norm_type": "batch"}, "norm_type must be one of .*got .batch"),
    (DLCL, {"weight_type": "matrix"}, "weight_type must be one of"),
    (DLCL, {"init": "zero"}, "init must be one of"),
    (DLCL, {"num_layers": 0}, f"num_layers {WHOLE} 0"),
    (DLCL, {"dim": 0}, f"dim {WHOLE} 0"),
    (DLCL, {"window": 2.5}, f"window {WHOLE} 2.5"),
    (DLCL, {"dilation": 0}, f"dilation {WHOLE} 0"),
    (DLCL, {"period": 0}, f"period {WHOLE} 0"),
    (DLCL, {"softmax": "no"}, "softmax must be True or False, got 'no'"),
    (DLCL, {"eps": -1.0}, "eps must be a number of at least 0, got -1.0"),
    (DLCL, {"weight_type": "group"}, "weight_type='group' needs groups, from 1 to 12, got None$"),
    (DLCL, {"groups": 2}, "groups=2 needs weight_type='group', got weight_type='scalar'$"),
    (DLCL, {"weight_type": "group", "groups": 13}, "groups must be between 1 and 12, got 13"),
    (AttentionResiduals, {"num_layers": 0}, f"num_layers {WHOLE} 0"),
    (AttentionResiduals, {"block": 0}, f"block {WHOLE} 0"),
    (AttentionResiduals, {"block": 2, "window": 2}, "expected block or window, got both"),
    (AttentionResiduals, {"score_function": "linear"}, "score_function must be one of"),
    (AttentionResiduals, {"scale": math.inf}, "scale must be a finite number"),
    (AttentionResiduals, {"eps": math.nan}, "eps must be a number of at least 0, got nan"),
]


@pytest.mark.parametrize(("kind", "options", "message"), OPTIONS)
def test_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"num_layers": 2, "dim": DIM} | options)


def test_options_of_a_history():
    for block in (0, 1.5, "a"):
        with pytest.raises(ValueError, match=f"block {WHOLE} {block!r}"):
            DepthHistory(block=block)


X = torch.ones(TOKENS, DIM)
NORM = LayerNorm(DIM).as_output()
CALLS = [
    ([1.0], {}, TypeError, "the layer's output must be a tensor, got list"),
    (None, {}, TypeError, "the layer's output must be a tensor, got NoneType"),
    (torch.ones(3, 5), {}, ValueError, r"must be \(..., 12\), got \(3, 5\)"),
    (X.to("meta"), {}, ValueError, "the input must be on cpu, got meta"),
    (X.int(), {}, ValueError, "the input must have a floating-point dtype, got torch.int32"),
    (X, {"history": []}, TypeError, "history must be a DepthHistory, got list"),
    (X, {"history": None}, TypeError, "history must be a DepthHistory, got NoneType"),
    (X, {"residual": torch.ones(2, DIM)}, ValueError, "residual must have"),
    (X, {"dropout_p": 1.5}, ValueError, "between 0 and 1"),
    (X, {"dropout_p": -0.5}, ValueError, "between 0 and 1"),
    (X, {"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed must be an int"),
    (X, {"index": "a"}, TypeError, "index must be an integer, got 'a'"),
    (X, {"return_x": False}, ValueError, "return_x=False needs out_norm, got None"),
    (X, {"out_norm": nn.LayerNorm(DIM)}, TypeError, "out_norm must be an OutNorm"),
    (X, {"out_norm": (1, 2)}, TypeError, "out_norm must be an OutNorm"),
    *(
        (X, {"out_norm": NORM._replace(eps=eps)}, ValueError, r"out_norm\.eps must be a number")
        for eps in (-1.0, math.nan, "1e-5")
    ),
]


@EACH
@pytest.mark.parametrize(("y", "options", "error", "message"), CALLS)
def test_a_first_push(name, y, options, error, message):
    """The history can be used again."""
    stack, h = Stack(name), history()
    with pytest.raises(error, match=f"^{stack.depth.name}: .*{message}"):
        stack.depth(**{"y": y, "history": h} | options)
    stack(leaf(), h).sum().backward()


@EACH
@pytest.mark.parametrize(
    ("y", "options", "error", "message"),
    [
        (torch.ones(6, DIM), {}, ValueError, r"must be alike: expected \(5, 12\) .*got \(6, 12\)"),
        (X.view(1, TOKENS, DIM), {}, ValueError, r"expected \(5, 12\) .*got \(1, 5, 12\)"),
        (X.double(), {}, ValueError, r"torch.float32 .*got \(5, 12\) of torch.float64"),
        (torch.ones(TOKENS, 13), {}, ValueError, r"must be \(..., 12\), got \(5, 13\)"),
        (X.to("meta"), {}, ValueError, "the input must be on cpu, got meta"),
        *(
            (X, {"index": i}, RuntimeError, f"out of order: expected index 1, got {i}")
            for i in (0, 2, 5, -1)
        ),
    ],
)
def test_a_second_push(backend, name, y, options, error, message):
    stack, h, first = Stack(name, backend=backend), history(), leaf()
    want = stack(first, history())
    x = stack.push(first, h)
    with pytest.raises(error, match=message):
        stack.depth(y, h, **options)
    assert len(h) == 1, "a refused push changed the history"
    for k in range(len(stack.scales)):
        x = stack.push(stack.layer(k, x), h)
    assert torch.equal(x, want)


@EACH
def test_histories(backend, name):
    a, b, h = Stack(name, backend=backend), Stack(name, backend=backend), history()
    x = a.push(leaf(), h)
    with pytest.raises(RuntimeError, match="belongs to another stack"):
        b.push(x, h)
    h = history()
    out = a(leaf(), h)
    with pytest.raises(RuntimeError, match=r"9 layers push 10 states.*new DepthHistory"):
        a.push(out, h)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="new"):
        a.push(leaf(), h)
    given = DepthHistory(inplace=False)
    assert (given or DepthHistory()) is given


def test_post_norm_refuses_a_second_norm():
    stack, h = Stack("post-norm"), history()
    x = stack.push(leaf(), h)
    with pytest.raises(ValueError, match="out_norm must be None"):
        stack.push(x, h, out_norm=OutNorm(torch.ones(DIM), None, 1e-5))


def test_an_unknown_backend():
    with pytest.raises(BackendError, match=r"expected one of cuda, triton, .*, sdpa, ref"):
        DLCL(2, DIM, backend="gpu")(leaf(), history())


@EACH
@pytest.mark.parametrize("inside", [0, 2])
def test_a_change_of_grad_mode_within_a_pass_is_an_error(backend, name, inside):
    """A push without gradients would cut its state and all states below out of the graph."""
    stack, y, h = Stack(name, backend=backend), leaf(), history()

    def push_all():
        for k in range(4):
            with torch.set_grad_enabled(k != inside):
                stack.push(torch.tanh(y), h)

    with pytest.raises(RuntimeError, match="grad mode changed"):
        push_all()


def test_mean_weights_of_something_else():
    m, v = AttentionResiduals(1, DIM), torch.randn(3, DIM)
    for pushed, message in (
        (None, "pushed must be a list of tensors, got NoneType"),
        ([v], "pushed must hold 2 tensors, got 1"),
        ([v, 1], r"pushed\[1\] must be a tensor, got int"),
        ([v, v[:2]], r"pushed\[1\] must have pushed\[0\]'s shape"),
        ([v[:, 1:]] * 2, "the input must be"),
        ([v[:0]] * 2, "pushed must have tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^AttentionResiduals: {message}"):
            m.mean_weights(pushed)


PARAMETERS = {
    "weight": ("dlcl", {}, (4, 4)),
    "weight of a group": ("dlcl", {"weight_type": "group", "groups": 2}, (4, 4, 2)),
    "weight of a vector": ("dlcl", {"weight_type": "vector"}, (4, 4, 8)),
    "norm_weight": ("dlcl", {}, (4, 8)),
    "norm_bias": ("dlcl", {}, (4, 8)),
    "query": ("attnres", {}, (4, 8)),
    "norm_weight of a query": ("attnres", {"norm_affine": True}, (4, 8)),
    "bias": ("relu", {}, (4, 4)),
}
MISSING = {
    "weight": "weight", "norm_weight": "norm_weight", "norm_weight of a query": "query",
    "query": "query",
}  # fmt: skip
"""What is then replaced by None. A query alone is all that a connection has."""


@pytest.mark.parametrize("case", PARAMETERS)
def test_replaced_parameters(case):
    kind, options, shape = PARAMETERS[case]
    make, own = CONNECTIONS[kind]
    name, connection = case.partition(" ")[0], make(3, 8, **own | options)

    def push_all(value):
        setattr(connection, name, value)
        h = DepthHistory()
        return [connection(torch.ones(3, 8), h) for _ in range(4)]

    assert len(push_all(nn.Parameter(torch.ones(shape, dtype=torch.float64)))) == 4
    for wrong in ((3, *shape[1:]), shape[:1], (*shape, 1)):
        with pytest.raises(ValueError, match=f"{name} must be .*{shape[-1]}\\), got \\({wrong[0]}"):
            push_all(nn.Parameter(torch.ones(wrong)))
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=f"{name} must have a floating-point dtype"):
            push_all(nn.Parameter(torch.ones(shape, dtype=dtype), False))
    if case in MISSING:
        setattr(connection, name, nn.Parameter(torch.ones(shape)))
        name = MISSING[case]
        with pytest.raises(TypeError, match=f"{name} must be a tensor .*, got None"):
            push_all(None)
