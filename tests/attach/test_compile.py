"""Connected models under torch.compile, whole and layer by layer."""

import pytest
import torch

import deepfast
from tests.attach.models import CASES, Block, D, numbers, perturbed


@pytest.fixture(autouse=True)
def _fresh(threads):
    torch._dynamo.reset()
    with threads(1):
        yield
    torch._dynamo.reset()


def grads(case, model):
    model.zero_grad()
    out = case.run(model)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("torch post-norm", "dlcl", "eager"),
        ("torch pre-norm", "attnres", "eager"),
        ("sequential", "denseformer", "aot_eager"),
        ("bert", "dlcl", "aot_eager"),
        ("modernbert", "denseformer", "eager"),
        ("llama", "dlcl", "eager"),
    ],
)
def test_the_whole_model(name, kind, backend):
    """One graph."""
    case = CASES[name]
    model = perturbed(case.make())
    case.connect(model, kind)
    wanted = grads(case, model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_close(grads(case, compiled), wanted)


def assert_close(got, wanted):
    """Compiled layers round in other places."""
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-5)
    for name in wanted[1]:
        grad = got[1][name if name in got[1] else f"_orig_mod.{name}"]
        torch.testing.assert_close(grad, wanted[1][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["torch post-norm", "sequential", "bert"])
def test_the_compile_method(name):
    """It does not trace the forward of torch's own classes: each call of a layer is a graph."""
    case = CASES[name]
    model = perturbed(case.make())
    case.connect(model)
    wanted = grads(case, model)
    model.compile(backend="eager")
    assert_close(grads(case, model), wanted)


@pytest.mark.parametrize("name", ["torch pre-norm", "sequential", "bert"])
def test_each_layer(name):
    case = CASES[name]
    model = perturbed(case.make())
    case.connect(model)
    wanted = grads(case, model)
    for _, parent, layers in case.places(model):
        for layer in getattr(parent, layers) if layers else parent:
            layer.compile(backend="eager")
    assert_close(grads(case, model), wanted)


def test_more_layers_than_the_recompile_limit():
    """The push is outside of a compiled layer, so that one graph serves all layers."""
    model = torch.nn.Sequential(*(Block() for _ in range(12)))
    deepfast.connect(model, norm="pre")
    x = numbers(model, 2, 7, D)
    wanted = model(x)
    for layer in model:
        layer.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(model(x), wanted)


class Loop(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("layers", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_a_pass_that_leaves_its_graph(layers):
    """A graph break inside of the loop gives the same numbers, or ends with a sentence."""
    model = Loop(layers)
    deepfast.connect(model, norm="pre")
    x = numbers(model, 2, 7, D)
    wanted = model(x)
    model.blocks[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.compile(backend="eager")
    try:
        got = model(x)
    except RuntimeError as error:
        assert "inside torch.compile" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, wanted)
    assert all(isinstance(block, Block) for block in model.blocks)
