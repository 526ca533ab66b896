"""Connected models under torch.compile, whole and layer by layer."""

import pytest
import torch

import deepfast
from tests.attach.layers import BOTH, DropsBehind, connected
from tests.attach.models import CASES, GATED, READS, Block, Loop, X, gradients


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("form", "name", "backend", "options"), [
    ("whole", "below", "eager", {"recompute": "layer+input"}),
    ("layers", "torch pre-norm", "eager", READS),
    *(pytest.param(*row, marks=SLOW) for row in (
        ("method", "torch post-norm", "eager", {}),
        ("layers", "sequential", "aot_eager", {"recompute": "layer+input"}),
        ("whole", "bert", "aot_eager", {}),
        ("whole", "llama", "aot_eager", READS),
        ("whole", "timm", "aot_eager", GATED),
    )),
])  # fmt: skip
def test_the_numbers_of_eager_code(form, name, backend, options):
    """A graph rounds in other places. With "whole" the hooks of a module of one's own are not in
    the graph, because `nn.Module.__call__` is not. With "layers" the pushes are not. "method" does
    not trace the forward of torch's own classes: each call of a layer is a graph."""
    case = CASES[name]
    model = case.connected(**options)
    out = case.run(model)
    wanted, run = gradients(model, out), model
    if form == "whole":
        run = torch.compile(model, backend=backend, fullgraph=True)
    for module in {"layers": case.layers(model), "method": [model]}.get(form, ()):
        module.compile(backend=backend)
    got = case.run(run)
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model, got), wanted, rtol=1e-3, atol=1e-5)


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
    model = connected(DropsBehind, BOTH).eval()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="run the model once before"):
        run(X.double())
    wanted = model(X.double())
    torch._dynamo.reset()
    torch.testing.assert_close(run(X.double()), wanted)
