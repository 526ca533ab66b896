"""deepfast.patch(attention=True): attention without padding in transformers' models."""

import pytest
import torch

import deepfast
from tests.integrations.hf_models import assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MODELS = ["BertForMaskedLM", "LlamaForCausalLM", "MistralForCausalLM", "ModernBertForMaskedLM"]


def patched(model):
    return deepfast.patch(model, norms=False, loss=False, attention=True)


def needs_masks_of_encoders():
    """transformers 4 asks its mask functions for the masks of decoders alone."""
    if pytest.importorskip("transformers").__version__.startswith("4."):
        pytest.skip("transformers 4 has attention functions for decoders alone")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_same_where_there_are_tokens(name, side):
    if "Bert" in name:
        needs_masks_of_encoders()
    model, inputs = make(name), batch(padded=side is not None)
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


def test_padding_is_not_read():
    needs_masks_of_encoders()
    model, inputs = make("BertForMaskedLM").eval(), batch(padded=True, labels=False)
    patched(model)
    want = model(**inputs).logits
    inputs["input_ids"][0, 5:] = 7
    torch.testing.assert_close(model(**inputs).logits[0, :5], want[0, :5], rtol=0, atol=0)


@pytest.mark.parametrize("side", ["none", "left"])
def test_generates_with_a_cache(side):
    model, inputs = make("LlamaForCausalLM").eval(), batch(padded=side == "left", labels=False)
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
    sizes = {"d_model": 32, "dropout": 0.0, "decoder_start_token_id": 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    model = make("BartForConditionalGeneration", **sizes)
    inputs = batch(padded=True)
    want = results(model, inputs)
    patched(model)
    assert_same(results(model, inputs), want)


def test_refuses_what_it_cannot_compute():
    model = make("MistralForCausalLM", sliding_window=4)
    patched(model)
    with pytest.raises(ValueError, match="another mask than causal or full attention"):
        model(**batch())
    model = make("LlamaForCausalLM")
    patched(model)
    packed = torch.arange(9).remainder(4).expand(2, 9)
    with pytest.raises(ValueError, match="another mask than causal or full attention"):
        model(**batch(), position_ids=packed, use_cache=False)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"expected a padding mask \(B, K\), got \(2, 1, 9, 9\)"):
        model(**batch(), attention_mask=mask)
