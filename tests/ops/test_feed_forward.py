"""deepfast.ops.feed_forward: its bits do not depend on what it keeps for backward, and its forms
without some operands."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import record
from deepfast.cases import ops
from deepfast.cases.case import Rows
from deepfast.ops import feed_forward
from tests.ops.cases import LOW, P, equal, results
from tests.tolerances import assert_accurate

OPTIONS = {"training": True, "seed": 99, "activation_seed": 100}


def leaves_of(dtype=torch.float32):
    return ops.feed_forward("", Rows((2, 3), 33), 21).of_one_dtype(dtype)


def computed(leaves, **options):
    """Outputs and gradients."""

    def run(*tensors):
        return feed_forward(**dict(zip(leaves, tensors, strict=True)), **OPTIONS, **options)

    return results(run, list(leaves.values()))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("p", "kind"), [(0.0, "relu"), (P, "relu"), (0.0, "gelu"), (P, "gelu")])
def test_the_same_bits_whatever_is_kept(backend, dtype, p, kind):
    options = {"dropout_p": p, "activation_dropout_p": p, "activation": kind, "backend": backend}
    leaves = leaves_of(dtype)
    with record() as seen:
        kept = computed(leaves, **options)
    assert set(seen) == {("layer_norm", backend), ("activation", backend)}
    assert equal(computed(leaves, recompute=True, **options), kept)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_product_may_apply_the_bias_and_relu(monkeypatch, dtype):
    """As on a GPU, and with the same bits whatever is kept."""
    asked, product = [], torch._addmm_activation
    module, ones = importlib.import_module("deepfast.ops.feed_forward"), torch.ones(2, 2)
    given = SimpleNamespace(activation="relu", activation_p=0.0, up=ones, up_bias=ones[0])
    assert not module._in_product(given)
    leaves = leaves_of(dtype)
    default = computed(leaves, backend="reference")
    monkeypatch.setattr(module, "_in_product", lambda a: True)
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a: asked.append(a) or product(*a))
    kept = computed(leaves)
    assert len(asked) == 1
    assert equal(computed(leaves, recompute=True), kept)
    assert len(asked) == 3
    for value, of_default in zip(kept, default, strict=True):
        assert_accurate(value, of_default, of_default.double(), dtype)


def test_without_residual_norm_and_biases():
    """x itself is the sum."""
    x, up, down = torch.randn(5, 8), torch.randn(21, 8), torch.randn(11, 21)
    out, s = feed_forward(x, None, None, up, None, down, None)
    assert s is x
    torch.testing.assert_close(out, F.linear(F.relu(F.linear(F.layer_norm(x, (8,)), up)), down))
