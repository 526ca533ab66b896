"""Transparent attention against its formula: values, gradients, dropout of weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepfast.nn import TransparentAttention
from tests.nn.written_out import shaken


@pytest.mark.parametrize("norm", ["pre", "post"])
@settings(max_examples=8)
@given(layers=st.integers(1, 35), count=st.integers(1, 3), dim=st.integers(2, 13))
def test_values_and_gradients(norm, backend, layers, count, dim):
    """``z_j = sum_k softmax(weight[j])[k] h_k``, where h_k is state k (Bapna et al., 2018), or LN_k
    of it in pre-norm. There the encoder has applied the last source's norm."""
    torch.manual_seed(0)
    module = shaken(TransparentAttention(layers, count, dim, norm=norm, backend=backend)).double()
    states = list(torch.randn(layers + 1, 7, dim).double().requires_grad_().unbind())
    sources, leaves = states, [*states, *module.parameters()]
    if norm == "pre":
        last = [torch.randn(dim).double().requires_grad_() for _ in range(2)]
        leaves += last
        norms = zip([*module.norm_weight, last[0]], [*module.norm_bias, last[1]], strict=True)
        sources = [
            torch.nn.functional.layer_norm(h, (dim,), *each)
            for h, each in zip(states, norms, strict=True)
        ]
    got = torch.stack(module.eval()(states, sources[-1]))
    want = torch.einsum("jk,ktd->jtd", module.weight.softmax(1), torch.stack(sources))
    seed = torch.randn_like(want)
    grads = [torch.autograd.grad(out, leaves, seed, retain_graph=True) for out in (got, want)]
    torch.testing.assert_close([got, *grads[0]], [want, *grads[1]], rtol=1e-9, atol=1e-10)


def test_weights_are_shares_and_equal_at_first_and_dropped_in_training_alone():
    # State k is the k-th unit vector: a mixture is its row of weights.
    module = TransparentAttention(199, 4, 200, norm="post", dropout=0.25)
    states = list(torch.eye(200).unsqueeze(1))
    rows = torch.cat(module(states, states[-1]))
    kept = torch.tensor(1 / (200 * 0.75))
    assert torch.isclose(rows, kept).logical_or(rows == 0).all()
    assert 140 < (rows == 0).sum() < 260
    assert not torch.equal(rows[0], rows[1])
    rows = torch.cat(module.eval()(states, states[-1]))
    torch.testing.assert_close(rows, torch.full((4, 200), 1 / 200))
