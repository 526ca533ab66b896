"""DeepNorm, x' = LN(alpha x + f(x)), against the formula in float64."""

import math

import pytest
import torch

from deepfast.nn import TransformerDecoder, TransformerEncoder
from tests.nn.written_out import assert_same, layer, shaken

D, H, FFN = 16, 2, 24


@pytest.mark.parametrize(
    ("kind", "layers", "options", "alpha"),
    [
        (TransformerEncoder, 4, {}, 8**0.25),
        (TransformerEncoder, 3, {"decoder_layers": 2}, 0.81 * (3**4 * 2) ** (1 / 16)),
        (TransformerDecoder, 2, {}, 6**0.25),
    ],
    ids=str,
)
def test_is_the_formula(kind, layers, options, alpha):
    options = {"connection": "residual", "norm": "deepnorm", "dropout": 0.0} | options
    stack = shaken(kind(layers, D, H, FFN, **options)).double()
    inputs = [torch.randn(2, n, D).double().requires_grad_() for n in (5, 7)]
    x, *encoded = inputs[: 1 + (kind is TransformerDecoder)]
    want = x
    for m in stack.layers:
        want = layer(m, want, want, *encoded, alpha=alpha, eps=1e-5)
    assert_same(stack(x, *encoded), want, stack, [x, *encoded])


@pytest.mark.parametrize(("kind", "parts"), [(TransformerEncoder, 2), (TransformerDecoder, 3)])
def test_depth_init(kind, parts):
    """Only the output projections begin smaller."""
    states = []
    for depth_init in (False, True):
        torch.manual_seed(0)
        states.append(kind(5, D, H, FFN, depth_init=depth_init).state_dict())
    for name, value in states[0].items():
        smaller = name.endswith(("attention.out.weight", "down.weight"))
        factor = (parts * 5) ** -0.5 if smaller else 1
        torch.testing.assert_close(states[1][name], value * factor)


@pytest.mark.parametrize(
    ("kind", "layers", "options", "beta"),
    [
        (TransformerEncoder, 8, {}, (8 * 8) ** -0.25),
        (TransformerEncoder, 8, {"decoder_layers": 3}, 0.87 * (8**4 * 3) ** (-1 / 16)),
        (TransformerDecoder, 8, {}, (12 * 8) ** -0.25),
    ],
)
def test_the_start(kind, layers, options, beta):
    """Xavier with gain beta, but gain 1 for queries and keys."""
    dim = 128
    torch.manual_seed(0)
    stack = kind(layers, dim, 4, 4 * dim, connection="residual", norm="deepnorm", **options)
    for m in stack.layers:
        q, k, v = m.attention.query_key_value.weight.chunk(3)
        square, wide = math.sqrt(6 / (2 * dim)), math.sqrt(6 / (5 * dim))
        bounds = {q: square, k: square, v: beta * square}
        bounds |= {m.attention.out.weight: beta * square}
        bounds |= {m.feed_forward.up.weight: beta * wide}
        bounds |= {m.feed_forward.down.weight: beta * wide}
        for weight, bound in bounds.items():
            assert 0.99 * bound < weight.abs().max() <= bound
        if kind is TransformerDecoder:
            k, v = m.cross_attention.key_value.weight.chunk(2)
            assert 0.99 * square < k.abs().max() <= square
            assert 0.99 * beta * square < v.abs().max() <= beta * square
