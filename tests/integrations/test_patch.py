"""deepfast.patch: a model computes the same by our ops, and again by its own after remove()."""

import copy
import importlib
import itertools
import pickle
import re

import pytest
import torch
from torch import nn

import deepfast
from deepfast.integrations.patch import Swapped
from tests.attach.models import assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LMS = [
    *(f"{name}ForCausalLM" for name in (
        "DeepseekV3", "Gemma", "Gemma2", "Glm", "GPTNeoX", "Llama", "Ministral", "Mistral", "Olmo",
        "Olmo2", "Olmo3", "OPT", "Phi", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3",
        "Starcoder2",
    )),
    *(f"{name}ForMaskedLM" for name in (
        "Bert", "Camembert", "DebertaV2", "Electra", "ModernBert", "Roberta", "XLMRoberta",
    )),
    "GPT2LMHeadModel",
]  # fmt: skip
LEFT = ("GemmaRMSNorm", "Gemma2RMSNorm", "OlmoLayerNorm")


def swapped(model):
    return [type(m).__name__ for m in model.modules() if isinstance(m, Swapped)]


# torch's own RMSNorm has no one dtype for a weight of another one.
@pytest.mark.only_if(
    lambda kind, affine, x_dtype, dtype: kind is nn.LayerNorm or not affine or x_dtype == dtype
)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("x_dtype", "dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LayerNorm, {"eps": 1e-3}), (nn.LayerNorm, {"bias": False}),
     (nn.RMSNorm, {}), (nn.RMSNorm, {"eps": 1e-3})],
)  # fmt: skip
def test_norms_of_torch(kind, options, affine, x_dtype, dtype):
    norm = kind(24, elementwise_affine=affine, **options)
    for p in norm.parameters():
        nn.init.normal_(p)
    norm.to(dtype)
    x = torch.randn(3, 5, 24).to(x_dtype).requires_grad_()

    def run():
        out = norm(x)
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *norm.parameters()])]

    want = run()
    handle = deepfast.patch(norm)
    assert isinstance(norm, Swapped)
    got = run()
    handle.remove()
    assert type(norm) is kind
    tolerance = {} if x_dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("name", ["Llama", "Mamba", "Mistral", "Olmo2", "Qwen3", "T5"])
def test_norms_of_transformers(name):
    """Also in 16 bits, and with fp32 weights on 16-bit states."""
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    kind = getattr(module, f"{name}LayerNorm" if name == "T5" else f"{name}RMSNorm")
    for x_dtype, dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        norm = kind(24, eps=1e-3)
        nn.init.normal_(norm.weight)
        norm.to(dtype)
        x = torch.randn(5, 24).to(x_dtype)
        want = norm(x)
        assert deepfast.patch(norm).replaced == {kind.__name__: 1}
        got = norm(x)
        exact = x_dtype == dtype == torch.float32
        assert got.dtype == want.dtype, (x_dtype, dtype)
        torch.testing.assert_close(got, want, **({} if exact else {"rtol": 0.02, "atol": 0.02}))


@pytest.mark.filterwarnings("ignore:deepfast.patch left")
@pytest.mark.parametrize("name", [*LMS, "MambaForCausalLM", "T5ForConditionalGeneration"])
def test_training_is_the_same(name, capsys):
    model, inputs = make(name), batch(padded=True)
    want, parameters = results(model, inputs), dict(model.named_parameters())
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    handle = deepfast.patch(model)
    assert capsys.readouterr().out == ""
    norms = {n for n in map(type, model.modules()) if "Norm" in n.__name__}
    assert {n.__name__ for n in norms} <= {*handle.replaced, *LEFT}
    assert handle.left.keys() <= {*LEFT}
    assert_same(results(model, inputs), want)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert [type(m) for m in model.modules()] == kinds
    assert not swapped(model)
    assert_same(results(model, inputs), want, 0)


