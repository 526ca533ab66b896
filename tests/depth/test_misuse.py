"""Mistakes with a connection and its history raise an error of one sentence and change nothing."""

import math

import pytest
import torch
from torch import nn

from deepfast.nn import DepthHistory, LayerNorm
from tests.depth.stack import CONNECTIONS, DIM, EACH, TOKENS, Stack, history, leaf

X = torch.ones(TOKENS, DIM)
NORM = LayerNorm(DIM).as_output()
FIRST = [
    ([1.0], {}, TypeError, "the layer's output must be a tensor, got list"),
    (torch.ones(3, 5), {}, ValueError, r"must be \(..., 12\), got \(3, 5\)"),
    (X.to("meta"), {}, ValueError, "the input must be on cpu, got meta"),
    (X.int(), {}, ValueError, "the input must have a floating-point dtype, got torch.int32"),
    (X, {"history": None}, TypeError, "history must be a DepthHistory, got NoneType"),
    (X, {"residual": torch.ones(2, DIM)}, ValueError, "residual must have"),
    (X, {"dropout_p": 1.5}, ValueError, "between 0 and 1"),
    (X, {"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed must be an int"),
    (X, {"index": "a"}, TypeError, "index must be an integer, got 'a'"),
    (X, {"return_x": False}, ValueError, "return_x=False needs out_norm, got None"),
    (X, {"out_norm": nn.LayerNorm(DIM)}, TypeError, "out_norm must be an OutNorm"),
    (X, {"out_norm": NORM._replace(eps=math.nan)}, ValueError, r"out_norm\.eps must be a number"),
]
SECOND = [
    (torch.ones(6, DIM), {}, ValueError, r"must be alike: expected \(5, 12\) .*got \(6, 12\)"),
    (X.view(1, TOKENS, DIM), {}, ValueError, r"expected \(5, 12\) .*got \(1, 5, 12\)"),
    (X.double(), {}, ValueError, r"torch.float32 .*got \(5, 12\) of torch.float64"),
    (torch.ones(TOKENS, 13), {}, ValueError, r"must be \(..., 12\), got \(5, 13\)"),
    (X.to("meta"), {}, ValueError, "the input must be on cpu, got meta"),
    *(
        (X, {"index": i}, RuntimeError, f"out of order: expected index 1, got {i}")
        for i in (0, 2, 5, -1)
    ),
]


@EACH
def test_a_push_that_does_not_fit(name):
    """As the first or the second one: the history can be used again."""
    stack, first = Stack(name), leaf()
    want, h = stack(first, history()), history()
    norm = [(X, {"out_norm": NORM}, ValueError, "out_norm must be None")] * (name == "post-norm")
    for y, options, error, words in FIRST:
        with pytest.raises(error, match=f"^{stack.depth.name}: .*{words}"):
            stack.depth(**{"y": y, "history": h} | options)
        assert len(h) == 0
    x = stack.push(first, h)
    for y, options, error, words in SECOND + norm:
        with pytest.raises(error, match=f"^{stack.depth.name}: .*{words}"):
            stack.depth(y, h, **options)
        assert len(h) == 1, "a refused push changed the history"
    for k in range(len(stack.scales)):
        x = stack.push(stack.layer(k, x), h)
    assert torch.equal(x, want)


@EACH
def test_histories(name):
    a, b, y, h = Stack(name), Stack(name), leaf(), history()
    x = a.push(y, h)
    with pytest.raises(RuntimeError, match="belongs to another stack"):
        b.push(x, h)
    for learning in (True, False):
        h = history()
        with torch.set_grad_enabled(learning):
            x = a.push(y, h)
        # It would cut its state and all states below out of the graph.
        with torch.set_grad_enabled(not learning), pytest.raises(RuntimeError, match="grad mode"):
            a.push(x, h)
    # Backward writes over states that later rows read, half-way or down to y.
    for bottom in (2, None):
        h = history()
        xs = a.xs(y, h, 5)
        torch.autograd.grad(xs[5].sum(), y if bottom is None else xs[bottom], retain_graph=True)
        with pytest.raises(RuntimeError, match="inplace=False"):
            a.push(xs[5], h)
    h = history()
    out = a(y, h)
    with pytest.raises(RuntimeError, match=r"9 layers push 10 states.*new DepthHistory"):
        a.push(out, h)
    given = DepthHistory(inplace=False)
    assert (given or DepthHistory()) is given


FORMS = [
    ("dlcl", {}), ("dlcl", {"weight_type": "group", "groups": 2}),
    ("dlcl", {"weight_type": "vector"}), ("attnres", {"norm_affine": True}), ("relu", {}),
]  # fmt: skip
NEEDED = ("dlcl", "weight"), ("dlcl", "norm_weight"), ("attnres", "query")


@pytest.mark.parametrize(("kind", "options"), FORMS)
def test_replaced_parameters(kind, options):
    make, own = CONNECTIONS[kind]
    for name, p in make(3, 8, **own | options).named_parameters():
        connection, shape = make(3, 8, **own | options), tuple(p.shape)

        def push_all(value, connection=connection, name=name):
            setattr(connection, name, value)
            h = DepthHistory()
            return [connection(X[:, :8], h) for _ in range(4)]

        assert len(push_all(nn.Parameter(p.detach().double()))) == 4
        for wrong in ((3, *shape[1:]), shape[:1], (*shape, 1)):
            words = f"{name} must be .*{shape[-1]}\\), got \\({wrong[0]}"
            with pytest.raises(ValueError, match=words):
                push_all(nn.Parameter(torch.ones(wrong)))
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises(ValueError, match=f"{name} must have a floating-point dtype"):
                push_all(nn.Parameter(torch.ones(shape, dtype=dtype), False))
        if (kind, name) in NEEDED:
            with pytest.raises(TypeError, match=f"{name} must be a tensor .*, got None"):
                push_all(None)
