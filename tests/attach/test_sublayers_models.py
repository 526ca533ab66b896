"""A read for each sublayer in known models, against the literal loop over their sublayers."""

import copy

import pytest
import torch
from torch import nn

import deepfast
from deepfast.attach.passes import NAME
from tests.attach.models import (
    CASES,
    SEQ2SEQ,
    TRANSFORMERS,
    Case,
    InPlace,
    _hf,
    _numbers,
    assert_same,
    fresh,
    gradients,
    ids,
    literal_of,
    outcome,
    perturbed,
)
from tests.specifications.attention_residuals import full

pytest.importorskip("transformers")
if TRANSFORMERS < 5:
    pytest.skip("the literal layers are those of transformers 5", allow_module_level=True)


WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10}
CASES = {
    **{n: CASES[n] for n in ("torch pre-norm", "modernbert", "t5", "llama", "vit", "timm")},
    "whisper": Case(
        lambda: fresh("WhisperModel", **WHISPER).get_encoder(),
        "pre",
        (":layers",),
        lambda model: model(_numbers(model, 2, 8, 20)).last_hidden_state,
    ),
    "gpt2": _hf("GPT2LMHeadModel", "transformer:h", norm="pre"),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "gpt_neox:layers", norm="pre"),
    "neox, one by one": _hf(
        "GPTNeoXForCausalLM", "gpt_neox:layers", norm="pre", use_parallel_residual=False
    ),
    "gemma2": _hf("Gemma2ForCausalLM", "model:layers", norm="pre"),
    "qwen3": _hf("Qwen3ForCausalLM", "model:layers", norm="pre"),
}


# ---- what each sublayer adds, as a generator over reads, and what the layer returns besides ------


def llama(m, read, args, kwargs):
    yield m.self_attn(hidden_states=m.input_layernorm(read()), **kwargs)[0]
    yield m.mlp(m.post_attention_layernorm(read()))


def gemma2(m, read, args, kwargs):
    attended = m.self_attn(hidden_states=m.input_layernorm(read()), **kwargs)[0]
    yield m.post_attention_layernorm(attended)
    yield m.post_feedforward_layernorm(m.mlp(m.pre_feedforward_layernorm(read())))


def gpt2(m, read, args, kwargs):
    names = "cache", "attention_mask", "encoder_hidden_states"
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    kwargs.pop("encoder_hidden_states", None), kwargs.pop("encoder_attention_mask", None)
    yield m.attn(m.ln_1(read()), **kwargs)[0]
    yield m.mlp(m.ln_2(read()))


def gpt_neox(m, read, args, kwargs):
    x = read()
    attended = m.post_attention_dropout(m.attention(m.input_layernorm(x), *args, **kwargs)[0])
    if m.use_parallel_residual:
        yield m.post_mlp_dropout(m.mlp(m.post_attention_layernorm(x))) + attended
        return
    yield attended
    yield m.post_mlp_dropout(m.mlp(m.post_attention_layernorm(read())))


def modernbert(m, read, args, kwargs):
    yield m.attn(m.attn_norm(read()), **kwargs)[0]
    yield m.mlp(m.mlp_norm(read()))


def vit(m, read, args, kwargs):
    yield m.dropout(m.attention(m.layernorm_before(read()), *args, **kwargs)[0])
    yield m.dropout(m.mlp(m.layernorm_after(read())))


def whisper(m, read, args, kwargs):
    def dropped(x, p=m.dropout):
        return nn.functional.dropout(x, p, m.training)

    names = dict(zip(("attention_mask",), args, strict=False)) | kwargs
    yield dropped(m.self_attn(hidden_states=m.self_attn_layer_norm(read()), **names)[0])
    h = dropped(m.activation_fn(m.fc1(m.final_layer_norm(read()))), m.activation_dropout)
    yield dropped(m.fc2(h))


def timm(m, read, args, kwargs):
    yield m.drop_path1(m.ls1(m.attn(m.norm1(read()), **kwargs)))
    yield m.drop_path2(m.ls2(m.mlp(m.norm2(read()))))


def torch_layer(m, read, args, kwargs):
    yield m._sa_block(m.norm1(read()), kwargs.get("src_mask"), kwargs.get("src_key_padding_mask"))
    yield m._ff_block(m.norm2(read()))


