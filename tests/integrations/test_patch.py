"""deepfast.patch: a model computes the same by our ops, and again by its own after remove()."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import deepfast
from deepfast.integrations.patch import Swapped
from tests.attach.models import READS, assert_same, batch, make, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MODELS = [
    "BertForMaskedLM", "Gemma2ForCausalLM", "LlamaForCausalLM", "MambaForCausalLM",
    "Olmo2ForCausalLM", "OlmoForCausalLM", "OPTForCausalLM", "T5ForConditionalGeneration",
]  # fmt: skip
LEFT = {"Gemma2RMSNorm", "OlmoLayerNorm"}


def swapped(model):
    return [type(m).__name__ for m in model.modules() if isinstance(m, Swapped)]


@pytest.mark.parametrize(("kind", "options"), [
    (nn.LayerNorm, {"eps": 1e-3}), (nn.LayerNorm, {"bias": False}),
    (nn.LayerNorm, {"elementwise_affine": False}), (nn.RMSNorm, {}), (nn.RMSNorm, {"eps": 1e-3}),
    (nn.RMSNorm, {"elementwise_affine": False}),
])  # fmt: skip
def test_norms_of_torch(kind, options):
    """Values and gradients on states so small that eps counts, and the class after remove(). A norm
    of another package is compared when it is patched."""
    norm, x = kind(24, **options), (1e-3 * torch.randn(2, 5, 24)).requires_grad_()
    for p in norm.parameters():
        nn.init.normal_(p)

    def run():
        out = norm(x)
        grads = torch.autograd.grad(out.sin().sum(), [x, *norm.parameters()])
        return [out, *grads, norm(x.bfloat16()).dtype if kind is nn.LayerNorm else None]

    want, handle = run(), deepfast.patch(norm)
    assert handle.replaced == {kind.__name__: 1}
    *got, dtype = run()
    # The gradient of a small state is a large number, in which most cancels.
    torch.testing.assert_close(got, want[:-1], rtol=1e-3, atol=1e-4)
    assert dtype == want[-1]
    handle.remove()
    assert type(norm) is kind


@pytest.mark.filterwarnings("ignore:deepfast.patch left")
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same(name):
    model, inputs = make(name), batch(padded=True)
    want, parameters = results(model, inputs), dict(model.named_parameters())
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    handle = deepfast.patch(model)
    norms = {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}
    assert norms <= handle.replaced.keys() | LEFT
    assert handle.left.keys() <= LEFT
    assert_same(results(model, inputs), want)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert [type(m) for m in model.modules()] == kinds
    assert_same(results(model, inputs), want, 0)


def test_together_with_connect():
    """In both orders. The norms of a connection are the engine's."""
    model, inputs = make("LlamaForCausalLM"), batch()
    deepfast.connect(model.model, norm="pre", **READS)
    want = results(model, inputs)
    assert deepfast.patch(model).replaced == {"LlamaRMSNorm": 7}
    assert_same(results(model, inputs), want, 1e-4)
    deepfast.disconnect(model.model)
    deepfast.connect(model.model, norm="pre", **READS)
    assert_same(results(model, inputs), want, 1e-4)


def test_copies_pickles_saves_and_patches_once(tmp_path):
    model, inputs = make("BertForMaskedLM"), batch()
    deepfast.patch(model)
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


@pytest.mark.slow
def test_autocast_checkpointing_and_compilation():
    model, inputs = make("LlamaForCausalLM"), batch(padded=True)
    twin = copy.deepcopy(model)
    deepfast.patch(model)
    want = results(twin, inputs)
    compiled = results(torch.compile(model, backend="eager"), inputs)
    assert_same({n.removeprefix("_orig_mod."): x for n, x in compiled.items()}, want)
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


def over(norm, x, *dims):
    return x * (x.pow(2).mean(dims, keepdim=True) + norm.eps).rsqrt()


def channels_first(norm, x):
    """Of images."""
    return norm.weight.view(1, -1, *[1] * (x.dim() - 2)) * over(norm, x, 1)


def gated(norm, x, gate=None):
    return plain(norm, x if gate is None else x * gate)


def other_eps(norm, x):
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + norm.eps)


UNKNOWN = "its formula is not known"
OTHER = "it has not one argument, one weight (D,) and one eps"
plain = MyRMSNorm.forward
VARIANTS = {
    "Offset": (lambda norm, x: plain(norm, x) * (1 + 1 / norm.weight), {}),
    "OtherEps": (other_eps, {}),
    # In bf16 the result has the dtype of no family.
    "Rounded": (lambda norm, x: plain(norm, x).half(), {}),
    # Over all dimensions but the first.
    "Sequence": (lambda norm, x: norm.weight * over(norm, x, *range(1, x.dim())), {}),
    "Channel": (channels_first, {}),
    "Limited": (lambda norm, x: plain(norm, x.clamp(-9, 9)), {}),
    "Failing": (lambda norm, x: norm.weight @ x, {}),
    "Gated": (gated, {"eps": 1e-6}),
    "Biased": (plain, {"bias": nn.Parameter(torch.ones(6))}),
    "Buffer": (plain, {"scale": nn.Buffer(torch.ones(6))}),
    "Scalar": (plain, {"weight": nn.Parameter(torch.ones(1))}),
    "NoWeight": (plain, {"weight": None}),
    "NoEps": (lambda norm, x: norm.weight * x, {"eps": None}),
}
"""The forward of a norm of another class, and other parts than a weight and an eps."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_norm_is_asked_what_it_computes(name):
    """Its weights are at their start, where many formulas agree. Nothing of it changes."""
    forward, parts = VARIANTS[name]
    norm, why = type(f"{name}RMSNorm", (MyRMSNorm,), {"forward": forward})(), UNKNOWN
    for part, value in parts.items():
        setattr(norm, part, value)
        why = OTHER
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
    norm, other = MyRMSNorm(), MyRMSNorm()
    deepfast.patch(norm)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            deepfast.patch(other)
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(other) is type(norm)


def test_what_is_left_is_named():
    """In one warning."""
    own = nn.LayerNorm(3)
    own.forward = lambda x: x
    wide = "it normalizes over more than one dimension"
    with pytest.warns(UserWarning, match=f"^deepfast.patch left LayerNorm: {wide}$") as found:
        handle = deepfast.patch(nn.Sequential(nn.LayerNorm((2, 3)), nn.LayerNorm(3)))
    assert len(found) == 1
    assert (handle.replaced, handle.left) == ({"LayerNorm": 1}, {"LayerNorm": wide})
    for model, words in (
        (own, "LayerNorm: its forward is not that of its class"),
        (nn.Linear(2, 2), "Linear: it has nothing to replace"),
    ):
        with pytest.warns(UserWarning, match=words):
            deepfast.patch(model)


@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(6), MyRMSNorm])
def test_a_model_without_its_weights_is_refused(kind):
    """And none of its norms changes."""
    norms = nn.Sequential(kind(), kind().to("meta"))
    with pytest.raises(ValueError, match="before sharding; got a Parameter on meta in"):
        deepfast.patch(norms)
    assert not swapped(norms)


def test_a_call_without_a_tensor_is_refused():
    for norm, op in ((nn.LayerNorm(3), "layer_norm"), (nn.RMSNorm(3), "rms_norm")):
        deepfast.patch(norm)
        with pytest.raises(TypeError, match=f"^{op}: x must be a tensor, got NoneType"):
            norm(None)
