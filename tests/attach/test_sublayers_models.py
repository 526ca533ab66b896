"""A read for each sublayer in known models, against the models without a connection."""

import copy

import pytest
import torch
from torch import nn

import deepfast
from deepfast.attach.passes import NAME
from tests.attach import models
from tests.attach.models import Case, _hf, assert_same, fresh, gradients, ids, perturbed

pytest.importorskip("transformers")
if models.TRANSFORMERS < 5:
    pytest.skip("the known layers are those of transformers 5", allow_module_level=True)

WHISPER = models.SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10}
CASES = {
    **{n: models.CASES[n] for n in ("torch pre-norm", "modernbert", "t5", "llama", "vit", "timm")},
    "whisper": Case(
        lambda: fresh("WhisperModel", **WHISPER).get_encoder(), "pre", (":layers",),
        lambda model: model(models._numbers(model, 2, 8, 20)).last_hidden_state,
    ),
    "gpt2": _hf("GPT2LMHeadModel", "transformer:h", norm="pre"),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "gpt_neox:layers", norm="pre"),
    "neox, one by one": _hf(
        "GPTNeoXForCausalLM", "gpt_neox:layers", norm="pre", use_parallel_residual=False
    ),
    "gemma2": _hf("Gemma2ForCausalLM", "model:layers", norm="pre"),
    "qwen3": _hf("Qwen3ForCausalLM", "model:layers", norm="pre"),
}  # fmt: skip


def connect(case, model, **options):
    """Post-norm models have DLCL."""
    if case.norm == "pre":
        options |= {"connection": "attnres", "sublayers": "auto"}
    case.connect(model, **options)
    for _, parent, _ in case.places(model):
        perturbed(parent._modules[NAME])
    return model


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def drop(model, p=0.1):
    """Gives every dropout of the model a probability."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for name in ("attention_dropout", "dropout_p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)
    return model


@pytest.mark.parametrize("options", [{"score_function": "relu"}, {"additive": "gated"}])
@pytest.mark.parametrize("name", CASES)
def test_the_start_has_the_gradients_of_the_plain_model(name, options):
    """The rows are then the residual stream: each state is what its sublayer adds, also with
    dropout, and each norm gets its row."""
    case, outputs = CASES[name], []
    plain = perturbed(case.make()).double()
    model = copy.deepcopy(plain)
    made = case.connect(model, "attnres", sublayers="auto", **options)
    assert {c.reads for c in made.values()} == {"gpt_neox": {1}, "t5": {2, 3}}.get(name, {2})
    for prepare in (lambda model: model, drop):
        found = []
        for run in (plain, model.double()):
            run.zero_grad()
            torch.manual_seed(5)
            found.append(models.outcome(case, prepare(run), dict(run.named_parameters())))
        new = {n: found[1].pop(n) for n in found[1].keys() - found[0].keys()}
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
        # Of each row; the queries' are zeros where the rows come to a gate of zero.
        of_rows = [grad.view(len(grad), -1) for n, grad in new.items() if "query" not in n]
        assert len(of_rows) == len(made)
        assert all(grad.any(1).all() for grad in of_rows)
        outputs.append(found[1]["output"])
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_model_begins_as_the_plain_one(case, dtype):
    """Not one bit of the output changes."""
    model = perturbed(case.make()).to(dtype)
    before = case.run(model)
    case.connect(model, "attnres", sublayers="auto", additive="gated")
    assert torch.equal(case.run(model), before)


TEXT = [name for name in CASES if name not in ("torch pre-norm", "vit", "timm", "whisper")]


@pytest.mark.parametrize("name", TEXT)
def test_padding(name):
    """What stands in a sentence's padding changes none of its words."""
    case, words = CASES[name], ids()
    model = connect(case, perturbed(case.make())).double().eval()
    mask = torch.ones_like(words)
    mask[0, -3:] = 0
    found = []
    for filler in (3, 4):
        given = {"input_ids": torch.where(mask.bool(), words, filler), "attention_mask": mask}
        given |= {"decoder_input_ids": ids(seed=2)} if name == "t5" else {}
        out = model(**given).logits
        found.append(out if name == "t5" else out[mask.bool()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in TEXT if n != "modernbert"])
def test_cached_tokens(name):
    case = CASES[name]
    model = connect(case, perturbed(case.make())).eval()
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    cached = model.generate(ids(), use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))


def test_bfloat16(case):
    """No further from the plain model in float64 than that model in bfloat16, nearly."""
    plain = perturbed(case.make())
    model = copy.deepcopy(plain)
    case.connect(model, "attnres", sublayers="auto", score_function="relu")
    exact = case.run(copy.deepcopy(plain).double())
    own, error = ((case.run(m.bfloat16()) - exact).norm() for m in (plain, model))
    assert error <= 1.5 * own


def compiled_layers(case, model):
    for layer in case.layers(model):
        layer.compile(backend="aot_eager")
    return case.run(model)


def compiled(case, model):
    """One graph."""
    return case.run(torch.compile(model, backend="aot_eager", fullgraph=True))


def checkpointed(case, model):
    return torch.utils.checkpoint.checkpoint(case.run, model, use_reentrant=False)


@pytest.mark.parametrize("form", ["layer", "layer+input", compiled_layers, compiled, checkpointed])
def test_forms_that_compute_the_same(case, form):
    torch._dynamo.reset()
    plain = perturbed(case.make())
    for module in plain.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    model = connect(case, copy.deepcopy(plain))
    out = case.run(model)
    wanted = gradients(model, out)
    if isinstance(form, str):
        model = connect(case, plain, recompute=form)
    got = case.run(model) if isinstance(form, str) else form(case, model)
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    tolerance = 1e-4 if form in (compiled, compiled_layers) else 1e-5
    assert_same(gradients(model, got), wanted, tolerance)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("torch pre-norm", "timm")])
def test_checkpointing_of_transformers(name):
    case = CASES[name]
    model = connect(case, perturbed(case.make()))
    wanted = gradients(model, case.run(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(gradients(model, case.run(model)), wanted)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradients(model, case.run(model))


@pytest.mark.parametrize("first", ["patch", "connect"])
@pytest.mark.parametrize("name", [*CASES, "bert"])
def test_together_with_patch(name, first):
    """The norms of a connection are the engine's."""
    case = (CASES | models.CASES)[name]
    plain = perturbed(case.make())
    model = connect(case, copy.deepcopy(plain))
    wanted = gradients(model, case.run(model))
    if first == "patch":
        model = plain
        deepfast.patch(model)
        connect(case, model)
    else:
        deepfast.patch(model)
    assert_same(gradients(model, case.run(model)), wanted, 1e-4)


@pytest.mark.parametrize("sublayers", ["auto", (("ln_1", "attn"), ("ln_2", "mlp"))])
def test_save_and_load(sublayers, tmp_path):
    """The config has the names of the sublayers."""
    case = CASES["gpt2"]
    plain = perturbed(case.make()).eval()
    plain.save_pretrained(tmp_path / "plain")
    cls = deepfast.connected(
        type(plain), "transformer", "h", norm="pre", connection="attnres", sublayers=sublayers,
        additive="gated",
    )  # fmt: skip
    model = cls.from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(case.run(model), case.run(plain))
    perturbed(model.transformer.depth_connection)
    model.save_pretrained(tmp_path / "connected")
    for again in (cls, deepfast.connected(type(plain))):
        loaded = again.from_pretrained(tmp_path / "connected").eval()
        assert torch.equal(case.run(loaded), case.run(model))
