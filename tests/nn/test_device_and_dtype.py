"""Every public module makes its parameters where ``device`` and ``dtype`` say."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepfast import nn
from deepfast.connections import CONNECTIONS

MODULES = {
    "AttentionResiduals": [{"score_function": "relu", "norm_affine": True}],
    "DLCL": [{}, {"norm_type": "rms", "weight_type": "vector", "softmax": True}],
    "LatentDepth": [{}],
    "LayerFusion": [
        {"fusion_type": "feed_forward", "source_norm": True},
        {"fusion_type": "channel_attention", "shared": False},
    ],
    "LayerNorm": [{}],
    "MultiheadAttention": [{}, {"cross": True}],
    "RMSNorm": [{}],
    "TransformerDecoder": [{}],
    "TransformerDecoderLayer": [{"norm_type": "none"}],
    "TransformerEncoder": [{"connection": name} for name in CONNECTIONS],
    "TransformerEncoderLayer": [{"activation": "swiglu", "norm_type": "rms"}],
    "TransparentAttention": [{}],
}
SIZES = {"num_states": 3, "encoder_layers": 2, "decoder_layers": 2, "num_layers": 2}
SIZES |= {"dim": 8, "num_heads": 2, "ffn_dim": 12}
CASES = [(name, options) for name, several in MODULES.items() for options in several]


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


def test_no_public_module_is_left_out():
    public = {name: getattr(nn, name) for name in nn.__all__}
    assert MODULES.keys() == {n for n, c in public.items() if issubclass(c, torch.nn.Module)}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_parameters_are_made_there(name, options, device, dtype):
    kind = getattr(nn, name)
    required = [
        p.name
        for p in inspect.signature(kind).parameters.values()
        if p.default is inspect.Parameter.empty
    ]
    given = {name: SIZES[name] for name in required} | options
    with Made() as made:
        module = kind(**given, device=device, dtype=dtype)
    assert made.found == {(device, dtype)}
    found = {(p.device.type, p.dtype) for p in module.parameters()}
    assert found == {(device, dtype)}
    plain = kind(**given)
    assert repr(module) == repr(plain)
    assert module.state_dict().keys() == plain.state_dict().keys()
