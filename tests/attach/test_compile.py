"""Connected models under torch.compile, whole and layer by layer."""

import pytest
import torch

import deepfast
from tests.attach.models import CASES, Block, Loop, X, gradients, perturbed


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def connected(name, kind="dlcl", recompute="none"):
    """A connected model, its case, its output and its gradients."""
    case = CASES[name]
    model = perturbed(case.make())
    case.connect(model, kind, recompute=recompute)
    out = case.run(model)
    return model, case, out.detach(), gradients(model, out)


def assert_same_as_eager(run, model, case, out, wanted):
    """``run`` is ``model``, compiled; it rounds in other places."""
    got = case.run(run)
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model, got), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "kind", "backend", "recompute"), [
    ("torch post-norm", "dlcl", "eager", "none"),
    ("torch pre-norm", "attnres", "eager", "none"),
    ("sequential", "denseformer", "aot_eager", "layer"),
    ("sequential", "dlcl", "aot_eager", "layer+input"),
    ("bert", "dlcl", "aot_eager", "none"),
    ("modernbert", "denseformer", "eager", "none"),
    ("llama", "dlcl", "eager", "none"),
])  # fmt: skip
def test_the_whole_model(name, kind, backend, recompute):
    """One graph."""
    model, *eager = connected(name, kind, recompute)
    assert_same_as_eager(torch.compile(model, backend=backend, fullgraph=True), model, *eager)


@pytest.mark.parametrize("name", ["torch post-norm", "bert"])
def test_the_compile_method(name):
    """It does not trace the forward of torch's own classes: each call of a layer is a graph."""
    model, *eager = connected(name)
    model.compile(backend="eager")
    assert_same_as_eager(model, model, *eager)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("torch pre-norm", "layer"), ("sequential", "none"), ("sequential", "layer+input"),
     ("bert", "none")],
)  # fmt: skip
def test_each_layer(name, recompute):
    model, case, *eager = connected(name, recompute=recompute)
    for layer in case.layers(model):
        layer.compile(backend="eager" if recompute == "none" else "aot_eager")
    assert_same_as_eager(model, model, case, *eager)


def test_more_layers_than_the_recompile_limit():
    """The push is outside of a compiled layer, so that one graph serves all layers."""
    model = torch.nn.Sequential(*(Block() for _ in range(12)))
    deepfast.connect(model, norm="pre")
    wanted = model(X)
    for layer in model:
        layer.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(model(X), wanted)


@pytest.mark.parametrize("layers", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_a_pass_that_leaves_its_graph(layers):
    """A graph break inside of the loop gives the same numbers, or ends with a sentence."""
    model = Loop(layers=layers)
    deepfast.connect(model, norm="pre")
    wanted = model(X)
    model.blocks[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.compile(backend="eager")
    try:
        got = model(X)
    except RuntimeError as error:
        assert "inside torch.compile" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, wanted)
    assert all(isinstance(block, Block) for block in model.blocks)
