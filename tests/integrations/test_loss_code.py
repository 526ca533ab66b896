"""Which losses deepfast.patch replaces, and which it leaves, by the code of the model's forward."""

import copy
import functools
import importlib
import re

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.models import VOCAB, D, assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def own_loss(model):
    model.loss_function = lambda logits, *_, **__: logits.square().mean()


def own_forward(model):
    plain = model.forward
    model.forward = lambda **inputs: plain(**inputs)


def own_class(model):
    class Doubled(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.loss = out.loss * 2
            return out

    model.__class__ = Doubled


def decorated(model):
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.loss = out.loss * 2
        return out

    model.__class__ = type("Decorated", (type(model),), {"forward": forward})


def hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 2)


def sequence(model):
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())


def forward_of_the_layer(model):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x) * 2


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("BertLMHeadModel", {"is_decoder": True, "use_cache": False}, "use_cache = False"),
        ("CohereForCausalLM", {"logit_scale": 0.3}, "self.logit_scale"),
        (
            "DebertaV2ForMaskedLM",
            {"legacy": False, "tie_word_embeddings": False},
            "word_embeddings.weight.t()) + self.bias`",
        ),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 1.0}, "final_logit_softcapping`"),
        ("GraniteForCausalLM", {"logits_scaling": 3.0}, "`logits / self.config.logits_scaling`"),
        (
            "ModernBertForMaskedLM",
            {"sparse_prediction": True},
            "`if self.sparse_prediction and labels is not None:",
        ),
        ("Qwen3MoeForCausalLM", {"output_router_logits": True}, "self.router_aux_loss_coef"),
        ("T5ForConditionalGeneration", {}, "no cross entropy of a known form"),
        ("LlamaForCausalLM", own_loss, "its loss_function is not one of transformers'"),
        ("LlamaForCausalLM", own_forward, "this LlamaForCausalLM is not that of its class"),
        ("LlamaForCausalLM", own_class, "its forward has no argument labels"),
        ("LlamaForCausalLM", decorated, "the code of Decorated.forward cannot be read"),
        ("LlamaForCausalLM", hook, "its lm_head has hooks"),
        ("LlamaForCausalLM", sequence, "Sequential computes the logits as `input`"),
        ("LlamaForCausalLM", forward_of_the_layer, "this Linear is not that of its class"),
    ],
)
def test_a_loss_that_is_more_than_head_and_cross_entropy_is_left(name, change, why):
    options, change = (change, None) if isinstance(change, dict) else ({}, change)
    model, inputs = make(name, **options), batch(padded=True)
    if change is not None:
        change(model)
    want = results(model, inputs)
    with pytest.warns(UserWarning, match=f"left loss of .*{re.escape(why)}"):
        handle = deepfast.patch(model, norms=False)
    assert list(handle.left) == [f"loss of {type(model).__name__}"]
    assert not handle.replaced
    assert_same(results(model, inputs), want, 0)


OWN = """
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

class Own(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, weight=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


@pytest.mark.parametrize(
    ("line", "other", "why"),
    [
        ("hidden = ", "hidden = 3 * ", None),
        ("(hidden)", "(hidden).float().contiguous()", None),
        ("(hidden)", "(hidden).float()", "its logits in fp64 are rounded to fp32"),
        ("self.loss_function(logits, labels, self.vocab_size, **kwargs)",
         "nn.CrossEntropyLoss(ignore_index=1)(logits.view(-1, 50), labels.view(-1))",
         "no cross entropy of a known form"),
        ("loss = self.", "loss = 2 * self.", "no cross entropy of a known form"),
        ("(logits, labels, ", "(logits / 2, labels, ", "no cross entropy of a known form"),
        ("**kwargs)\n        return", "**kwargs)\n            loss += 1\n        return",
         "no cross entropy of a known form"),
        ("**kwargs)\n        return", "**weight)\n        return", "gives its loss_function other"),
        ("hidden = ", "kwargs.pop('num_items_in_batch', 0)\n        hidden = ", "gives its loss_f"),
        ("weight=None", "weight=None, ignore_index=7", "gives its loss_function other arguments"),
        ("loss = None", "logits[..., 0] = 0.0\n        loss = None", "has `logits[..., 0] = 0.0`"),
        ("loss = None", "logits += 1 + hidden.mean()\n        loss = None", "has `logits += 1"),
        ("loss = None", "labels = labels.clip(9)\n        loss = None", "has `labels = labels.cl"),
        ("loss = None", "kept = [logits]\n        loss = None", "has `kept = [logits]`"),
        ("logits = ", "for _ in '12':\n            logits = ", "has `for _ in '12': logits = "),
        ("return ", "if weight is None:\n            loss = 2 * loss\n        return ",
         "has `if weight is None: loss = 2 * loss`"),
        ("return Caus", "loss = None\n        return Caus", "has `loss = None`"),
        ("logits=logits)", "logits=logits, hidden_states=(logits,))", "has `return "),
        ("return CausalLMOutputWithPast", "return dict", "has `return dict("),
        ("self.lm_head(hidden)", "self.lm_head(hidden) * 2", "as `self.lm_head(hidden) * 2`"),
        ("self.lm_head(hidden)", "nn.functional.linear(hidden, self.lm_head.weight)",
         "computes the logits as `nn.functional.linear("),
    ],
)  # fmt: skip
def test_the_code_of_a_model_of_ones_own(line, other, why, tmp_path, monkeypatch):
    assert OWN.count(line) == 1
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(OWN.replace(line, other))
    monkeypatch.syspath_prepend(tmp_path)
    model = make("LlamaForCausalLM")
    model.__class__ = importlib.import_module(name).Own
    if why is not None:
        model.to(torch.float64 if "fp64" in why else torch.float32)
        with pytest.warns(UserWarning, match=f"left loss of Own: .*{re.escape(why)}"):
            deepfast.patch(model, norms=False)
        return
    inputs = batch()
    want = results(model, inputs)
    assert deepfast.patch(model).replaced["loss of Own"] == 1
    assert_same(results(model, inputs), want)


def test_a_loss_that_changes_after_patch_is_the_models_own():
    """A router's loss by an argument and by the config, another loss function, another layer."""
    model, inputs = make("Qwen3MoeForCausalLM", tie_word_embeddings=False), batch()
    plain = copy.deepcopy(model)
    deepfast.patch(model, norms=False)
    router = inputs | {"output_router_logits": True}
    assert_same(results(model, router), results(plain, router), 0)
    assert results(model, router)["loss"] > results(plain, inputs)["loss"] + 1e-4
    for change in (own_loss, lambda m: setattr(m.config, "output_router_logits", True)):
        found = [copy.deepcopy(m) for m in (model, plain)]
        for m in found:
            change(m)
        assert_same(results(found[0], inputs), results(found[1], inputs), 0)
    for m in (model, plain):
        m.lm_head = nn.Linear(D, VOCAB).requires_grad_(False)
        nn.init.ones_(m.lm_head.bias)
        nn.init.eye_(m.lm_head.weight)
    with pytest.warns(UserWarning, match="lm_head was replaced after patch"):
        assert_same(results(model, inputs), results(plain, inputs), 0)


def test_a_hook_that_changes_the_loss_is_an_error():
    model, inputs = make("LlamaForCausalLM"), batch()
    deepfast.patch(model)
    hook(model)
    with pytest.raises(RuntimeError, match="did not return the result of its output layer lm_head"):
        model(**inputs)
    assert model(inputs["input_ids"]).logits.shape == (2, 9, 50)