def t5(m, read, args, kwargs):
    names = (
        "attention_mask", "position_bias", "encoder_hidden_states", "encoder_attention_mask",
        "encoder_decoder_position_bias",
    )  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    first, cross = m.layer[0], None
    found = first.SelfAttention(
        first.layer_norm(read()), mask=given["attention_mask"],
        position_bias=given["position_bias"], cache=given.get("cache"),
    )  # fmt: skip
    yield first.dropout(found[0])
    if m.is_decoder:
        second = m.layer[1]
        cross = second.EncDecAttention(
            second.layer_norm(read()), mask=given["encoder_attention_mask"],
            key_value_states=given["encoder_hidden_states"],
            position_bias=given["encoder_decoder_position_bias"], cache=given.get("cache"),
        )  # fmt: skip
        yield second.dropout(cross[0])
    last = m.layer[-1]
    yield last.dropout(last.DenseReluDense(last.layer_norm(read())))
    return found[1], cross and cross[1]


PARTS = {
    "LlamaDecoderLayer": llama, "Qwen3DecoderLayer": llama, "Gemma2DecoderLayer": gemma2,
    "GPT2Block": gpt2, "GPTNeoXLayer": gpt_neox, "ModernBertEncoderLayer": modernbert,
    "ViTLayer": vit, "WhisperEncoderLayer": whisper,
    "Block": timm, "TransformerEncoderLayer": torch_layer, "T5Block": t5,
}  # fmt: skip


class Literal(InPlace):
    """x_r = sum_j softmax_j(q_r . RMSNorm(v_j)) v_j for each sublayer."""

    def read(self):
        c = self.connection[0]
        row = len(self.states) - 1
        x = full(self.states, c.query, row, c.eps)
        if hasattr(c, "gamma"):
            x = sum(self.states) + c.gamma[row] * x
        return x.to(self.states[0].dtype)

    def forward(self, x, *args, **kwargs):
        if self.k == 0:
            self.states[:] = [x]
        parts, rest = PARTS[type(self.inner).__name__](self.inner, self.read, args, kwargs), None
        while True:
            try:
                self.states.append(next(parts))
            except StopIteration as end:
                rest = end.value
                break
        # Between layers nobody reads what they pass on.
        x = self.read() if len(self.states) == self.connection[0].rows else x
        return x if rest is None else (x, *rest)


def connect(case, model, **options):
    case.connect(model, "attnres", sublayers="auto", **options)
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


@pytest.mark.parametrize("options", [{}, {"additive": "gated"}])
def test_same_as_the_literal_loop(case, options):
    """Also with dropout: the same draws in the same order."""
    plain = perturbed(case.make()).double()
    model = connect(case, copy.deepcopy(plain), **options).double()
    named, own, outputs = (
        literal_of(case, plain, model, Literal),
        dict(model.named_parameters()),
        [],
    )
    for prepare in (lambda model: model, drop):
        found = []
        for run, parameters in ((plain, named), (model, own)):
            for p in parameters.values():
                p.grad = None
            torch.manual_seed(5)
            found.append(outcome(case, prepare(run), parameters))
        torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-11)
        outputs.append(found[1]["output"])
    assert not torch.allclose(*outputs)


def test_a_gated_model_begins_as_the_plain_one(case):
    """Not one bit of the output changes."""
    model = perturbed(case.make())
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
    """No further from the literal loop in float64 than that loop in bfloat16, nearly."""
    plain = perturbed(case.make())
    model = connect(case, copy.deepcopy(plain))
    literal_of(case, plain, model, Literal)
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
def test_together_with_patch(case, first):
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


@pytest.mark.parametrize(("name", "target"), [("llama", "q_proj"), ("gpt2", "c_attn"), ("t5", "q")])
def test_lora(name, target):
    peft = pytest.importorskip("peft")
    case = CASES[name]
    model = connect(case, perturbed(case.make())).eval()
    wanted = case.run(model)
    config = peft.LoraConfig(r=2, target_modules=[target], modules_to_save=["depth_connection"])
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(case.run(tuned), wanted)
    case.run(tuned).square().mean().backward()
    learning = {n for n, p in tuned.named_parameters() if p.requires_grad}
    assert any("depth_connection" in n for n in learning)
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


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
