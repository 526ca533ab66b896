"""DeepNorm, x' = LN(alpha x + f(x)), against the formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from tests.attach.models import perturbed

D, H, FFN = 16, 2, 24


def heads(x):
    return x.unflatten(-1, (H, D // H)).transpose(-2, -3)


def attend(attention, x, encoded=None, causal=False):
    if encoded is None:
        q, k, v = attention.query_key_value(x).chunk(3, -1)
    else:
        q, (k, v) = attention.query(x), attention.key_value(encoded).chunk(2, -1)
    a = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal)
    return attention.out(a.transpose(-2, -3).flatten(-2))


def formula(stack, x, alpha, encoded=None):
    for m in stack.layers:

        def ln(norm, z):
            return F.layer_norm(z, (D,), norm.weight, norm.bias, 1e-5)

        first = attend(m.attention, x, causal=encoded is not None)
        x = ln(m.attention_norm, alpha * x + first)
        if encoded is not None:
            other = attend(m.cross_attention, x, encoded)
            x = ln(m.cross_attention_norm, alpha * x + other)
        f = m.feed_forward.down(F.relu(m.feed_forward.up(x)))
        x = ln(m.feed_forward_norm, alpha * x + f)
    return x


def compare(stack, alpha, *encoded):
    stack = perturbed(stack).double()
    x = torch.randn(2, 5, D).double()
    out, wanted = stack(x, *encoded), formula(stack, x, alpha, *encoded)
    parameters = [*stack.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), parameters) for y in (out, wanted)]
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "ffn", "layer"])
def test_an_encoder_alone(recompute):
    options = {"connection": "residual", "norm": "deepnorm", "dropout": 0.0}
    compare(TransformerEncoder(4, D, H, FFN, recompute=recompute, **options), (2 * 4) ** 0.25)


def test_encoder_and_decoder():
    options = {"connection": "residual", "norm": "deepnorm", "dropout": 0.0}
    alpha = 0.81 * (3**4 * 2) ** (1 / 16)
    compare(TransformerEncoder(3, D, H, FFN, decoder_layers=2, **options), alpha)
    encoded = torch.randn(2, 7, D).double()
    compare(TransformerDecoder(2, D, H, FFN, **options), (3 * 2) ** 0.25, encoded)


@pytest.mark.parametrize(
    ("kind", "layers", "options", "alpha", "beta"),
    [
        (TransformerEncoder, 18, {"decoder_layers": 6}, 1.866111538930392, 0.377630160522943),
        (TransformerDecoder, 6, {}, 2.0597671439071177, 0.34329452398451965),
        (TransformerEncoder, 18, {}, 2.449489742783178, 0.28867513459481287),
    ],
)
def test_factors_of_a_public_implementation(kind, layers, options, alpha, beta):
    """Of `get_deepnorm_coefficients` in facebookresearch/xformers."""
    stack = kind(layers, D, H, FFN, connection="residual", norm="deepnorm", **options)
    scales = stack._scales(
        "", "deepnorm", "residual", "layer", layers, *options.values() or (None,)
    )
    assert scales == pytest.approx((alpha, beta), rel=1e-14)
    assert stack.alpha == pytest.approx(alpha, rel=1e-14)


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


def test_decoding_step_by_step():
    torch.manual_seed(0)
    options = {"connection": "residual", "norm": "deepnorm", "dropout": 0.0}
    stack = perturbed(TransformerDecoder(2, D, H, FFN, **options)).eval()
    x, encoded = torch.randn(3, 4, D), torch.randn(3, 5, D)
    wanted = stack(x, encoded)
    packing = Packing(3, 5)
    cache = stack.start(encoded.flatten(0, 1), packing)
    got = torch.stack([stack.step(x[:, t], cache) for t in range(4)], 1)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


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
    for layer in stack.layers:
        q, k, v = layer.attention.query_key_value.weight.chunk(3)
        square, wide = math.sqrt(6 / (2 * dim)), math.sqrt(6 / (5 * dim))
        for weight, bound in (
            (q, square),
            (k, square),
            (v, beta * square),
            (layer.attention.out.weight, beta * square),
            (layer.feed_forward.up.weight, beta * wide),
            (layer.feed_forward.down.weight, beta * wide),
        ):
            assert 0.99 * bound < weight.abs().max() <= bound
        if kind is TransformerDecoder:
            k, v = layer.cross_attention.key_value.weight.chunk(2)
            assert 0.99 * square < k.abs().max() <= square
            assert 0.99 * beta * square < v.abs().max() <= beta * square


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TransformerEncoder, {"connection": "dlcl"}, "needs connection='residual', got 'dlcl'"),
        (TransformerEncoder, {"norm_type": "none"}, "needs norm_type='layer', got 'none'"),
        (TransformerEncoder, {"norm": "deep"}, "TransformerEncoder: norm must be one of pre, post"),
        (TransformerEncoder, {"norm": "post", "decoder_layers": 2}, "decoder_layers is for an enc"),
        (TransformerDecoder, {"decoder_layers": 2}, "decoder_layers is for an encoder"),
        (TransformerEncoder, {"decoder_layers": 0}, "decoder_layers must be"),
    ],
)
def test_errors(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(2, D, H, FFN, **{"connection": "residual", "norm": "deepnorm"} | options)
