"""deepfast.patch(attention=True): attention without padding in transformers' models."""

import pytest
import torch

import deepfast
from deepfast.integrations import hf_attention
from tests.attach.models import assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def patched(model):
    return deepfast.patch(model, norms=False, loss=False, attention=True)


def needs_masks_of_encoders():
    """transformers 4 asks its mask functions for the masks of decoders alone."""
    if pytest.importorskip("transformers").__version__.startswith("4."):
        pytest.skip("transformers 4 has attention functions for decoders alone")


MODELS = [
    ("BertForMaskedLM", {}),
    ("LlamaForCausalLM", {}),
    ("MistralForCausalLM", {}),
    ("ModernBertForMaskedLM", {}),
    # With a sliding window.
    ("MistralForCausalLM", {"sliding_window": 4}),
    ("MistralForCausalLM", {"sliding_window": 1}),
    ("MistralForCausalLM", {"sliding_window": 8, "num_key_value_heads": 1}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("ModernBertForMaskedLM", {"local_attention": 4, "global_attn_every_n_layers": 2}),
    ("ModernBertForMaskedLM", {"local_attention": 6, "global_attn_every_n_layers": 3}),
]


@pytest.mark.parametrize(("name", "sizes"), MODELS, ids=str)
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_same_where_there_are_tokens(name, sizes, side):
    if "Bert" in name:
        needs_masks_of_encoders()
    model, inputs = make(name, **sizes), batch(padded=side is not None)
    if side == "left":
        inputs = {n: x.flip(1) for n, x in inputs.items()}
    if side is not None:
        inputs["labels"][inputs["attention_mask"] == 0] = -100
        # A causal model predicts the first token from padding on the left.
        inputs["labels"][:, 1:][inputs["attention_mask"][:, :-1] == 0] = -100
    before, want = model.config._attn_implementation, results(model, inputs)
    handle = patched(model)
    assert_same(results(model, inputs), want)
    handle.remove()
    assert model.config._attn_implementation == before
    assert_same(results(model, inputs), want, 0)


def test_keys_are_not_repeated(monkeypatch):
    model, seen = make("LlamaForCausalLM", num_key_value_heads=2), []

    def attention(q, k, v, **options):
        seen.append((q.shape[1], k.shape[1], v.shape[1]))
        return real(q, k, v, **options)

    real = deepfast.ops.attention
    monkeypatch.setattr(deepfast.ops, "attention", attention)
    patched(model)
    model(**batch())
    assert set(seen) == {(4, 2, 2)}


def test_padding_is_not_read():
    needs_masks_of_encoders()
    model, inputs = make("BertForMaskedLM").eval(), batch(padded=True, labels=False)
    patched(model)
    want = model(**inputs).logits
    inputs["input_ids"][0, 5:] = 7
    torch.testing.assert_close(model(**inputs).logits[0, :5], want[0, :5], rtol=0, atol=0)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("window", [None, 4, 12])
def test_generates_with_a_cache(side, window):
    name = "LlamaForCausalLM" if window is None else "MistralForCausalLM"
    model = make(name, **{} if window is None else {"sliding_window": window}).eval()
    inputs = batch(padded=side == "left", labels=False)
    if side == "left":
        inputs = {n: x.flip(1) for n, x in inputs.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    patched(model)
    assert torch.equal(model.generate(**inputs, **options), want)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_with_norms_loss_and_checkpointing(checkpointed):
    model, inputs = make("LlamaForCausalLM"), batch(padded=True)
    inputs["labels"][inputs["attention_mask"] == 0] = -100
    want = results(model, inputs)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    deepfast.patch(model, attention=True)
    assert_same(results(model, inputs), want)


def test_an_encoder_and_a_decoder():
    """Cross-attention: the queries are not the positions of the keys."""
    needs_masks_of_encoders()
    model = make("BartForConditionalGeneration")
    inputs = batch(padded=True)
    want = results(model, inputs)
    patched(model)
    assert_same(results(model, inputs), want)


def test_refuses_what_it_cannot_compute():
    model = make("MistralForCausalLM", sliding_window=4)
    patched(model)
    gaps = torch.ones(2, 9, dtype=torch.int64)
    gaps[1, 4] = 0
    with pytest.raises(ValueError, match="before or after a sentence, got padding between its"):
        model(**batch() | {"attention_mask": gaps})
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match="this model's attention uses sliding_window; leave it"):
        hf_attention.attend(layer, x, x, x, None, sliding_window=4)
    model = make("LlamaForCausalLM")
    patched(model)
    packed = torch.arange(9).remainder(4).expand(2, 9)
    with pytest.raises(ValueError, match="another mask than causal or full attention"):
        model(**batch(), position_ids=packed, use_cache=False)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"expected a padding mask \(B, K\), got \(2, 1, 9, 9\)"):
        model(**batch(), attention_mask=mask)
