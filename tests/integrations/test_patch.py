"""deepfast.patch: a model computes the same by our ops, and again by its own after remove()."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn

import deepfast
from deepfast.integrations import losses, norms
from deepfast.integrations.swap import Swapped
from tests.integrations.hf_models import assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LMS = sorted(losses.KNOWN)


def swapped(model):
    return [type(m).__name__ for m in model.modules() if isinstance(m, Swapped)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2,
                                    (torch.bfloat16, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("kind", ["layer", "unbiased", "rms", "rms_eps"])
def test_norms_of_torch(kind, affine, dtypes):
    options = {"elementwise_affine": affine}
    norm = {
        "layer": lambda: nn.LayerNorm(24, eps=1e-3, **options),
        "unbiased": lambda: nn.LayerNorm(24, bias=False, **options),
        "rms": lambda: nn.RMSNorm(24, **options),
        "rms_eps": lambda: nn.RMSNorm(24, eps=1e-3, **options),
    }[kind]()
    for p in norm.parameters():
        nn.init.normal_(p)
    norm.to(dtypes[1])
    x = torch.randn(3, 5, 24).to(dtypes[0]).requires_grad_()
    if "rms" in kind and affine and dtypes[0] != dtypes[1]:
        pytest.skip("torch's own RMSNorm has no one dtype for these")
    leaves, found = [x, *norm.parameters()], []
    handle = None
    for _ in range(2):
        out = norm(x)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        handle = handle or deepfast.patch(norm, loss=False)
        assert isinstance(norm, Swapped)
    handle.remove()
    assert type(norm) in (nn.LayerNorm, nn.RMSNorm)
    tolerance = {} if dtypes[0] == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_each_known_norm_of_transformers_has_its_formula():
    """Also in 16 bits, and with fp32 weights on 16-bit states."""
    pytest.importorskip("transformers")
    from transformers import models

    checked = 0
    for (package, name), own in norms.KNOWN.items():
        folder = {"T5LayerNorm": "t5", "LlamaRMSNorm": "llama", "Olmo2RMSNorm": "olmo2",
                  "Qwen3RMSNorm": "qwen3", "MistralRMSNorm": "mistral"}.get(name)  # fmt: skip
        if package != "transformers" or folder is None:
            continue
        kind = getattr(getattr(getattr(models, folder), f"modeling_{folder}"), name)
        for x_dtype, dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
            norm = kind(24, eps=1e-3)
            nn.init.normal_(norm.weight)
            norm.to(dtype)
            x = torch.randn(5, 24).to(x_dtype)
            want = norm(x)
            deepfast.patch(norm, loss=False)
            got = norm(x)
            assert isinstance(norm, own)
            exact = x_dtype == dtype == torch.float32
            assert got.dtype == want.dtype, (name, x_dtype, dtype)
            torch.testing.assert_close(got, want, **({} if exact else {"rtol": 0.02, "atol": 0.02}))
        checked += 1
    assert checked == 5


@pytest.mark.parametrize("name", [*LMS, "T5ForConditionalGeneration"])
def test_training_is_the_same(name, capsys):
    model, inputs = make(name), batch(padded=True)
    want, parameters = results(model, inputs), dict(model.named_parameters())
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    handle = deepfast.patch(model)
    printed = capsys.readouterr().out
    assert printed.startswith(f"deepfast.patch({name})\n")
    assert ("norms: " in printed) == (name not in ("GemmaForCausalLM", "OlmoForCausalLM"))
    assert (f"loss: {name}, in training" in printed) == (name in LMS)
    assert_same(results(model, inputs), want)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == keys
    if name in LMS:
        out = model(**inputs)
        assert out.logits is None
        assert "logits" not in out
        assert torch.equal(model(**inputs, return_dict=False)[0], out.loss)
        assert inspect.signature(model.forward) == inspect.signature(
            kinds[0].forward.__get__(model)
        )
    handle.remove()
    handle.remove()
    assert [type(m) for m in model.modules()] == kinds
    assert not swapped(model)
    assert all(torch.equal(a, b) for a, b in zip(results(model, inputs).values(), want.values(),
                                                 strict=True))  # fmt: skip


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "ModernBertForMaskedLM"])
def test_arguments_of_the_loss(name):
    """The sum over a given number of items, as Hugging Face's Trainer asks for."""
    model, inputs = make(name), batch()
    if "kwargs" not in inspect.signature(model.forward).parameters:
        pytest.skip("this version of the model takes no arguments for its loss")
    calls = [
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": 7},
        {"labels": inputs["labels"].clamp(min=1), "ignore_index": 1},
    ]
    if name == "LlamaForCausalLM":
        calls.append({"shift_labels": inputs["labels"].roll(2, 1)})
    else:
        calls = [c for c in calls if "ignore_index" not in c]
    want = [results(model, inputs | call) for call in calls]
    deepfast.patch(model)
    for call, w in zip(calls, want, strict=True):
        assert_same(results(model, inputs | call), w)


