"""What decoding keeps: hypotheses that branch, end and leave, against the whole forward pass."""

import pytest
import torch

from deepfast.nn import Packing, TransformerDecoder
from tests.nn.written_out import shaken

DIM, HEADS, FFN, SENTENCES, LENGTH = 8, 2, 12, 5, 4
PADDING = torch.arange(LENGTH) >= torch.tensor([4, 2, 3, 1, 4])[:, None]


@pytest.mark.parametrize(("window", "kv_heads"), [(None, 2), (2, 1), (0, 2), (99, 1)])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("way", ["steps", "modules", "torch", "swiglu"])
def test_any_choice_of_hypotheses(way, norm, window, kv_heads):
    """By the steps of layers; by their modules, which a hook or an activation of torch's ops asks
    for; by torch's attention."""
    torch.manual_seed(0)
    backend = "reference" if way == "torch" else None
    options = {"norm": norm, "window": window, "num_kv_heads": kv_heads, "backend": backend}
    options["activation"] = "swiglu" if way == "swiglu" else "relu"
    decoder = shaken(TransformerDecoder(2, DIM, HEADS, FFN, **options)).eval()
    calls = []
    if way == "modules":
        for layer in decoder.layers:
            layer.feed_forward.down.register_forward_hook(lambda *_: calls.append(1))
    encoded, packing = torch.randn(SENTENCES, LENGTH, DIM), Packing.of(SENTENCES, LENGTH, PADDING)
    cache = decoder.start(packing.pack(encoded.detach()), packing)
    prefixes, sentences = torch.empty(SENTENCES, 0, DIM), torch.arange(SENTENCES)
    generator = torch.Generator().manual_seed(1)
    for position in range(24):
        x = torch.randn(len(sentences), DIM, generator=generator)
        prefixes = torch.cat((prefixes, x.unsqueeze(1)), 1)
        got = decoder.step(x, cache)
        assert not got.requires_grad
        with torch.no_grad():
            want = decoder(prefixes, encoded[sentences], None, PADDING[sentences])[:, -1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        # Branches, gaps and rows out of order; from position 12 on sentences leave.
        count = 9 if position < 12 else 3
        index = torch.randint(len(sentences), (count,), generator=generator)
        prefixes, sentences = prefixes[index], sentences[index]
        cache.reorder(index)
    stored = cache.hypotheses.packing.batch
    assert 4 * len(sentences.unique()) > 3 * stored
    # Room for 16 positions of 3 hypotheses; what a window does not reach makes room for others.
    room = 48 if window in (0, 2) else 164
    assert {kv.key_value.shape[:2] for kv in cache.layers} == {(stored, room)}
    assert all((step is not None) == (way == "steps") for step in cache.steps)
    assert (way == "modules") == bool(calls)


@pytest.mark.parametrize("norm_type", ["layer", "rms"])
@pytest.mark.parametrize("connection", ["residual", "dlcl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_computes_what_the_modules_do(dtype, connection, norm_type):
    """Also with grouped heads, and with gelu."""
    torch.manual_seed(0)
    options = {"connection": connection, "norm_type": norm_type, "activation": "gelu"}
    decoder = TransformerDecoder(3, DIM, 4, FFN, num_kv_heads=2, **options)
    decoder.eval().to(dtype)
    packing = Packing(2, LENGTH)
    encoded, x = torch.randn(2 * LENGTH, DIM, dtype=dtype), torch.randn(3, 2, DIM, dtype=dtype)
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
