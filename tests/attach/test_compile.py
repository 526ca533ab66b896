"""Connected models under torch.compile, whole and layer by layer."""

import pytest
import torch

import deepfast
from tests.attach.layers import BOTH, connected
from tests.attach.models import CASES, GATED, READS, Block, Loop, X, gradients
from tests.attach.test_refusals import does, drops_behind


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def method(model, backend):
    """It does not trace the forward of torch's own classes: each call of a layer is a graph."""
    model.compile(backend=backend)
    return model


def each_layer(model, backend):
    """The pushes are outside of the layers' graphs."""
    for module in model.modules():
        if "attachment" in vars(module):
            for layer in module:
                layer.compile(backend=backend)
    return model


DENSE, ATTENTION = {"connection": "denseformer"}, {"connection": "attnres"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(("form", "name", "backend", "options"), [
    (whole, "sequential", "aot_eager", {"recompute": "layer+input"}),
    (whole, "torch pre-norm", "aot_eager", READS),
    (method, "torch post-norm", "eager", {}),
    (each_layer, "torch pre-norm", "aot_eager", {"recompute": "layer"}),
    (each_layer, "sequential", "aot_eager", {"recompute": "layer+input"}),
    (each_layer, "torch pre-norm", "aot_eager", READS),
    *(pytest.param(*row, marks=SLOW) for row in (
        (whole, "torch pre-norm", "eager", ATTENTION),
        (whole, "bert", "aot_eager", {}),
        (each_layer, "bert", "eager", {}),
        (whole, "sequential", "aot_eager", DENSE | {"recompute": "layer"}),
        (whole, "llama", "aot_eager", READS),
        (whole, "timm", "aot_eager", GATED),
        (whole, "t5", "aot_eager", READS),
        (each_layer, "gpt_neox", "aot_eager", READS),
    )),
])  # fmt: skip
def test_the_numbers_of_eager_code(form, name, backend, options):
    """A graph rounds in other places."""
    case = CASES[name]
    model = case.connected(**options)
    out = case.run(model)
    wanted = gradients(model, out)
    got = case.run(form(model, backend))
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model, got), wanted, rtol=1e-3, atol=1e-5)


def test_more_layers_than_the_recompile_limit():
    """One graph serves all layers."""
    model = torch.nn.Sequential(*(Block() for _ in range(12)))
    deepfast.connect(model, norm="pre")
    wanted = model(X)
    for layer in model:
        layer.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(model(X), wanted)


@SLOW
def test_a_pass_that_leaves_its_graph():
    """A graph break inside of the loop gives the same numbers, or ends with a sentence."""
    model = Loop()
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


@SLOW
def test_names_that_no_run_has_checked():
    model = connected(does(drops_behind), BOTH).eval()
    run = whole(model, "eager")
    with pytest.raises(Exception, match="run the model once before"):
        run(X.double())
    wanted = model(X.double())
    torch._dynamo.reset()
    torch.testing.assert_close(run(X.double()), wanted)


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="OptimizedModule; connect the model before you wrap it"):
        deepfast.connect(torch.compile(Loop()), norm="pre")
