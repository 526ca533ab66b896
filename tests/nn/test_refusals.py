"""What modules refuse, each with one sentence that names a remedy: options that do not go together,
and calls. tests/nn/test_modules.py has single arguments of every module."""

import functools
import inspect
import math
import re

import pytest
import torch

from deepfast import ops
from deepfast.nn import (
    DLCL,
    AttentionResiduals,
    DepthHistory,
    LatentDepth,
    LayerFusion,
    LayerNorm,
    MultiheadAttention,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    TransparentAttention,
)
from deepfast.nn.connections.fusion import FUSIONS

STACK = {"num_layers": 5, "dim": 8, "num_heads": 2, "ffn_dim": 16}
SIZES = {
    TransformerEncoder: STACK,
    TransformerDecoder: STACK,
    MultiheadAttention: {"dim": 8, "num_heads": 2},
    LayerNorm: {"dim": 4},
    LatentDepth: {"num_layers": 5},
    LayerFusion: {"num_states": 3, "dim": 6},
    DLCL: {"num_layers": 2, "dim": 12},
    AttentionResiduals: {"num_layers": 2, "dim": 12},
    DepthHistory: {},
}
DEEPNORM = {"connection": "residual", "norm": "deepnorm"}
ENCODER, ATTENTION, LATENT = TransformerEncoder, MultiheadAttention, LatentDepth
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
    (TransformerDecoder, {"decoder_layers": 2}, "decoder_layers is for an encoder"),
    (ENCODER, {"recompute": "less"}, "expected one of none, ffn, .*, got 'less'"),
    (ENCODER, {"recompute": ["none", "ffn"]}, "one policy for each of 5 layers, got 2"),
    (ENCODER, {"recompute": 3}, "expected a policy, one for each layer, or a plan"),
    (ENCODER, {"recompute": "layer+input", "connection": "residual"},
     "'layer.input' recomputes inputs from the states of .*use 'layer'"),
    (ATTENTION, {"num_heads": 3}, "num_heads must divide dim 8, got 3"),
    (ATTENTION, {"num_kv_heads": 4}, "num_kv_heads must divide num_heads 2, got 4"),
    (ATTENTION, {"window": 3, "cross": True}, "window must be None where cross is True, got 3"),
    (LayerNorm, {"dim": 4, "eps": -1.0}, "eps must be a number of at least 0, got -1.0"),
    (LATENT, {"beta": (2, 1)}, r"beta must be \(1, 1\) for the prior uniform, got \(2, 1\)"),
    (LATENT, {"prior": "beta", "beta": (2, 0)}, "beta must be a number above 0, got 0"),
    (LATENT, {"target_weight": 1}, "target_layers must be a number where target_weight is set"),
    (LATENT, {"target_layers": 6}, "target_layers must be above 0 and at most the 5 layers"),
    (LATENT, {"threshold": 0}, "threshold must be a number between 0 and 1, got 0"),
    (LATENT, {"threshold": 1}, "threshold must be a number between 0 and 1, got 1"),
    (LATENT, {"soft_steps": -1}, "soft_steps must be an integer of at least 0, got -1"),
    (LATENT, {"entropy_weight": -1}, "entropy_weight must be a number of at least 0, got -1"),
    (LayerFusion, {"num_states": 1, "word_embedding": False}, "num_states must be .* at least 2"),
    (DLCL, {"weight_type": "group"}, "weight_type='group' needs groups, from 1 to 12, got None$"),
    (DLCL, {"groups": 2}, "groups=2 needs weight_type='group', got weight_type='scalar'$"),
    (DLCL, {"weight_type": "group", "groups": 13}, "groups must be between 1 and 12, got 13"),
    (DLCL, {"state_dtype": torch.float16}, "state_dtype must be one of torch.float32, None"),
    (AttentionResiduals, {"block": 2, "window": 2}, "expected block or window, got both"),
    (AttentionResiduals, {"scale": math.inf}, "scale must be a finite number"),
    (DepthHistory, {"block": 1.5}, "block must be an integer of at least 1, got 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "words"), OPTIONS)
def test_options(kind, options, words):
    """Errors begin with the class or the argument that the user knows."""
    with pytest.raises(ValueError, match=f"^({kind.__name__}|DLCL|recompute): .*{words}"):
        kind(**SIZES[kind] | options)


X, ENCODED, Z = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(5, 6)
RIGHT = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool()
PACKING, T, ROWS = Packing(2, 3), torch.randn(6, 8), torch.randn(2, 4)
encoder, decoder = TransformerEncoder(1, 8, 2, 16), TransformerDecoder(1, 8, 2, 16)
ENCODERS = encoder, TransformerEncoderLayer(8, 2, 16)
DECODERS = decoder, TransformerDecoderLayer(8, 2, 16)
transparent = TransparentAttention(3, 2, 4)
fusion, without = (LayerFusion(3, 6, own_embedding=own) for own in (True, False))
CROSSED = {"x": X, "encoded": ENCODED, "key_padding_mask": RIGHT}
CROSSED |= {"encoded_key_padding_mask": torch.zeros(2, 4).bool()}
# Calls that are right, by the names of their arguments without a suffix for the shape.
CALLS = [
    *((m, {"x": X, "key_padding_mask": RIGHT}) for m in ENCODERS),
    *((m, CROSSED) for m in DECODERS),
    (encoder.forward_packed, {"x": T, "packing": PACKING}),
    (decoder.forward_packed,
     {"x": T, "packing": PACKING, "encoded": T, "encoded_packing": PACKING}),
    (decoder.start, {"encoded": T, "encoded_packing": PACKING}),
    (decoder.step, {"x": T[:2], "cache": decoder.start(T, PACKING)}),
    (TransformerEncoder(2, 8, 2, 16, connection="residual"), {"x": X}),
    *((LayerFusion(3, 6, kind), {"states": [Z, Z, Z]}) for kind in FUSIONS),
]  # fmt: skip


def wrong_values(value):
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
        for number in range(len(wrong_values(value)))
    ],
)
def test_an_argument_of_a_call(call, right, argument, number):
    """Errors begin with the module, or the op that a device does not fit, and name the argument."""
    module = getattr(call, "__self__", call)
    function = call if module is not call else call.forward
    names = {re.sub("_[A-Z]+$", "", name): name for name in inspect.signature(function).parameters}
    right = {names[name]: value for name, value in right.items()}
    call(**right)
    wrong = right | {names[argument]: wrong_values(right[names[argument]])[number]}
    name = argument.replace("encoded_packing", "packing")
    words = rf"^({type(module).__name__}|MultiheadAttention): .*{name}|^\w+: .* must be on \w+, got"
    for autocast in (False, True):
        context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with context, pytest.raises((TypeError, ValueError), match=words):
            call(**wrong)


