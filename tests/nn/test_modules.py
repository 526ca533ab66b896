"""What holds for every public module: where its parameters are made, their reset, and what it
refuses, each with one sentence that names a remedy.

One table has the modules with the options that matter for their parameters.
"""

import functools
import inspect
import math

import pytest
import torch

import deepfast
from deepfast import nn, ops
from deepfast.connections import CONNECTIONS
from deepfast.nn import DLCL, DepthHistory, LatentDepth, LayerFusion, Packing
from deepfast.nn.connections.fusion import FUSIONS

SIZES = {"num_states": 3, "encoder_layers": 2, "decoder_layers": 2, "num_layers": 3}
SIZES |= {"dim": 8, "num_heads": 2, "ffn_dim": 12}
MODULES = {
    "AttentionResiduals": [{}, {"score_function": "relu", "norm_affine": True}],
    "DLCL": [
        {}, {"norm_type": "rms", "weight_type": "vector", "softmax": True},
        {"norm": "post", "weight_type": "vector", "init": "one", "window": 2},
        {"norm": None, "init": "identity", "dilation": 2, "period": 2},
        {"softmax": True, "weight_type": "group", "groups": 2},
        {"softmax": True, "init": "identity"},
    ],
    "LatentDepth": [{"languages": 2}],
    "LayerFusion": [
        {"source_norm": True}, {"fusion_type": "feed_forward"},
        {"fusion_type": "channel_attention", "shared": False},
    ],
    "LayerNorm": [{}],
    "MultiheadAttention": [{}, {"cross": True}, {"num_kv_heads": 1}],
    "RMSNorm": [{}],
    "TransformerDecoder": [{}],
    "TransformerDecoderLayer": [{"norm_type": "none"}],
    "TransformerEncoder": [{"connection": name} for name in CONNECTIONS],
    "TransformerEncoderLayer": [{"activation": "swiglu", "norm_type": "rms"}],
    "TransparentAttention": [{}],
}  # fmt: skip
CASES = [(name, options) for name, several in MODULES.items() for options in several]
EVERY = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def parameters_of(name):
    return inspect.signature(getattr(nn, name)).parameters.values()


def made(name, options, **more):
    required = {p.name: SIZES[p.name] for p in parameters_of(name) if p.default is p.empty}
    return getattr(nn, name)(**required | options, **more)


def test_no_public_module_is_left_out():
    public = {name: getattr(nn, name) for name in nn.__all__}
    assert MODULES.keys() == {n for n, c in public.items() if issubclass(c, torch.nn.Module)}


# ---- parameters ----------------------------------------------------------------------------------


def fill(module, value):
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(value)


def reset(module):
    """From the inside to the outside, as `torch.nn.Module.apply` goes."""
    torch.manual_seed(1)
    for part in list(module.modules())[::-1]:
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@EVERY
def test_parameters_on_the_meta_device(name, options):
    """They are where device and dtype say, and a reset gives them the constructor's values."""
    dtype = {"dtype": torch.float64}
    expected, other = made(name, options, **dtype), made(name, options, **dtype)
    if not all(map(torch.equal, expected.parameters(), other.parameters())):
        reset(expected)
    m = made(name, options, device="meta", **dtype)
    assert {(p.device.type, p.dtype) for p in m.parameters()} == {("meta", torch.float64)}
    assert repr(m) == repr(expected)
    m.to_empty(device="cpu")
    fill(m, torch.nan)
    reset(m)
    for (key, p), q in zip(m.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), key


