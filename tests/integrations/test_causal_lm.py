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
    "DeepseekV3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "GlmForCausalLM",
    "GPTNeoXForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM",
    "Olmo2ForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
]  # fmt: skip


def ours(model, inputs):
    """As `results`, by causal_lm_loss."""
    return of_loss(model, deepfast.causal_lm_loss(model, **inputs))


@pytest.mark.parametrize("name", EQUAL)
def test_loss_and_gradients(name):
    model, inputs = make(name), batch(padded=True)
    want = results(model, inputs)
    for _ in range(2):
        assert_same(ours(model, inputs), want)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_tied_and_biased_output_layers(tied, biased):
    model, inputs = fresh("LlamaForCausalLM", tie_word_embeddings=tied), batch()
    if biased:
        model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert_same(ours(model, inputs), results(model, inputs))


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_number_of_items(items):
    model, inputs = make("LlamaForCausalLM"), batch() | {"num_items_in_batch": items}
    assert_same(ours(model, inputs), results(model, inputs))


@pytest.mark.parametrize(("name", "options", "words"), [
    ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "scales, caps or otherwise"),
    ("CohereForCausalLM", {"logit_scale": 0.25}, "scales, caps or otherwise"),
    ("GraniteForCausalLM", {"logits_scaling": 8.0}, "scales, caps or otherwise"),
    ("Qwen3MoeForCausalLM", {"output_router_logits": True}, "another loss"),
    ("BertForMaskedLM", {}, "gives its output layer other states"),
    ("BartForConditionalGeneration", {}, "gives its output layer other states"),
    ("T5ForConditionalGeneration", {}, "no base model"),
])  # fmt: skip
def test_other_models_are_refused(name, options, words):
    """Also with the small logits of a model at its start; and nothing of the model changes."""
    model, inputs = fresh(name, **options), batch()
    want, random = results(model, inputs), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"causal_lm_loss: {name} .*({words})"):
            deepfast.causal_lm_loss(model, **inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.training for m in model.modules())
    assert not model.get_output_embeddings()._forward_hooks
    assert_equal(results(model, inputs), want)


def test_an_argument_may_change_the_loss():
    model, inputs = make("Qwen3MoeForCausalLM"), batch()
    deepfast.causal_lm_loss(model, **inputs)
    with pytest.raises(ValueError, match="has another loss than the mean cross entropy"):
        deepfast.causal_lm_loss(model, **inputs, output_router_logits=True)
    with pytest.raises(TypeError, match="shift_labels is not supported"):
        deepfast.causal_lm_loss(model, **inputs, shift_labels=inputs["labels"])


def _mean_of_sentences(logits, labels, **_):
    losses = [F.cross_entropy(x[:-1], y[1:]) for x, y in zip(logits, labels, strict=True)]
    return torch.stack(losses).mean()


def _without_word_0(logits, labels, **_):
    labels = labels.masked_fill(labels == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _router(model):
    """A small loss."""
    model.router_aux_loss_coef, model.config.output_router_logits = 3e-5, True


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("LlamaForCausalLM", lambda model: setattr(model, "loss_function", _mean_of_sentences)),
        ("LlamaForCausalLM", lambda model: setattr(model, "loss_function", _without_word_0)),
        ("Qwen3MoeForCausalLM", _router),
    ],
)
def test_a_loss_or_a_config_that_changes_is_seen(name, change):
    model, inputs = make(name), batch()
    deepfast.causal_lm_loss(model, **inputs)
    change(model)
    with pytest.raises(ValueError, match="has another loss than the mean cross entropy"):
        deepfast.causal_lm_loss(model, **inputs)


def test_a_loss_that_reads_the_mask_is_refused():
    model, inputs = make("LlamaForCausalLM"), batch(padded=True)
    forward = model.forward

    def masked(input_ids, attention_mask=None, labels=None, **options):
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, -100)
        return forward(input_ids, attention_mask, labels=labels, **options)

    model.forward = masked
    deepfast.causal_lm_loss(model, inputs["input_ids"], inputs["labels"])
    with pytest.raises(ValueError, match="has another loss than the mean cross entropy"):
        deepfast.causal_lm_loss(model, **inputs)


def test_a_comparison_that_raises_is_made_again():
    model, inputs = make("Gemma2ForCausalLM", final_logit_softcapping=30.0), batch()
    norm = model.model.norm.forward

    def fails(x):
        raise torch.OutOfMemoryError

    model.model.norm.forward = fails
    with pytest.raises(torch.OutOfMemoryError):
        deepfast.causal_lm_loss(model, **inputs)
    model.model.norm.forward = norm
    with pytest.raises(ValueError, match="scales, caps or otherwise"):
        deepfast.causal_lm_loss(model, **inputs)


def test_the_comparison_calls_no_method_that_changes_modes():
    """Some modules merge their weights where they go to evaluation."""
    model, inputs, asked = make("LlamaForCausalLM"), batch(), []
    layer = model.model.layers[0]
    layer.train = lambda mode=True: asked.append(mode)
    deepfast.causal_lm_loss(model, **inputs)
    assert not asked
    assert layer.training


