"""What ops keep for backward, and what they allocate."""

import pytest
import torch

from deepfast import ops as public
from deepfast.cases import ops
from deepfast.cases.case import Rows
from deepfast.ops.activation import activation_op, compute
from tests.ops.cases import Call, D, K, N, P, T

FP32 = torch.float32
STATE, STATISTICS, SEED = T * D, 2 * T, 1
# Attention has two heads for the queries, one for the keys.
KEPT = {
    "layer_norm": STATE + STATISTICS + SEED,
    "rms_norm": STATE + T + SEED,
    "layer_norm, alone": STATE + STATISTICS,
    "add_dropout": SEED,
    "relu": STATE,
    "activation": STATE + SEED,
    "depth_mix": K * (STATE + STATISTICS),
    "depth_mix, no norm": K * STATE,
    "norm_linear": STATE + STATISTICS + SEED,
    "norm_linear, alone": STATE + STATISTICS,
    "feed_forward": STATE + STATISTICS + T * N + 2 * SEED,
    "attention": 2 * (2 + 1) * STATE + 2 * T + 2 * 3 + SEED,
}
"""How many numbers autograd keeps besides parameters: no normalised copy, and no mask."""


def kept(run, parameters):
    """The numbers that ``run`` saves for backward, without those of ``parameters``."""
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.update({t.data_ptr(): t.numel()}) or t, lambda t: t
    ):
        run()
    return sum(n for at, n in sizes.items() if at not in {p.data_ptr() for p in parameters})


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(backend, name):
    c = Call(name, backend)
    parameters = [x for x in c.leaves if len(x) != T]
    assert kept(lambda: c.run(*c.leaves), parameters) == KEPT[name]


@pytest.mark.parametrize(("kind", "recompute"), [("relu", False), ("relu", True), ("gelu", True)])
def test_recomputed_products_are_not_kept(kind, recompute):
    leaves = ops.feed_forward("", Rows((T,), D), N).leaves(FP32, FP32)
    more = {"activation": kind, "recompute": recompute, "training": True, "dropout_p": P}
    parameters = [x for x in leaves.values() if len(x) != T]
    found = kept(lambda: public.feed_forward(**leaves, **more), parameters)
    assert found == STATE + STATISTICS + SEED + (0 if recompute else T * N)


def test_in_place_and_strided_operands_take_no_memory(meter):
    x = torch.randn(200, 300)
    with meter() as m:
        compute(activation_op.operands(x, None, "relu", P, torch.tensor(1), "cpu"), inplace=True)
    assert m.peak < x.nbytes / 10
    with meter() as m, torch.no_grad():
        y = public.layer_norm(x[:, 7:263], None, None, backend="cpu")
    assert m.peak < y.nbytes * 1.1


@pytest.mark.parametrize("op", ["depth_mix", "depth_mix_sums", "attention_residual"])
def test_ops_over_depth_take_the_memory_of_their_results(meter, op):
    """Nothing is stacked, and nothing normalised is stored."""
    case = getattr(ops, op)("", Rows((100,), 256), 40)
    leaves = case.leaves(FP32, FP32)
    with meter() as m:
        out = case.run(**leaves, backend="cpu")
    # Of each source and token two statistics, or the weights of two sums; of a softmax three of
    # each token.
    numbers = (3 if op == "attention_residual" else 2 * 40) * 100 * 4
    assert m.peak <= out.nbytes + numbers + 10_000
    dout, gradients = torch.ones_like(out), sum(x.nbytes for x in leaves.values())
    with meter() as m:
        out.backward(dout)
    # Of the weights their copies again, and the gradients of these.
    assert m.peak <= gradients + 2 * numbers * (op == "depth_mix_sums") + 20_000
