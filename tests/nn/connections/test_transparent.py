"""Transparent attention against its specification: values, gradients, dropout of weights."""

import pytest
import torch

from deepfast.nn import TransparentAttention
from tests.nn.written_out import shaken
from tests.specifications.transparent_attention import transparent_attention

SIZES = pytest.mark.parametrize(("layers", "count", "dim"), [(1, 3, 5), (6, 2, 13), (35, 1, 8)])


def made(layers, count, dim, norm, dtype=torch.float64, **options):
    """A module with no parameter at its init, and states with gradient."""
    module = shaken(TransparentAttention(layers, count, dim, norm=norm, **options)).to(dtype)
    states = [torch.randn(7, dim, dtype=dtype, requires_grad=True) for _ in range(layers + 1)]
    return module, states


def specified(module, states, last_norm):
    """The reference; in pre-norm the last source's norm is given."""
    if module.norm == "post":
        return transparent_attention(states, module.weight)
    gain, shift = (
        torch.cat((own, last.unsqueeze(0)))
        for own, last in zip((module.norm_weight, module.norm_bias), last_norm, strict=True)
    )
    return transparent_attention(states, module.weight, norm_weight=gain, norm_bias=shift)


@SIZES
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_values_and_gradients(layers, count, dim, norm, poison, backend):
    module, states = made(layers, count, dim, norm, backend=backend)
    last = [torch.randn(dim, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    output = states[-1]
    if norm == "pre":
        output = torch.nn.functional.layer_norm(states[-1], (dim,), *last)
    got = module.eval()(states, output)
    want = specified(module, states, last)
    leaves = [*states, *module.parameters(), *(last if norm == "pre" else [])]
    seeds = torch.randn(count, 7, dim, dtype=torch.float64)
    grads = [
        torch.autograd.grad(sum((s * z).sum() for s, z in zip(seeds, out, strict=True)), leaves,
                            retain_graph=True)
        for out in (got, want)
    ]  # fmt: skip
    assert len(got) == len(want) == count
    torch.testing.assert_close([*got, *grads[0]], [*want, *grads[1]], rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
def test_compiled_it_is_one_graph():
    module, states = made(3, 2, 4, "pre", dropout=0.0)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(states, states[-1]), module(states, states[-1]))


def test_weights_are_shares_and_equal_at_first():
    module = TransparentAttention(4, 3, 5, norm="post").eval()
    states = list(torch.eye(5).unsqueeze(1))
    for z in module(states, states[-1]):
        torch.testing.assert_close(z, torch.full((1, 5), 0.2))


def test_dropout_of_whole_weights_in_training_alone():
    # State k is the k-th unit vector: a mixture is its row of weights.
    module = TransparentAttention(199, 4, 200, norm="post", dropout=0.25)
    states = list(torch.eye(200).unsqueeze(1))
    rows = torch.cat(module(states, states[-1]))
    kept = torch.tensor(1 / (200 * 0.75))
    assert torch.isclose(rows, kept).logical_or(rows == 0).all()
    assert 140 < (rows == 0).sum() < 260
    assert not torch.equal(rows[0], rows[1])
    assert (torch.cat(module.eval()(states, states[-1])) > 0).all()
