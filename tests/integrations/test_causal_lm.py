"""deepfast.causal_lm_loss against the loss that models of transformers compute themselves."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepfast
from tests.attach import models
from tests.attach.models import assert_equal, assert_same, batch, fresh, make, of_loss, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EQUAL = [
    "Gemma2ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM",
    "OPTForCausalLM", "PhiForCausalLM", "Qwen3MoeForCausalLM",
]  # fmt: skip
ANOTHER = "has another loss than the mean cross entropy"


def ours(model, inputs):
    """As `results`, by causal_lm_loss."""
    return of_loss(model, deepfast.causal_lm_loss(model, **inputs))


@pytest.fixture
def llama():
    return make("LlamaForCausalLM")


@pytest.mark.parametrize(("name", "options", "items"), [
    *((name, {}, None) for name in EQUAL),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}, 7),
    ("LlamaForCausalLM", {"tie_word_embeddings": False}, torch.tensor(7)),
])  # fmt: skip
def test_loss_and_gradients(name, options, items):
    model, inputs = make(name, **options), batch(padded=True) | {"num_items_in_batch": items}
    if items is not None:
        model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size))
    want = results(model, inputs)
    for _ in range(2):
        assert_same(ours(model, inputs), want)


def _mean_of_sentences(logits, labels, **_):
    losses = [F.cross_entropy(x[:-1], y[1:]) for x, y in zip(logits, labels, strict=True)]
    return torch.stack(losses).mean()


def _without_word_0(logits, labels, **_):
    labels = labels.masked_fill(labels == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _router(model):
    # A small loss.
    model.router_aux_loss_coef, model.config.output_router_logits = 3e-5, True


def _forward(model):
    model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)


@pytest.mark.parametrize(("name", "options", "change", "words"), [
    ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, None, "scales, caps or otherwise"),
    ("GraniteForCausalLM", {"logits_scaling": 8.0}, None, "scales, caps or otherwise"),
    ("Qwen3MoeForCausalLM", {"output_router_logits": True}, None, ANOTHER),
    ("BartForConditionalGeneration", {}, None, "gives its output layer other states"),
    ("T5ForConditionalGeneration", {}, None, "no base model"),
    ("Qwen3MoeForCausalLM", {}, _router, ANOTHER),
    ("LlamaForCausalLM", {}, lambda m: setattr(m, "loss_function", _mean_of_sentences), ANOTHER),
    ("LlamaForCausalLM", {}, lambda m: setattr(m, "loss_function", _without_word_0), ANOTHER),
    ("LlamaForCausalLM", {}, lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None),
     r"must be a torch.nn.Linear without hooks, .* with \['_forward_pre_hooks'\]"),
    ("LlamaForCausalLM", {}, _forward, r" with \['forward'\]"),
    ("LlamaForCausalLM", {}, lambda m: nn.utils.parametrizations.weight_norm(m.lm_head),
     r"got .*torch.*\.ParametrizedLinear"),
])  # fmt: skip
def test_other_models_are_refused(name, options, change, words):
    """Also with the small logits of a model at its start, and where it changes after a first call.
    Nothing of the model changes."""
    model, inputs = fresh(name, **options), batch()
    if change is not None:
        deepfast.causal_lm_loss(model, **inputs)
        change(model)
    want, random = results(model, inputs), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"causal_lm_loss: .*{name} .*({words})"):
            deepfast.causal_lm_loss(model, **inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.training for m in model.modules())
    assert not model.get_output_embeddings()._forward_hooks
    assert_equal(results(model, inputs), want)


def test_arguments(llama):
    model, inputs = make("Qwen3MoeForCausalLM"), batch()
    deepfast.causal_lm_loss(model, **inputs, return_dict=False)
    with pytest.raises(ValueError, match=ANOTHER):
        deepfast.causal_lm_loss(model, **inputs, output_router_logits=True)
    with pytest.raises(TypeError, match="shift_labels is not supported"):
        deepfast.causal_lm_loss(model, **inputs, shift_labels=inputs["labels"])
    with pytest.raises(TypeError, match="causal_lm_loss: labels must be a tensor, got NoneType"):
        deepfast.causal_lm_loss(llama, inputs["input_ids"], None)


def test_a_loss_that_reads_the_mask_is_refused(llama):
    inputs, forward = batch(padded=True), llama.forward

    def masked(input_ids, attention_mask=None, labels=None, **options):
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, -100)
        return forward(input_ids, attention_mask, labels=labels, **options)

    llama.forward = masked
    deepfast.causal_lm_loss(llama, inputs["input_ids"], inputs["labels"])
    with pytest.raises(ValueError, match=ANOTHER):
        deepfast.causal_lm_loss(llama, **inputs)


def test_a_comparison_that_raises_is_made_again():
    model, inputs = make("Gemma2ForCausalLM", final_logit_softcapping=30.0), batch()
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        deepfast.causal_lm_loss(model, **inputs)
    handle.remove()
    with pytest.raises(ValueError, match="scales, caps or otherwise"):
        deepfast.causal_lm_loss(model, **inputs)


def test_the_comparison_leaves_dropout_and_modes_as_they_are():
    """It calls no method that changes modes: some modules merge their weights there."""
    model, inputs, asked = make("GPT2LMHeadModel", resid_pdrop=0.3), batch(), []
    model.transformer.h[1].eval()
    model.transformer.h[0].train = asked.append
    modes, found = [m.training for m in model.modules()], []
    for step in (results, ours, ours):
        torch.manual_seed(3)
        found.append(step(model, inputs))
    assert_same(found[1], found[0])
    assert_equal(found[2], found[1])
    assert [m.training for m in model.modules()] == modes
    assert not asked


def test_autocast_and_checkpointing(llama):
    """A model that turns autocast on itself, as accelerate prepares it, needs it outside too."""
    inputs, twin = batch(padded=True), copy.deepcopy(llama)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(ours(llama, inputs), results(twin, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        # Two ways to round to 8 bits.
        assert_same(ours(copy.deepcopy(llama), inputs), results(twin, inputs), 0.05)
    twin.forward = torch.autocast("cpu", torch.bfloat16)(twin.forward)
    with pytest.raises(ValueError, match=r"call this function `with accelerator\.autocast"):
        deepfast.causal_lm_loss(twin, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(ours(twin, inputs), results(twin, inputs), 0.05)


def test_peft(llama):
    peft = pytest.importorskip("peft")
    inputs = batch(padded=True)
    refused = [
        (peft.LoraConfig(target_modules=["lm_head"]), r"got .*peft\.tuners\.lora\.layer\.Li"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PEFT's prompts"),
        (peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]), "PEFT's prompts and"),
    ]
    for config, words in refused:
        with pytest.raises(ValueError, match=words):
            deepfast.causal_lm_loss(peft.get_peft_model(copy.deepcopy(llama), config), **inputs)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama, config)
    assert_same(ours(model, inputs), results(model, inputs))


@pytest.mark.slow
def test_wrapped_models(llama, one_rank):
    inputs = batch()
    for wrapped in (torch.compile(llama), DistributedDataParallel(copy.deepcopy(llama))):
        with pytest.raises(TypeError, match=f"got {type(wrapped).__name__}; wrap a module whose"):
            deepfast.causal_lm_loss(wrapped, **inputs)
    want = deepfast.causal_lm_loss(llama, **inputs)
    loss = torch.compile(models.Loss(llama), backend="eager", fullgraph=True)(**inputs)
    torch.testing.assert_close(loss, want)
