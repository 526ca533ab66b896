"""Each kind of model, connected, against the literal loop around the same layers."""

import copy

import pytest
import torch

import deepfast
from deepfast.depth.connection import DepthConnection
from tests.attach.literal import literal_of, results
from tests.attach.models import CASES, perturbed

ROUNDING = 1e-5
"""Of float32 through three layers, forward and backward, relative to the largest value."""


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dlcl", {}), ("dlcl", {"norm_kind": "rms"}), ("denseformer", {}), ("attnres", {})],
)
def test_same_as_a_literal_loop(case, kind, options):
    if kind == "attnres" and case.norm == "post":
        pytest.skip("attention residuals are for pre-norm models")
    plain = perturbed(case.make())
    model = copy.deepcopy(plain)
    case.connect(model, kind, **options)
    for connection in (m for m in model.modules() if isinstance(m, DepthConnection)):
        perturbed(connection)
    wanted = results(case, plain, literal_of(case, plain, model))
    got = results(case, model, dict(model.named_parameters()))
    assert got.keys() == wanted.keys()
    largest = max(g.abs().max() for g in wanted.values())
    for name, tensor in wanted.items():
        # Relative to the tensor's scale. A key's bias changes no softmax: its gradient is rounding.
        scale = max(tensor.abs().max(), 1e-2 * largest)
        error = (got[name] - tensor).abs().max()
        assert error <= ROUNDING * scale, f"{name}: error {error:.3g}, scale {scale:.3g}"


def test_denseformer_begins_as_the_plain_model(case):
    """Pretrained weights keep their meaning: not one bit of the output changes."""
    model = perturbed(case.make())
    before = case.run(model)
    case.connect(model, "denseformer")
    assert torch.equal(case.run(model), before)


@pytest.mark.parametrize("kind", ["attnres", "block_attnres"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_residuals_with_relu_begin_as_the_plain_model(case, kind, dtype):
    """Their first sums are the residual stream, up to the rounding of one addition a layer."""
    if case.norm == "post":
        pytest.skip("attention residuals are for pre-norm models")
    model = perturbed(case.make())
    exact = case.run(copy.deepcopy(model).double())
    plain = case.run(model.to(dtype))
    case.connect(model, kind, weights="relu")
    error, own = ((out - exact).norm() for out in (case.run(model), plain))
    assert error <= 2 * own


def test_twenty_steps(case):
    model = case.make()
    connections = case.connect(model)
    weight = next(iter(connections.values())).weight
    before = weight.detach().clone()
    with torch.no_grad():
        target = torch.randint(0, 5, case.run(model).shape[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        out = case.run(model)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), target.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(weight, before)


def test_only_the_connection_is_new(case):
    model = case.make()
    names, kinds = set(model.state_dict()), {n: type(m) for n, m in model.named_modules()}
    repr_before = repr(model)
    connections = case.connect(model)
    new = set(model.state_dict()) - names
    assert names <= set(model.state_dict())
    assert all("depth_connection." in name for name in new)
    assert len(new) == 3 * len(connections)
    for path, _, _ in case.places(model):
        deepfast.disconnect(model.get_submodule(path))
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert repr(model) == repr_before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