def test_copies_pickles_saves_and_patches_once(tmp_path):
    model, inputs = make("BertForMaskedLM"), batch()
    handle = deepfast.patch(model)
    assert repr(handle) == f"Patch(replaced={handle.replaced}, left={{}})"
    want, names = results(model, inputs), swapped(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert swapped(twin) == names
        assert_same(results(twin, inputs), want)
    with pytest.warns(UserWarning, match="BertForMaskedLM: it has nothing to replace"):
        again = deepfast.patch(model)
    assert not again.replaced
    model.save_pretrained(tmp_path)
    plain = type(make("BertForMaskedLM")).from_pretrained(tmp_path).train()
    assert_same(results(plain, inputs), want)


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


class MyRMSNorm(nn.Module):
    """Llama's, with what subclasses change."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(6)), eps

    def forward(self, x):
        n = x.float()
        n = n * (n.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * n.to(x.dtype)


def root_mean_square(norm, x, *dims):
    return x * (x.pow(2).mean(dims, keepdim=True) + norm.eps).rsqrt()


def by_halves(norm, x):
    first = x.unflatten(-1, (3, 2))[..., :1].expand(*x.shape[:-1], 3, 2).flatten(-2)
    return MyRMSNorm.forward(norm, first)


def channels_first(norm, x):
    """Of images."""
    return norm.weight.view(1, -1, *[1] * (x.dim() - 2)) * root_mean_square(norm, x, 1)


def takes_matrices(norm, x):
    assert x.dim() == 2
    return MyRMSNorm.forward(norm, x)


def gated(norm, x, gate=None):
    return MyRMSNorm.forward(norm, x if gate is None else x * gate)


def scaled(norm, x):
    return MyRMSNorm.forward(norm, x) * norm.scale


FORMULAS = {
    "Offset": lambda norm, x: MyRMSNorm.forward(norm, x) * (1 + 1 / norm.weight),
    "OtherEps": lambda norm, x: (
        norm.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + norm.eps)
    ),
    "ByHalves": by_halves,
    # In bf16 the result has the dtype of no family.
    "Rounded": lambda norm, x: MyRMSNorm.forward(norm, x).half(),
    # Over all dimensions but the first.
    "Sequence": lambda norm, x: norm.weight * root_mean_square(norm, x, *range(1, x.dim())),
    "Channel": channels_first,
    "Limited": lambda norm, x: MyRMSNorm.forward(norm, x.clamp(-9, 9)),
    "Failing": takes_matrices,
}
PARTS = {
    "Gated": (gated, lambda norm: None),
    "Biased": (MyRMSNorm.forward, lambda norm: norm.register_parameter(
        "bias", nn.Parameter(torch.zeros(6))
    )),
    "Buffer": (scaled, lambda norm: norm.register_buffer("scale", torch.ones(6))),
    "Scalar": (MyRMSNorm.forward, lambda norm: norm.register_parameter(
        "weight", nn.Parameter(torch.ones(1))
    )),
    "NoWeight": (MyRMSNorm.forward, lambda norm: norm.register_parameter("weight", None)),
    "NoEps": (lambda norm, x: norm.weight * x, lambda norm: setattr(norm, "eps", None)),
}  # fmt: skip
UNKNOWN = "its formula is not known"
OTHER = "it has not one argument, one weight (D,) and one eps"


def variant(name):
    """A norm of a class of its own, and why it is left."""
    forward, change = PARTS.get(name) or (FORMULAS[name], lambda norm: None)
    norm = type(f"{name}RMSNorm", (MyRMSNorm,), {"forward": forward})()
    change(norm)
    return norm, UNKNOWN if name in FORMULAS else OTHER


@pytest.mark.parametrize("name", [*FORMULAS, *PARTS])
def test_a_norm_is_asked_what_it_computes(name):
    """Its weights are at their start, where many formulas agree. Nothing of it changes."""
    norm, why = variant(name)
    random, norms = torch.get_rng_state(), nn.Sequential(MyRMSNorm(), norm)
    before = [(p, p.clone()) for p in norms.parameters()]
    with pytest.warns(UserWarning, match=re.escape(why)):
        handle = deepfast.patch(norms)
    assert (handle.replaced, handle.left) == ({"MyRMSNorm": 1}, {type(norm).__name__: why})
    for p, (same, value) in zip(norms.parameters(), before, strict=True):
        assert p is same
        assert torch.equal(p, value)
    assert torch.equal(torch.get_rng_state(), random)


def test_defaults_of_torch_change_no_answer():
    found = {}
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        norms = nn.ModuleList([MyRMSNorm()])
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                deepfast.patch(norms)
        finally:
            torch.set_default_dtype(torch.float32)
        found[device] = type(norms[0]).formula
    assert found["cpu"] is found["meta"]


@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(6), MyRMSNorm])
def test_a_model_without_its_weights_is_refused(kind):
    """And none of its norms changes."""
    norms = nn.Sequential(kind(), kind().to("meta"))
    with pytest.raises(ValueError, match="before sharding; got a Parameter on meta in"):
        deepfast.patch(norms)
    assert not swapped(norms)


def test_what_is_left_is_named():
    """In one warning."""

    own = nn.LayerNorm(3)
    own.forward = lambda x: x
    model = nn.Sequential(variant("NoEps")[0], nn.LayerNorm((2, 3)), nn.LayerNorm(3))
    with pytest.warns(UserWarning, match="deepfast.patch left") as found:
        handle = deepfast.patch(model)
    assert handle.replaced == {"LayerNorm": 1}
    assert handle.left == {
        "NoEpsRMSNorm": OTHER,
        "LayerNorm": "it normalizes over more than one dimension",
    }
    assert [str(w.message) for w in found] == [
        f"deepfast.patch left NoEpsRMSNorm: {OTHER}; LayerNorm: it normalizes over more than one "
        "dimension"
    ]
    with pytest.warns(UserWarning, match="LayerNorm: its forward is not that of its class"):
        deepfast.patch(own)
    with pytest.warns(UserWarning, match="Linear: it has nothing to replace"):
        deepfast.patch(nn.Linear(2, 2))


def test_refuses():
    with pytest.raises(TypeError, match="model must be a module, got str"):
        deepfast.patch("bert")
    for norm, op in ((nn.LayerNorm(3), "layer_norm"), (nn.RMSNorm(3), "rms_norm")):
        deepfast.patch(norm)
        with pytest.raises(TypeError, match=f"^{op}: x must be a tensor, got NoneType"):
            norm(None)
