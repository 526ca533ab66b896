"""Attention with fewer heads of keys and with windows, and what decoding keeps, written out."""

import pytest
import torch

from deepfast.nn import MultiheadAttention, Packing, TransformerDecoder
from tests.nn.test_transformer import EVERY, shaken_stack
from tests.nn.written_out import DIM, assert_same, attend, leaf, shaken

HEADS, FFN, LENGTH = 6, 20, 7
RIGHT = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [1]])
PADDINGS = {
    "none": None, "right": RIGHT, "left": RIGHT.flip(1),
    "between": torch.tensor([[0, 1, 0, 0, 1, 1, 0], [0] * 7, [1, 1, 0, 1, 0, 1, 1]]).bool(),
}  # fmt: skip
# num_kv_heads and window.
PATTERNS = [(1, None), (2, 2), (3, (1, 3)), (6, (0, 2)), (2, (None, 1)), (2, (3, None)), (6, 99)]


# Causal attention has its padding on the right.
@pytest.mark.parametrize(
    ("padding", "causal"), [("left", False), ("between", False), ("none", True), ("right", True)]
)
@pytest.mark.parametrize(("kv", "window"), PATTERNS, ids=str)
def test_self_attention(exact_backend, kv, window, padding, causal):
    m = MultiheadAttention(DIM, HEADS, num_kv_heads=kv, window=window, backend=exact_backend)
    assert m.query_key_value.weight.shape == (DIM + 2 * kv * DIM // HEADS, DIM)
    shaken(m)
    x, padding = leaf(3, LENGTH, DIM), PADDINGS[padding]
    keep = torch.ones(3, LENGTH).bool() if padding is None else ~padding
    packing = Packing.of(3, LENGTH, padding)
    got = packing.unpack(m(packing.pack(x), packing, causal=causal))
    want = attend(m, x, padding=padding, causal=causal) * keep[..., None]
    assert_same(got, want, m, [x], keep)


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_cross_attention(exact_backend, kv):
    m = shaken(MultiheadAttention(DIM, HEADS, num_kv_heads=kv, cross=True, backend=exact_backend))
    x, encoded, padding = leaf(3, 5, DIM), leaf(3, LENGTH, DIM), RIGHT
    packing, at = Packing(3, 5), Packing.of(3, LENGTH, padding)
    got = m(packing.pack(x), packing, encoded=at.pack(encoded), encoded_packing=at)
    assert_same(packing.unpack(got), attend(m, x, encoded, padding), m, [x, encoded])
    weights = m.weights(packing.pack(x), packing, at.pack(encoded), at)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5))
    decoder = TransformerDecoder(1, DIM, HEADS, FFN, num_kv_heads=kv, window=4)
    assert decoder.layers[0].attention.window == (4, 4)
    assert decoder.layers[0].cross_attention.window == (-1, -1)


# ---- decoding ------------------------------------------------------------------------------------

SENTENCES, SOURCE = 5, 4
PADDING = torch.arange(SOURCE) >= torch.tensor([4, 2, 3, 1, 4])[:, None]


def decoded(decoder, positions):
    """Hypotheses that branch, end and leave, against the whole forward pass. Returns the cache."""
    encoded, packing = torch.randn(SENTENCES, SOURCE, DIM), Packing.of(SENTENCES, SOURCE, PADDING)
    cache = decoder.start(packing.pack(encoded.detach()), packing)
    prefixes, sentences = torch.empty(SENTENCES, 0, DIM), torch.arange(SENTENCES)
    generator = torch.Generator().manual_seed(1)
    for position in range(positions):
        x = torch.randn(len(sentences), DIM, generator=generator)
        prefixes = torch.cat((prefixes, x.unsqueeze(1)), 1)
        got = decoder.step(x, cache)
        assert not got.requires_grad
        with torch.no_grad():
            want = decoder(prefixes, encoded[sentences], None, PADDING[sentences])[:, -1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        # Branches, gaps and rows out of order; in the second half sentences leave.
        count = 9 if position < positions // 2 else 3
        index = torch.randint(len(sentences), (count,), generator=generator)
        prefixes, sentences = prefixes[index], sentences[index]
        cache.reorder(index)
    assert 4 * len(sentences.unique()) > 3 * cache.hypotheses.packing.batch
    return cache


@EVERY
def test_decoding_by_every_connection(options):
    decoded(shaken_stack(TransformerDecoder, options).eval(), 6)


@pytest.mark.parametrize(
    ("way", "norm", "window", "kv_heads"),
    [
        ("steps", "pre", None, 3), ("steps", "post", 2, 1), ("modules", "post", None, 3),
        ("modules", "pre", 2, 1), ("torch", "pre", 0, 3), ("swiglu", "post", 99, 1),
    ],
)  # fmt: skip
def test_ways_to_decode(way, norm, window, kv_heads):
    """By the steps of layers; by their modules, which a hook (in pre-norm on a norm) or an
    activation of torch's ops asks for; by torch's attention."""
    options = {"norm": norm, "window": window, "num_kv_heads": kv_heads}
    options["backend"] = "reference" if way == "torch" else None
    options["activation"] = "swiglu" if way == "swiglu" else "relu"
    decoder, calls = shaken_stack(TransformerDecoder, options).eval(), []
    for layer in decoder.layers if way == "modules" else ():
        hooked = layer.feed_forward.down if norm == "post" else layer.feed_forward_norm
        hooked.register_forward_hook(lambda *_: calls.append(1))
    cache = decoded(decoder, 24)
    # Room for 16 positions of 3 hypotheses; what a window does not reach makes room for others.
    shape = cache.hypotheses.packing.batch, 48 if window in (0, 2) else 196
    assert {kv.key_value.shape[:2] for kv in cache.layers} == {shape}
    assert all((step is not None) == (way == "steps") for step in cache.steps)
    assert (way == "modules") == bool(calls)


@pytest.mark.parametrize(
    ("dtype", "connection", "norm_type"),
    [
        (torch.float32, "dlcl", "layer"), (torch.float64, "residual", "rms"),
        (torch.bfloat16, "residual", "layer"), (torch.bfloat16, "dlcl", "rms"),
    ],
)  # fmt: skip
def test_a_step_computes_what_the_modules_do(dtype, connection, norm_type):
    """Also with grouped heads, and with gelu."""
    options = {"connection": connection, "norm_type": norm_type, "activation": "gelu"}
    decoder = TransformerDecoder(3, 8, 4, 12, num_kv_heads=2, **options).eval().to(dtype)
    packing = Packing(2, SOURCE)
    encoded, x = torch.randn(2 * SOURCE, 8, dtype=dtype), torch.randn(3, 2, 8, dtype=dtype)
    with torch.inference_mode():
        results = []
        for plain in (True, False):
            if not plain:
                for module in decoder.layers.modules():
                    module.register_forward_hook(lambda *_: None)
            cache = decoder.start(encoded, packing)
            results.append([decoder.step(one, cache) for one in x])
            assert all((step is not None) == plain for step in cache.steps)
    torch.testing.assert_close(*results, rtol=0, atol=0)