def test_labels_must_be_a_tensor():
    model, inputs = make("LlamaForCausalLM"), batch()
    with pytest.raises(TypeError, match="causal_lm_loss: labels must be a tensor, got NoneType"):
        deepfast.causal_lm_loss(model, inputs["input_ids"], None)
    deepfast.causal_lm_loss(model, **inputs, return_dict=False)


def test_the_comparison_leaves_dropout_and_modes_as_they_are():
    model, inputs = make("GPT2LMHeadModel", resid_pdrop=0.3), batch()
    model.transformer.h[1].eval()
    modes, found = [m.training for m in model.modules()], []
    for step in (results, ours, ours):
        torch.manual_seed(3)
        found.append(step(model, inputs))
    assert_same(found[1], found[0])
    assert_equal(found[2], found[1])
    assert [m.training for m in model.modules()] == modes


def test_autocast_and_checkpointing():
    model, inputs = make("LlamaForCausalLM"), batch(padded=True)
    twin = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(ours(model, inputs), results(twin, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        want, got = results(twin, inputs), ours(copy.deepcopy(model), inputs)
    # Two ways to round to 8 bits.
    assert_same(got, want, 0.05)


def test_a_model_that_turns_on_autocast():
    """As accelerate prepares models for mixed precision."""
    model, inputs = make("LlamaForCausalLM"), batch()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    with pytest.raises(
        ValueError, match=r"autocast: call this function `with accelerator\.autocast"
    ):
        deepfast.causal_lm_loss(model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(ours(model, inputs), results(model, inputs), 0.05)


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_lora(target):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    model, inputs = peft.get_peft_model(make("LlamaForCausalLM"), config), batch(padded=True)
    if target == "lm_head":
        with pytest.raises(ValueError, match=r"must be a .* got .*peft\.tuners\.lora\.layer\.Li"):
            deepfast.causal_lm_loss(model, **inputs)
    else:
        assert_same(ours(model, inputs), results(model, inputs))


def test_prefixes_of_peft_are_refused():
    peft = pytest.importorskip("peft")
    for config in (
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]),
    ):
        model = peft.get_peft_model(make("LlamaForCausalLM"), config)
        with pytest.raises(ValueError, match="PEFT's prompts and aLoRA are not supported, got"):
            deepfast.causal_lm_loss(model, **batch())


def test_compiled():
    model, inputs = make("LlamaForCausalLM"), batch()
    want = deepfast.causal_lm_loss(model, **inputs)
    loss = torch.compile(models.Loss(model), backend="eager", fullgraph=True)(**inputs)
    torch.testing.assert_close(loss, want)


def test_wrapped_models_are_refused(one_rank):
    model, inputs = make("LlamaForCausalLM"), batch()
    for wrapped in (torch.compile(model), DistributedDataParallel(copy.deepcopy(model))):
        with pytest.raises(TypeError, match=f"got {type(wrapped).__name__}; wrap a module whose"):
            deepfast.causal_lm_loss(wrapped, **inputs)


def _hook(head):
    head.register_forward_pre_hook(lambda module, args: None)


def _forward(head):
    head.forward = types.MethodType(nn.Linear.forward, head)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_hook, r"without hooks, .* with \['_forward_pre_hooks'\]"),
        (_forward, r"with \['forward'\]"),
        (nn.utils.parametrizations.weight_norm, r"got .*torch.*\.ParametrizedLinear"),
    ],
)
def test_output_layers_that_do_more_are_refused(change, words):
    model, inputs = make("LlamaForCausalLM"), batch()
    deepfast.causal_lm_loss(model, **inputs)
    change(model.lm_head)
    with pytest.raises(ValueError, match=f"the output layer of LlamaForCausalLM .*{words}"):
        deepfast.causal_lm_loss(model, **inputs)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16, tmp_path):
    """With accumulation over batches that have different numbers of targets."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class Fused(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if return_outputs or self.label_smoother is not None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            with self.accelerator.autocast():
                return deepfast.causal_lm_loss(
                    model, **inputs, num_items_in_batch=num_items_in_batch
                )

    examples = [{n: x[0] for n, x in batch(padded=True).items()} for _ in range(8)]
    options = {
        "output_dir": str(tmp_path), "max_steps": 3, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "seed": 1, "bf16": bf16,
        "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    model, found = make("LlamaForCausalLM"), []
    for kind in (transformers.Trainer, Fused):
        twin, arguments = copy.deepcopy(model), transformers.TrainingArguments(**options)
        trainer = kind(twin, arguments, train_dataset=examples, eval_dataset=examples)
        trainer.train()
        lines = trainer.state.log_history
        losses = [line[n] for line in lines for n in ("loss", "eval_loss") if n in line]
        found.append([torch.tensor(losses), *twin.parameters()])
    assert len(found[0][0]) == 4
    tolerance = 2e-2 if bf16 else 1e-4
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
