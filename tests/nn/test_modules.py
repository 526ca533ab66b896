"""What holds for every public module: where its parameters are made, their reset, and what it
refuses, each with one sentence that names a remedy.

One table has the modules with the options that matter for their parameters.
"""

import functools
import inspect
import math
import re

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
        def run(tensor, *args, **options):
            return tensor if hasattr(tensor, "_is_loaded") else function(tensor, *args, **options)

        return run

    names = "constant_", "ones_", "zeros_", "uniform_", "normal_", "xavier_uniform_"
    for function in (*names, "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, function, guarded(getattr(torch.nn.init, function)))
    reset(m)
    assert all((p == 7.0).all() for p in m.parameters())


@pytest.mark.parametrize(
    ("connection", "tables"),
    [
        ("residual", set()),
        ("dlcl", {"dlcl.weight", "dlcl.norm_weight", "dlcl.norm_bias"}),
        ("attnres", {"residuals.query"}),
    ],
)
def test_parameter_groups(connection, tables):
    """Every parameter that learns is in one of them, and tables over depth do not decay."""
    model = made("TransformerEncoder", {"connection": connection})
    model.layers[0].requires_grad_(False)
    named = {p: name.removeprefix("connection.") for name, p in model.named_parameters()}
    others, depth = deepfast.parameter_groups(model)
    assert {named[p] for p in depth["params"]} == tables
    assert depth["weight_decay"] == 0
    learning = [p for p in model.parameters() if p.requires_grad]
    assert [*others["params"]] == [p for p in learning if named[p] not in tables]
    # torch takes a group that has no parameters.
    torch.optim.AdamW([others, depth], lr=0.1, weight_decay=0.5)
    with pytest.raises(TypeError, match="model must be a module, got list"):
        deepfast.parameter_groups([])


# ---- options -------------------------------------------------------------------------------------

WRONG = {"int": (1.5, "a", -1), "bool": ("no", 1), "str": ("nonsense",)}
WRONG |= {"float": (math.nan, "a", -1.0), "dict": (3, ["window"]), "tuple": ("wide", (1, -2), 2.5)}
"""Values that no argument of this type may have, by the beginning of the annotation."""
POSITIVE = {"num_layers", "dim", "num_heads", "ffn_dim", "num_kv_heads", "window", "dilation",
            "period", "groups", "reads", "block", "hops", "attention_dim", "hidden_dim", "tau",
            "num_states", "encoder_layers", "decoder_layers", "languages", "threshold",
            "lr_scale"}  # fmt: skip
SIGNED = {"seed", "scale"}
OTHER = {"state_dtype", "backend", "device", "dtype", "recompute"}
"""Arguments that are no plain values."""


def wrong_values(argument):
    annotation = getattr(argument.annotation, "__name__", str(argument.annotation))
    found = next((v for start, v in WRONG.items() if annotation.startswith(start)), ())
    if argument.name in SIGNED:
        found = found[:-1]
    return (*found, 0) if argument.name in POSITIVE and found != WRONG["tuple"] else found


ARGUMENTS = [
    (name, argument.name, value)
    for name in MODULES
    for argument in parameters_of(name)
    if argument.name not in OTHER
    for value in wrong_values(argument)
]


@pytest.mark.parametrize(("name", "argument", "value"), ARGUMENTS)
def test_arguments(name, argument, value):
    """Errors begin with the class and the argument that the user knows."""
    known = f"{name}(Layer)?|MultiheadAttention|DLCL"
    with pytest.raises(ValueError, match=f"^({known}): .*{argument}"):
        made(name, {argument: value})


DEEPNORM = {"connection": "residual", "norm": "deepnorm"}
ENCODER, ATTENTION, LATENT = "TransformerEncoder", "MultiheadAttention", "LatentDepth"
OPTIONS = [
    (ENCODER, {"num_layers": 10**12}, "num_layers must be at most 65536, got 10+$"),
    (ENCODER, {"dlcl": {"window": 0}}, "window must be an integer of at least 1"),
    (ENCODER, {"connection": "residual", "dlcl": {"window": 2}}, "dlcl options need connection="),
    (ENCODER, {"latent": {"tau": 2.0}}, "latent options need connection='latent', got 'dlcl'"),
    (ENCODER, {"connection": ["dlcl"]}, "connection must be one of"),
    (ENCODER, {"connection": "attnres", "norm": "post"}, "'attnres' needs norm='pre', got 'post'"),
    (ENCODER, {"connection": "attnres", "block": 2}, "block needs connection='block_attnres'"),
    (ENCODER, {"connection": "attnres", "reads": 3}, "reads must be an integer"),
    (ENCODER, {"reads": 2}, "reads must be 1 or None where connection='dlcl'"),
    (ENCODER, {"norm_type": "none"}, "norm_type='none' needs norm='pre' and the connec"),
    (ENCODER, {"norm_type": "none", "connection": "latent", "norm": "post"}, "'none' needs norm="),
    (ENCODER, DEEPNORM | {"connection": "dlcl"}, "needs connection='residual', got 'dlcl'"),
    (ENCODER, DEEPNORM | {"norm_type": "none"}, "needs norm_type='layer', got 'none'"),
    (ENCODER, DEEPNORM | {"norm": "post", "decoder_layers": 2}, "decoder_layers is for an enc"),
    ("TransformerDecoder", {"decoder_layers": 2}, "decoder_layers is for an encoder"),
    (ENCODER, {"recompute": "less"}, "expected one of none, ffn, .*, got 'less'"),
    (ENCODER, {"recompute": ["none", "ffn"]}, "one policy for each of 3 layers, got 2"),
    (ENCODER, {"recompute": 3}, "expected a policy, one for each layer, or a plan"),
    (ENCODER, {"recompute": "layer+input", "connection": "residual"},
     "'layer.input' recomputes inputs from the states of .*use 'layer'"),
    (ATTENTION, {"num_heads": 3}, "num_heads must divide dim 8, got 3"),
    (ATTENTION, {"num_kv_heads": 4}, "num_kv_heads must divide num_heads 2, got 4"),
    (ATTENTION, {"window": 3, "cross": True}, "window must be None where cross is True, got 3"),
    (LATENT, {"beta": (2, 1)}, r"beta must be \(1, 1\) for the prior uniform, got \(2, 1\)"),
    (LATENT, {"prior": "beta", "beta": (2, 0)}, "beta must be a number above 0, got 0"),
    (LATENT, {"target_weight": 1}, "target_layers must be a number where target_weight is set"),
    (LATENT, {"target_layers": 4}, "target_layers must be above 0 and at most the 3 layers"),
    (LATENT, {"threshold": 1}, "threshold must be a number between 0 and 1, got 1"),
    ("LayerFusion", {"num_states": 1, "word_embedding": False}, "num_states .* at least 2"),
    ("DLCL", {"weight_type": "group"}, "weight_type='group' needs groups, from 1 to 8, got None$"),
    ("DLCL", {"groups": 2}, "groups=2 needs weight_type='group', got weight_type='scalar'$"),
    ("DLCL", {"weight_type": "group", "groups": 9}, "groups must be between 1 and 8, got 9"),
    ("DLCL", {"state_dtype": torch.float16}, "state_dtype must be one of torch.float32, None"),
    ("AttentionResiduals", {"block": 2, "window": 2}, "expected block or window, got both"),
    ("AttentionResiduals", {"scale": math.inf}, "scale must be a finite number"),
    ("DepthHistory", {"block": 1.5}, "block must be an integer of at least 1, got 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), OPTIONS)
def test_options_that_do_not_go_together(name, options, words):
    with pytest.raises(ValueError, match=f"^({name}|DLCL|recompute): .*{words}"):
        made(name, options)


# ---- calls ---------------------------------------------------------------------------------------

X, ENCODED, Z = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(5, 6)
RIGHT = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool()
PACKING, T, ROWS = Packing(2, 3), torch.randn(6, 8), torch.randn(2, 4)
one_layer = {"num_layers": 1}
encoder, decoder = (made(f"Transformer{side}", one_layer) for side in ("Encoder", "Decoder"))
encoder_layer, decoder_layer = (
    made(f"Transformer{side}Layer", {}) for side in ("Encoder", "Decoder")
)
attention, transparent = made(ATTENTION, {}), nn.TransparentAttention(3, 2, 4)
fusion, without = (LayerFusion(3, 6, own_embedding=own) for own in (True, False))
CROSSED = {"x": X, "encoded": ENCODED, "key_padding_mask": RIGHT}
CROSSED |= {"encoded_key_padding_mask": torch.zeros(2, 4).bool()}
# Calls that are right, by the names of their arguments without a suffix for the shape.
CALLS = [
    *((m, {"x": X, "key_padding_mask": RIGHT}) for m in (encoder, encoder_layer)),
    *((m, CROSSED) for m in (decoder, decoder_layer)),
    (encoder.forward_packed, {"x": T, "packing": PACKING}),
    (decoder.forward_packed,
     {"x": T, "packing": PACKING, "encoded": T, "encoded_packing": PACKING}),
    (decoder.start, {"encoded": T, "encoded_packing": PACKING}),
    (decoder.step, {"x": T[:2], "cache": decoder.start(T, PACKING)}),
    (made(ENCODER, {"connection": "residual"}), {"x": X}),
    *((LayerFusion(3, 6, kind), {"states": [Z, Z, Z]}) for kind in FUSIONS),
]  # fmt: skip


def wrong_operands(value):
    """Of another type, shape, dtype and device."""
    if isinstance(value, list):
        others = "z", value[0][..., :-1], value[0].double(), value[0].to("meta")
        return [None, value[:-1], *([*value[:-1], other] for other in others)]
    if not isinstance(value, torch.Tensor):
        return [5]
    if value.dtype == torch.bool:
        return [[[0]], value[:1], value.float()]
    return [[1.0], value[..., :-1], value[0], value.double(), value.to("meta")]


@pytest.mark.parametrize(
    ("call", "right", "argument", "number"),
    [
        (call, right, argument, number)
        for call, right in CALLS
        for argument, value in right.items()
        for number in range(len(wrong_operands(value)))
    ],
)
def test_an_argument_of_a_call(call, right, argument, number):
    """Errors begin with the module, or the op that a device does not fit, and name the argument."""
    module = getattr(call, "__self__", call)
    function = call if module is not call else call.forward
    names = {re.sub("_[A-Z]+$", "", name): name for name in inspect.signature(function).parameters}
    right = {names[name]: value for name, value in right.items()}
    call(**right)
    wrong = right | {names[argument]: wrong_operands(right[names[argument]])[number]}
    name = argument.replace("encoded_packing", "packing")
    words = rf"^({type(module).__name__}|MultiheadAttention): .*{name}|^\w+: .* must be on \w+, got"
    for autocast in (False, True):
        context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with context, pytest.raises((TypeError, ValueError), match=words):
            call(**wrong)


SPECIAL = [
    (decoder, (X, ENCODED[:1]), "encoded must have x's batch size 2, got 1"),
    (decoder, (X, ENCODED, RIGHT.flip(1)), "padding of x must be on the right.*sentence 1"),
    (decoder_layer, (X, ENCODED, RIGHT.roll(1, 1)), "must be on the right.*sentence 1"),
    (decoder.forward_packed, (T, PACKING, [T] * 2, PACKING),
     "one encoder output for each of 1 layers, got 2"),
    (Packing.of, (4, 4, torch.zeros(16).bool()), r"key_padding_mask must be bool \(4, 4\), got"),
    (LatentDepth(5, 3), (3,), "language must be an integer from 0 to 2, got 3"),
    # A bool would index the whole table.
    (LatentDepth(5, 3), (True,), "language must be an integer from 0 to 2, got Tr"),
    (LatentDepth(5).set_step, (-5,), "step must be an integer of at least 0, got"),
    (attention, (T.double(), PACKING), "x must be torch.float32 like the weights"),
    (attention, (T.to("meta"), PACKING), "x must be on cpu like the weights"),
    (fusion, ([Z] * 3, torch.zeros(3, 6)), "only if own_embedding=False .*got one"),
    (without, ([Z] * 3,), "if and only if own_embedding=False .*got none"),
    (without, ([Z] * 3, Z[:2]), r"\(at least 3, 6\), got \(2, 6\)"),
    (without, ([Z] * 3, [1]), "layer_embedding must be a tensor, got list"),
    (transparent, ([ROWS] * 3, ROWS), "expected 4 states"),
    (transparent, (None, ROWS), "states must be a list of tensors"),
    (transparent, ([ROWS[:, :3]] * 4, ROWS[:, :3]), r"output must be \(T, 4\), got \(2, 3\)"),
    (functools.partial(LayerFusion(3, 6, "average"), return_attention=True), ([Z] * 3,),
     "'average' has no attention"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "args", "words"), SPECIAL)
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