@EVERY
def test_reset_leaves_parameters_alone_that_a_guard_protects(monkeypatch, name, options):
    """transformers marks what it has loaded, and replaces the functions of torch.nn.init."""
    m = made(name, options)
    fill(m, 7.0)
    for p in m.parameters():
        p._is_loaded = True

    def guarded(function):
        return lambda t, *args, **kw: t if hasattr(t, "_is_loaded") else function(t, *args, **kw)

    names = "constant_", "ones_", "zeros_", "uniform_", "normal_", "xavier_uniform_"
    for function in (*names, "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, function, guarded(getattr(torch.nn.init, function)))
    reset(m)
    assert all((p == 7.0).all() for p in m.parameters())


def test_parameter_groups():
    """Every parameter that learns is in one of them, and tables over depth do not decay."""
    tables = {"connection.dlcl.weight", "connection.dlcl.norm_weight", "connection.dlcl.norm_bias"}
    for connection, expected in (("residual", set()), ("dlcl", tables)):
        model = made("TransformerEncoder", {"connection": connection})
        model.layers[0].requires_grad_(False)
        learning = {p: name for name, p in model.named_parameters() if p.requires_grad}
        others, depth = deepfast.parameter_groups(model)
        assert {learning[p] for p in depth["params"]} == expected
        assert depth["weight_decay"] == 0
        assert [*others["params"]] == [p for p in learning if learning[p] not in expected]
        # torch takes a group that has no parameters.
        torch.optim.AdamW([others, depth], lr=0.1, weight_decay=0.5)


# ---- options -------------------------------------------------------------------------------------

WRONG = {"int": (1.5, "a", -1), "bool": ("no", 1), "str": ("nonsense",)}
WRONG |= {"float": (math.nan, "a", -1.0), "dict": (3, ["window"]), "tuple": ("wide", (1, -2), 2.5)}
"""Values that no argument of this type may have, by the beginning of the annotation."""
SIGNED = {"seed", "scale"}
OTHER = {"state_dtype", "backend", "device", "dtype", "recompute"}
"""Arguments that are no plain values."""


def wrong_values(argument):
    annotation = getattr(argument.annotation, "__name__", str(argument.annotation))
    found = next((v for start, v in WRONG.items() if annotation.startswith(start)), ())
    return found[:-1] if argument.name in SIGNED else found


@pytest.mark.parametrize("name", MODULES)
def test_arguments(name):
    """Errors begin with the class and the argument that the user knows."""
    known = f"{name}(Layer)?|MultiheadAttention|DLCL"
    for argument in parameters_of(name):
        for value in () if argument.name in OTHER else wrong_values(argument):
            with pytest.raises(ValueError, match=f"^({known}): .*{argument.name}"):
                made(name, {argument.name: value})


DEEPNORM = {"connection": "residual", "norm": "deepnorm"}
ENCODER, ATTENTION, LATENT = "TransformerEncoder", "MultiheadAttention", "LatentDepth"
OPTIONS = [
    (ENCODER, {"num_layers": 10**12}, "num_layers must be at most 65536, got 10+$"),
    (ENCODER, {"connection": "residual", "dlcl": {"window": 2}}, "dlcl options need connection="),
    (ENCODER, {"latent": {"tau": 2.0}}, "latent options need connection='latent', got 'dlcl'"),
    (ENCODER, {"connection": "attnres", "norm": "post"}, "'attnres' needs norm='pre', got 'post'"),
    (ENCODER, {"connection": "attnres", "block": 2}, "block needs connection='block_attnres'"),
    (ENCODER, {"reads": 2}, "reads must be 1 or None where connection='dlcl'"),
    (ENCODER, {"norm_type": "none"}, "norm_type='none' needs norm='pre' and the connec"),
    (ENCODER, DEEPNORM | {"connection": "dlcl"}, "needs connection='residual', got 'dlcl'"),
    (ENCODER, DEEPNORM | {"norm_type": "none"}, "needs norm_type='layer', got 'none'"),
    (ENCODER, DEEPNORM | {"norm": "post", "decoder_layers": 2}, "decoder_layers is for an enc"),
    ("TransformerDecoder", {"decoder_layers": 2}, "decoder_layers is for an encoder"),
    (ENCODER, {"recompute": ["none", "ffn"]}, "one policy for each of 3 layers, got 2"),
    (ENCODER, {"recompute": 3}, "expected a policy, one for each layer, or a plan"),
    (ENCODER, {"recompute": "layer+input", "connection": "residual"},
     "'layer.input' recomputes inputs from the states of .*use 'layer'"),
    (ATTENTION, {"num_heads": 3}, "num_heads must divide dim 8, got 3"),
    (ATTENTION, {"num_kv_heads": 4}, "num_kv_heads must divide num_heads 2, got 4"),
    (ATTENTION, {"window": 3, "cross": True}, "window must be None where cross is True, got 3"),
    (LATENT, {"beta": (2, 1)}, r"beta must be \(1, 1\) for the prior uniform, got \(2, 1\)"),
    (LATENT, {"target_weight": 1}, "target_layers must be a number where target_weight is set"),
    (LATENT, {"target_layers": 4}, "target_layers must be above 0 and at most the 3 layers"),
    ("LayerFusion", {"num_states": 1, "word_embedding": False}, "num_states .* at least 2"),
    ("DLCL", {"weight_type": "group"}, "weight_type='group' needs groups, from 1 to 8, got None$"),
    ("DLCL", {"groups": 2}, "groups=2 needs weight_type='group', got weight_type='scalar'$"),
    ("DLCL", {"state_dtype": torch.float16}, "state_dtype must be one of torch.float32, None"),
    ("AttentionResiduals", {"block": 2, "window": 2}, "expected block or window, got both"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), OPTIONS)
def test_options_that_do_not_go_together(name, options, words):
    with pytest.raises(ValueError, match=f"^({name}|recompute): .*{words}"):
        made(name, options)


# ---- calls ---------------------------------------------------------------------------------------

X, ENCODED, Z = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(5, 6)
RIGHT = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool()
PACKING, T, ROWS = Packing(2, 3), torch.randn(6, 8), torch.randn(2, 4)
encoder, decoder = (
    made(f"Transformer{side}", {"num_layers": 1}) for side in ("Encoder", "Decoder")
)
encoder_layer, decoder_layer = (
    made(f"Transformer{side}Layer", {}) for side in ("Encoder", "Decoder")
)
transparent, cache = nn.TransparentAttention(3, 2, 4), decoder.start(T, PACKING)
fusion, without = (LayerFusion(3, 6, own_embedding=own) for own in (True, False))
CALLS = [
    *((module, (x,), rf"x must be \(B, S, 8\), got \({shape}\)")
      for module in (encoder, encoder_layer)
      for x, shape in ((X[..., :-1], "2, 3, 7"), (X[0], "3, 8"))),
    *((module, (X, *more, mask), words)
      for module, more in ((encoder, ()), (encoder_layer, ()), (decoder, (ENCODED,)))
      for mask, words in ((RIGHT[:1], r"mask must be bool \(2, 3\), got"),
                          (RIGHT.float(), "mask must be bool .*got torch.float32"),
                          ([[0]], "mask must be a tensor or None, got list"))),
    (encoder, (X.double(),), "must be torch.float32 like the weights"),
    (encoder, (X.to("meta"),), "must be on"),
    (encoder, ([1.0],), "x must be a tensor"),
    (encoder.forward_packed, (T[:-1], PACKING), r"x must be \(6, 8\), got \(5, 8\)"),
    (encoder.forward_packed, (T, 5), "packing must be a Packing, got int"),
    (decoder, (X, ENCODED[..., :-1]), r"encoded must be \(B, S, 8\), got \(2, 4, 7\)"),
    (decoder, (X, ENCODED.double()), "encoded must be torch.float32 like"),
    (decoder, (X, ENCODED, None, RIGHT), r"mask must be bool \(2, 4\), got"),
    (decoder, (X, ENCODED[:1]), "encoded must have x's batch size 2, got 1"),
    (decoder, (X, ENCODED, RIGHT.flip(1)), "padding of x must be on the right.*sentence 1"),
    (decoder_layer, (X, ENCODED, RIGHT.roll(1, 1)), "must be on the right.*sentence 1"),
    (decoder.forward_packed, (T, PACKING, T[1:], PACKING), "encoded must be"),
    (decoder.forward_packed, (T, PACKING, [T] * 2, PACKING),
     "one encoder output for each of 1 layers, got 2"),
    (decoder.start, (T[1:], PACKING), "encoded must be"),
    (decoder.step, (T[:1], cache), r"x must be \(2, 8\), got \(1, 8\)"),
    (decoder.step, (T[:2], 5), "cache must be what start returns, got int"),
    (LatentDepth(5, 3), (3,), "language must be an integer from 0 to 2, got 3"),
    # A bool would index the whole table.
    (LatentDepth(5, 3), (True,), "language must be an integer from 0 to 2, got Tr"),
    (LatentDepth(5).set_step, (-5,), "step must be an integer of at least 0, got"),
    *((LayerFusion(3, 6, kind), (states,), "states")
      for kind in FUSIONS
      for states in (None, [Z, Z], [Z, Z, Z[..., :-1]], [Z, Z, Z.double()], [Z, Z, "z"])),
    (fusion, ([Z] * 3, torch.zeros(3, 6)), "only if own_embedding=False .*got one"),
    (without, ([Z] * 3,), "if and only if own_embedding=False .*got none"),
    (without, ([Z] * 3, Z[:2]), r"\(at least 3, 6\), got \(2, 6\)"),
    (transparent, ([ROWS] * 3, ROWS), "expected 4 states"),
    (transparent, ([ROWS[:, :3]] * 4, ROWS[:, :3]), r"output must be \(T, 4\), got \(2, 3\)"),
    (functools.partial(LayerFusion(3, 6, "average"), return_attention=True), ([Z] * 3,),
     "'average' has no attention"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "args", "words"), CALLS)
def test_calls_that_do_not_go_together(call, args, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(*args)


def test_transforms_of_torch_func():
    """Ops may be mapped. Connections refuse, instead of wrong numbers."""
    x, one = torch.randn(2, 3, 8), torch.ones(8)
    mapped = torch.func.vmap(lambda x: ops.layer_norm(x, one, one))
    assert mapped(x).equal(ops.layer_norm(x, one, one))

    def push(x):
        return DLCL(1, 8)(x, DepthHistory())

    grad, jacrev, vmap = torch.func.grad, torch.func.jacrev, torch.func.vmap
    grad_in_vmap = vmap(grad(lambda x: push(x).sum()))
    for run in (vmap(push), grad(lambda x: push(x).sum()), jacrev(push), grad_in_vmap):
        with pytest.raises(NotImplementedError, match="DLCL: expected no transforms, got one"):
            run(x)
