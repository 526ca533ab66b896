"""What holds for every public module: where its parameters are made, their reset, what it refuses.

One table has the modules with the options that matter for their parameters.
"""

import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepfast
from deepfast import nn
from deepfast.connections import CONNECTIONS

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


def required(name):
    parameters = inspect.signature(getattr(nn, name)).parameters.values()
    return {p.name: SIZES[p.name] for p in parameters if p.default is p.empty}


def made(name, options, **more):
    return getattr(nn, name)(**required(name) | options, **more)


def test_no_public_module_is_left_out():
    public = {name: getattr(nn, name) for name in nn.__all__}
    assert MODULES.keys() == {n for n, c in public.items() if issubclass(c, torch.nn.Module)}


# ---- parameters ----------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Collects device and dtype of every floating-point tensor that an op returns."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.found.add((x.device.type, x.dtype))
        return out


@EVERY
def test_parameters_are_made_where_device_and_dtype_say(name, options):
    plain = made(name, options)
    for device in ("meta", "cpu"):
        for dtype in (torch.float64, torch.bfloat16):
            with Made() as ops:
                module = made(name, options, device=device, dtype=dtype)
            assert ops.found == {(device, dtype)}
            assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}
            assert repr(module) == repr(plain)
            assert module.state_dict().keys() == plain.state_dict().keys()


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
@pytest.mark.parametrize("meta", [False, True])
def test_reset_restores_the_values_of_the_constructor(name, options, meta):
    expected, other = made(name, options), made(name, options)
    if not all(map(torch.equal, expected.parameters(), other.parameters())):
        reset(expected)
    with torch.device("meta" if meta else "cpu"):
        m = made(name, options)
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
    before = [p.detach().clone() for p in depth["params"]]
    model(torch.randn(2, 3, 8)).sum().mul(0).backward()
    torch.optim.AdamW([others, depth], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close([p.detach() for p in depth["params"]], before, rtol=0, atol=0)
    with pytest.raises(TypeError, match="model must be a module, got list"):
        deepfast.parameter_groups([])


# ---- arguments -----------------------------------------------------------------------------------

WRONG = {"int": (1.5, "a"), "bool": ("no", 1), "str": ("nonsense",), "float": (math.nan, "a")}
WRONG |= {"dict": (3, ["window"]), "tuple": ("wide", (1, -2), 2.5)}
"""Values that no argument of this type may have, by the beginning of the annotation."""
POSITIVE = {"num_layers", "dim", "num_heads", "ffn_dim", "num_kv_heads", "window", "dilation",
            "period", "groups", "reads", "block", "hops", "attention_dim", "hidden_dim", "tau",
            "num_states", "encoder_layers", "decoder_layers", "languages"}  # fmt: skip
OTHER = {"state_dtype", "backend", "device", "dtype", "recompute"}
"""Arguments that are no plain values."""


def wrong_values(argument):
    annotation = getattr(argument.annotation, "__name__", str(argument.annotation))
    found = next((v for start, v in WRONG.items() if annotation.startswith(start)), ())
    return (*found, 0) if argument.name in POSITIVE and found != WRONG["tuple"] else found


ARGUMENTS = [
    (name, argument.name, value)
    for name in MODULES
    for argument in inspect.signature(getattr(nn, name)).parameters.values()
    if argument.name not in OTHER
    for value in wrong_values(argument)
]


@pytest.mark.parametrize(("name", "argument", "value"), ARGUMENTS)
def test_arguments(name, argument, value):
    """Errors begin with the class and the argument that the user knows."""
    known = f"{name}(Layer)?|MultiheadAttention|DLCL"
    with pytest.raises(ValueError, match=f"^({known}): .*{argument}"):
        made(name, {argument: value})
