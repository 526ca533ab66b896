"""Small stacks under recompute policies, and everything that a step of one gives."""

import torch

from deepfast.connections import CONNECTIONS
from deepfast.memory import POLICIES
from deepfast.nn import TransformerDecoder, TransformerEncoder

LAYERS, DIM, HEADS, FFN, BATCH, LENGTH = 5, 16, 2, 40, 3, 7
OTHERS = POLICIES[1:]

CASES = {
    "dlcl": {},
    "dlcl, padding": {"padding": True, "activation_dropout": 0.2},
    "dlcl, swiglu": {"activation": "swiglu", "activation_dropout": 0.2},
    "dlcl, gelu": {"activation": "gelu", "activation_dropout": 0.2, "attention_dropout": 0.1},
    "dlcl, window": {"dlcl": {"window": 3, "weight_type": "vector"}},
    "dlcl, post": {"norm": "post"},
    "dlcl, no norm": {"dlcl": {"norm": None}},
    "dlcl, no norm, post": {"dlcl": {"norm": None}, "norm": "post"},
    "denseformer": {"connection": "denseformer", "dlcl": {"dilation": 2}},
    "denseformer, post": {"connection": "denseformer", "norm": "post"},
    "residual": {"connection": "residual"},
    "deepnorm": {"connection": "residual", "norm": "deepnorm"},
    "residual, post, gelu": {"connection": "residual", "norm": "post", "activation": "gelu"},
    "decoder": {"decoder": True, "attention_dropout": 0.1},
    "decoder, residual": {"decoder": True, "connection": "residual", "padding": True},
    "decoder, post": {"decoder": True, "norm": "post"},
    "latent": {"connection": "latent", "padding": True},
    "latent, post, hard": {"connection": "latent", "norm": "post", "latent": {"hard": True}},
    "attnres": {"connection": "attnres", "padding": True, "activation_dropout": 0.2},
    "attnres, gelu": {"connection": "attnres", "activation": "gelu", "attention_dropout": 0.1},
    "attnres, one read": {"connection": "attnres", "reads": 1},
    "block_attnres": {"connection": "block_attnres", "block": 2},
    "block_attnres, one read": {"connection": "block_attnres", "reads": 1},
    "decoder, attnres": {"decoder": True, "connection": "attnres", "attention_dropout": 0.1},
    "decoder, latent": {"decoder": True, "connection": "latent"},
    "groups, window": {"num_kv_heads": 1, "window": (2, 1), "padding": True},
    "decoder, groups, window": {"decoder": True, "num_kv_heads": 1, "window": 3},
    "rms": {"norm_type": "rms"},
    "rms, post, window": {"norm_type": "rms", "norm": "post", "dlcl": {"window": 3}},
    "rms, residual": {"norm_type": "rms", "connection": "residual"},
    "no norms": {"norm_type": "none", "connection": "residual"},
    "rms, decoder, post": {"norm_type": "rms", "decoder": True, "norm": "post"},
}


def allowed(case, policies=POLICIES):
    """The policies that a case may have: without states no layer's input comes from them."""
    mixes = CONNECTIONS[CASES[case].get("connection", "dlcl")].mixes
    return [policy for policy in policies if mixes or policy != "layer+input"]


def pairs(cases, policies=POLICIES):
    """Each case with each policy that it may have."""
    return [(case, policy) for case in cases for policy in allowed(case, policies)]


def stack(recompute, *, layers=LAYERS, decoder=False, padding=False, **options):
    torch.manual_seed(1)
    kind = TransformerDecoder if decoder else TransformerEncoder
    return kind(layers, DIM, HEADS, FFN, dropout=0.1, recompute=recompute, **options)


def forward(module, *, padding=False):
    """Inputs, which need gradients, and the output, from one and the same seed."""
    torch.manual_seed(2)
    x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    inputs, mask = [x], None
    if padding:
        mask = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3], [5]])
    if isinstance(module, TransformerDecoder):
        inputs.append(torch.randn(BATCH, LENGTH + 1, DIM, requires_grad=True))
    return inputs, module(*inputs, mask)


def gradients(module, inputs, y):
    """Of the inputs and of the parameters, by name."""
    y.float().mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: p.grad for name, p in module.named_parameters()}


def step(module, *, padding=False, autocast=False):
    """Everything one step gives, and the generator's next number."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inputs, y = forward(module, padding=padding)
    result = gradients(module, inputs, y)
    module.zero_grad()
    return result | {"y": y.detach(), "next": torch.rand(2)}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        same = got[name] is None if value is None else torch.equal(got[name], value)
        assert same, name