def test_evaluation_and_calls_without_labels_are_as_before():
    model, inputs = make("LlamaForCausalLM"), batch()
    deepfast.patch(model, norms=False)
    plain = make("LlamaForCausalLM")
    plain.load_state_dict(model.state_dict())
    for module in (model, plain):
        module.eval()
    for call in (inputs, {"input_ids": inputs["input_ids"]}):
        got, want = model(**call), plain(**call)
        assert torch.equal(got.logits, want.logits)
        assert got.loss is want.loss is None or torch.equal(got.loss, want.loss)
    model.train()
    assert torch.equal(model(inputs["input_ids"]).logits, want.logits)
    where = list(inspect.signature(model.forward).parameters).index("labels")
    positional = [inputs["input_ids"], *(None,) * (where - 1), inputs["labels"]]
    assert torch.equal(model(*positional).logits, want.logits)
    assert torch.equal(
        model.eval().generate(inputs["input_ids"], max_new_tokens=5, do_sample=False),
        plain.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False),
    )


def test_copies_pickles_saves_and_patches_once(tmp_path, capsys):
    model, inputs = make("BertForMaskedLM"), batch()
    deepfast.patch(model)
    want, names = results(model, inputs), swapped(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert swapped(twin) == names
        assert_same(results(twin, inputs), want)
    capsys.readouterr()
    again = deepfast.patch(model)
    assert "norms" not in capsys.readouterr().out
    assert len(again) == 0
    model.save_pretrained(tmp_path)
    plain = type(make("BertForMaskedLM")).from_pretrained(tmp_path).train()
    assert_same(results(plain, inputs), want)


def test_two_models_and_an_error_in_forward():
    """An exception leaves no target behind."""
    model, inputs = make("LlamaForCausalLM"), batch()
    want = results(model, inputs)
    deepfast.patch(model)
    with pytest.raises(ValueError, match=r"linear_cross_entropy: target must be in \[0, 50\)"):
        model(**inputs | {"labels": inputs["labels"].clamp(min=60)})
    assert model(inputs["input_ids"]).logits.shape == (2, 9, 50)
    assert_same(results(model, inputs), want)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_autocast_checkpointing_and_compilation(name):
    model, inputs = make(name), batch(padded=True)
    twin = copy.deepcopy(model)
    deepfast.patch(model)
    want = results(twin, inputs)
    assert_same(results(torch.compile(model, backend="eager"), inputs), {
        f"_orig_mod.{n}" if n != "loss" else n: w for n, w in want.items()
    })  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(results(model, inputs), want)
    with torch.autocast("cpu", torch.bfloat16):
        # Two ways to round to 8 bits.
        torch.testing.assert_close(model(**inputs).loss, twin(**inputs).loss, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("first", ["connect", "patch"])
def test_with_a_depth_connection(first):
    """In either order; the connection's own norms are the engine's."""
    model, inputs = make("BertForMaskedLM"), batch(padded=True)
    connection = deepfast.connect(model.bert.encoder, norm="post", init="one")
    nn.init.normal_(connection.weight)
    want = results(model, inputs)
    if first == "patch":
        settings = connection.state_dict()
        deepfast.disconnect(model.bert.encoder)
        deepfast.patch(model)
        deepfast.connect(model.bert.encoder, norm="post").load_state_dict(settings)
    else:
        deepfast.patch(model)
    assert_same(results(model, inputs), want)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_trainer(name, tmp_path):
    """With accumulation over batches that have different numbers of targets."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    examples = [{n: x[0] for n, x in batch(padded=True).items()} for _ in range(8)]
    options = {
        "output_dir": str(tmp_path), "max_steps": 3, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    model, found = make(name), []
    for patch in (False, True):
        twin = copy.deepcopy(model)
        if patch:
            deepfast.patch(twin)
        trainer = transformers.Trainer(
            twin, transformers.TrainingArguments(**options), train_dataset=examples
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append([torch.tensor(losses), *twin.parameters()])
    assert len(found[0][0]) == 3
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_is_left_is_named(capsys):
    class MyRMSNorm(nn.Module):
        pass

    model = nn.Sequential(MyRMSNorm(), nn.LayerNorm((2, 3)), nn.LayerNorm(3), nn.BatchNorm1d(3))
    deepfast.patch(model)
    assert capsys.readouterr().out.splitlines() == [
        "deepfast.patch(Sequential)",
        "  norms: 1 LayerNorm",
        "  left: 1 MyRMSNorm, whose formula is not known",
        "  left: 1 LayerNorm, whose formula is not known",
        "  left: the loss; the model is none of those whose loss deepfast replaces",
    ]


def test_a_loss_function_of_the_user_is_left(capsys):
    model = make("LlamaForCausalLM")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    deepfast.patch(model, norms=False)
    assert "left: the loss of LlamaForCausalLM: its loss_function is its own" in (
        capsys.readouterr().out
    )
    sparse = make("ModernBertForMaskedLM", sparse_prediction=True)
    deepfast.patch(sparse, norms=False)
    assert "sparse_prediction computes few logits already" in capsys.readouterr().out


def test_refuses():
    with pytest.raises(TypeError, match="model must be a module, got str"):
        deepfast.patch("bert")
    with pytest.raises(ValueError, match="attention=True needs a model of transformers"):
        deepfast.patch(nn.LayerNorm(3), attention=True)
    for norm, op in ((nn.LayerNorm(3), "layer_norm"), (nn.RMSNorm(3), "rms_norm")):
        deepfast.patch(norm)
        with pytest.raises(TypeError, match=f"^{op}: x must be a tensor, got NoneType"):
            norm(None)
