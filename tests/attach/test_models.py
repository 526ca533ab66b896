"""Each kind of model, connected, against the literal loop around the same layers: a list of states,
and each layer's input summed from it in plain PyTorch."""

import copy

import pytest
import torch

import deepfast
from deepfast.depth.connection import DepthConnection
from deepfast.reference.depth_mix import dlcl
from tests.attach import models
from tests.attach.models import CASES, assert_same, gradients, outcome, perturbed
from tests.specifications.attention_residuals import full


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


class Literal(models.InPlace):
    """Runs the layer, then computes the next layer's input."""

    def mixed(self):
        c, row = self.connection[0], len(self.states) - 1
        if hasattr(c, "query"):
            return full(self.states, c.query, row)
        return dlcl(
            self.states, row, c.weight, norm=c.norm, norm_weight=c.norm_weight,
            norm_bias=c.norm_bias, eps=c.eps, rms=c.norm_type == "rms",
        )  # fmt: skip

    def forward(self, x, *args, **kwargs):
        if self.k == 0:
            self.states[:] = [x]
            x = self.mixed()
        result = self.inner(x, *args, **kwargs)
        y = result[0] if isinstance(result, tuple) else result
        self.states.append(y - x if hasattr(self.connection[0], "query") else y)
        y = self.mixed()
        return (y, *result[1:]) if isinstance(result, tuple) else y


# Attention residuals are for pre-norm models.
@pytest.mark.only_if(lambda case, kind: kind != "attnres" or CASES[case].norm == "pre")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("dlcl", {}), ("dlcl", {"norm_type": "rms"}), ("denseformer", {}), ("attnres", {})],
)
def test_same_as_a_literal_loop(case, kind, options):
    plain = perturbed(case.make())
    model = copy.deepcopy(plain)
    case.connect(model, kind, **options)
    for connection in (m for m in model.modules() if isinstance(m, DepthConnection)):
        perturbed(connection)
    wanted = outcome(case, plain, models.literal_of(case, plain, model, Literal))
    assert_same(outcome(case, model, dict(model.named_parameters())), wanted)


def test_denseformer_begins_as_the_plain_model(case):
    """Pretrained weights keep their meaning: not one bit of the output changes."""
    model = perturbed(case.make())
    before = case.run(model)
    case.connect(model, "denseformer")
    assert torch.equal(case.run(model), before)


@pytest.mark.only_if(lambda case: CASES[case].norm == "pre")
@pytest.mark.parametrize("kind", ["attnres", "block_attnres"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_residuals_with_relu_begin_as_the_plain_model(case, kind, dtype):
    """Their first sums are the residual stream, up to the rounding of one addition a layer."""
    model = perturbed(case.make())
    exact = case.run(copy.deepcopy(model).double())
    plain = case.run(model.to(dtype))
    case.connect(model, kind, score_function="relu")
    error, own = ((out - exact).norm() for out in (case.run(model), plain))
    assert error <= 2 * own


def test_only_the_connection_is_new(case):
    model = case.make()
    names, kinds = set(model.state_dict()), {n: type(m) for n, m in model.named_modules()}
    repr_before = repr(model)
    connections = case.connect(model)
    new = set(model.state_dict()) - names
    assert names <= set(model.state_dict())
    assert all("depth_connection." in name for name in new)
    assert len(new) == 3 * len(connections)
    for _, parent, _ in case.places(model):
        deepfast.disconnect(parent)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert repr(model) == repr_before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_timm_checkpoints():
    case = CASES["timm"]
    model = perturbed(case.make())
    case.connect(model)
    wanted = gradients(model, case.run(model))
    model.set_grad_checkpointing()
    got = gradients(model, case.run(model))
    assert_same(got, wanted, 0)


def test_timm_features_without_forward():
    case = CASES["timm"]
    model = perturbed(case.make())
    x = torch.randn(2, 3, 8, 8)
    before = model.forward_features(x)
    case.connect(model)
    after = model.forward_features(x)
    assert not torch.equal(after, before)
    assert torch.equal(model.forward_head(after), model(x))
