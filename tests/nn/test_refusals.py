"""What modules refuse, each with one sentence."""

import pytest
import torch

from deepfast import ops
from deepfast.nn import (
    DLCL,
    MUDD,
    AttentionResiduals,
    DepthHistory,
    LatentDepth,
    LayerFusion,
    LayerNorm,
    MultiheadAttention,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

TOO_LARGE = {
    "DLCL: num_layers": lambda n: DLCL(n, 8),
    "DLCL: dim": lambda n: DLCL(3, n),
    "AttentionResiduals: reads": lambda n: AttentionResiduals(3, 8, reads=n),
    "MUDD: num_layers": lambda n: MUDD(n, 8),
    "LatentDepth: num_layers": lambda n: LatentDepth(n),
    "LayerFusion: num_states": lambda n: LayerFusion(n, 8),
    "LayerNorm: dim": lambda n: LayerNorm(n),
    "MultiheadAttention: dim": lambda n: MultiheadAttention(n, 1),
    "TransformerEncoder: num_layers": lambda n: TransformerEncoder(n, 8, 2, 16),
    "TransformerEncoderLayer: ffn_dim": lambda n: TransformerEncoder(2, 8, 2, n),
}


@pytest.mark.parametrize("size", [10**12, 10**30])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_have_an_end(name, size):
    with pytest.raises(ValueError, match=f"^{name} must be at most [0-9]+, got {size}$"):
        TOO_LARGE[name](size)


def wide(*shape):
    return torch.ones(*shape, dtype=torch.float64)


OF_ANOTHER_DTYPE = {
    "x": lambda: TransformerEncoder(1, 8, 2, 16)(wide(2, 3, 8)),
    "x of a residual stack": lambda: TransformerEncoder(1, 8, 2, 16, connection="residual")(
        wide(2, 3, 8)
    ),
    "x of MUDD": lambda: TransformerEncoder(2, 8, 2, 16, connection="mudd")(wide(2, 3, 8)),
    "x of a layer": lambda: TransformerEncoderLayer(8, 2, 16)(wide(2, 3, 8)),
    "x of a decoder layer": lambda: TransformerDecoderLayer(8, 2, 16)(wide(2, 3, 8), wide(2, 3, 8)),
    "x of attention": lambda: MultiheadAttention(8, 2)(wide(6, 8), Packing(2, 3)),
    "encoded": lambda: TransformerDecoder(1, 8, 2, 16)(torch.ones(2, 3, 8), wide(2, 3, 8)),
    "states": lambda: LayerFusion(2, 8)([wide(3, 8)] * 2),
}


@pytest.mark.parametrize("name", OF_ANOTHER_DTYPE)
def test_inputs_of_another_dtype_than_the_weights(name):
    first = name.partition(" ")[0]
    expected = rf"{first}\S* must be torch\.float32 like the weights, got torch\.float64"
    with pytest.raises(ValueError, match=expected):
        OF_ANOTHER_DTYPE[name]()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="float64"):
        OF_ANOTHER_DTYPE[name]()


ON_ANOTHER_DEVICE = {
    "x": lambda x: MultiheadAttention(8, 2)(x.flatten(0, 1), Packing(2, 3)),
    "encoded": lambda x: TransformerDecoder(1, 8, 2, 16)(torch.ones(2, 3, 8), x),
    "states": lambda x: LayerFusion(2, 8)([x] * 2),
}


@pytest.mark.parametrize("name", ON_ANOTHER_DEVICE)
def test_inputs_on_another_device_than_the_weights(name):
    expected = rf": {name}\S* must be on cpu like the weights, got meta"
    with pytest.raises(ValueError, match=expected):
        ON_ANOTHER_DEVICE[name](torch.ones(2, 3, 8, device="meta"))


@pytest.mark.parametrize("argument", ["connection", "activation", "dropout"])
def test_errors_name_classes_that_users_know(argument):
    with pytest.raises(ValueError, match=f"^TransformerEncoder(Layer)?: {argument} must be"):
        TransformerEncoder(1, 8, 2, 16, **{argument: "none"})


def push(x):
    return DLCL(1, 8)(x, DepthHistory())


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.jacrev],
    ids=["grad", "grad in vmap", "jacrev"],
)
def test_derivatives_by_torch_func(transform):
    x, one = torch.ones(2, 3, 8), torch.ones(8)
    with pytest.raises(NotImplementedError, match="layer_norm: expected derivatives by"):
        transform(lambda x: ops.layer_norm(x, one, one).sum())(x)
    with pytest.raises(NotImplementedError, match="DLCL: expected no transforms, got one"):
        transform(lambda x: push(x).sum())(x)


def test_vmap():
    x, one = torch.randn(2, 3, 8), torch.ones(8)
    mapped = torch.func.vmap(lambda x: ops.layer_norm(x, one, one))
    assert mapped(x).equal(ops.layer_norm(x, one, one))
    with pytest.raises(NotImplementedError, match="DLCL: expected no transforms, got one"):
        torch.func.vmap(push)(x)


@pytest.mark.parametrize("packing", [None, 5])
def test_what_is_no_packing_and_no_cache(packing):
    encoder, decoder = TransformerEncoder(1, 16, 2, 32), TransformerDecoder(1, 16, 2, 32)
    x = torch.randn(5, 16)
    kind = type(packing).__name__
    for call in (
        lambda: encoder.forward_packed(x, packing),
        lambda: decoder.forward_packed(x, packing, x, packing),
        lambda: decoder.start(x, packing),
    ):
        with pytest.raises(TypeError, match=rf"^Transformer\w+: packing must be .*, got {kind}$"):
            call()
    with pytest.raises(TypeError, match=rf"cache must be what start returns, got {kind}$"):
        decoder.step(x, packing)