SPECIAL = [
    (decoder, (X, ENCODED[:1]), "encoded must have x's batch size 2, got 1"),
    (decoder, (X, ENCODED, RIGHT.flip(1)), "padding of x must be on the right.*sentence 1"),
    (DECODERS[1], (X, ENCODED, RIGHT.roll(1, 1)), "must be on the right.*sentence 1"),
    (decoder.forward_packed, (T, PACKING, [T] * 2, PACKING),
     "one encoder output for each of 1 layers, got 2"),
    (Packing.of, (4, 4, torch.zeros(16).bool()), r"key_padding_mask must be bool \(4, 4\), got"),
    (LatentDepth(5, 3), (3,), "language must be an integer from 0 to 2, got 3"),
    # A bool would index the whole table.
    (LatentDepth(5, 3), (True,), "language must be an integer from 0 to 2, got Tr"),
    (LatentDepth(5).set_step, (-5,), "step must be an integer of at least 0, got"),
    (fusion, ([Z] * 3, torch.zeros(3, 6)), "only if own_embedding=False .*got one"),
    (MultiheadAttention(8, 2), (T.double(), PACKING), "x must be torch.float32 like the weights"),
    (MultiheadAttention(8, 2), (T.to("meta"), PACKING), "x must be on cpu like the weights"),
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


def test_padding_on_the_right_and_of_whole_sentences_is_taken():
    """The tokens get what they get without it; the encoder's output may be padded anywhere."""
    whole = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()
    left = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]).bool()
    for m in DECODERS:
        m = m.eval()
        for padding in (RIGHT, whole):
            out = m(X, ENCODED, padding, left)
            torch.testing.assert_close(out[1:, :1], m(X[1:, :1], ENCODED[1:, 2:]))


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
