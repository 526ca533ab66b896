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


def connected(name, kind="dlcl", memory="keep"):
    """A connected model, its case, its output and its gradients."""
    case = CASES[name]
    model = perturbed(case.make())
    case.connect(model, kind, memory=memory)
    out = case.run(model)
    return model, case, out.detach(), gradients(model, out)


def assert_same_as_eager(run, model, case, out, wanted):
    """``run`` is ``model``, compiled; it rounds in other places."""
    got = case.run(run)
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model, got), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "backend", "memory"),
    [
        ("torch post-norm", "dlcl", "eager", "keep"),
        ("torch pre-norm", "attnres", "eager", "keep"),
        ("sequential", "denseformer", "aot_eager", "states"),
        ("sequential", "dlcl", "aot_eager", "history"),
        ("bert", "dlcl", "aot_eager", "keep"),
        ("modernbert", "denseformer", "eager", "keep"),
        ("llama", "dlcl", "eager", "keep"),
    ],
)
def test_the_whole_model(name, kind, backend, memory):
    """One graph."""
    model, *eager = connected(name, kind, memory)
    assert_same_as_eager(torch.compile(model, backend=backend, fullgraph=True), model, *eager)


@pytest.mark.parametrize("name", ["torch post-norm", "bert"])
def test_the_compile_method(name):
    """It does not trace the forward of torch's own classes: each call of a layer is a graph."""
    model, *eager = connected(name)
    model.compile(backend="eager")
    assert_same_as_eager(model, model, *eager)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("torch pre-norm", "states"), ("sequential", "keep"), ("sequential", "history"),
     ("bert", "keep")],
)  # fmt: skip
def test_each_layer(name, memory):
    model, case, *eager = connected(name, memory=memory)
    for layer in case.layers(model):
        layer.compile(backend="eager" if memory == "keep" else "aot_eager")
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
