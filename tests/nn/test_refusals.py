"""What modules refuse, each with one sentence that names a remedy: options that do not go together,
and calls. tests/nn/test_modules.py has single arguments of every module."""

import functools
import math

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


X, ENCODED = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
RIGHT = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool()
PACKING, SHORT, Z = Packing(2, 3), torch.randn(5, 8), torch.randn(5, 6)

encoder, decoder = TransformerEncoder(1, 8, 2, 16), TransformerDecoder(1, 8, 2, 16)
packed, decoded, start = encoder.forward_packed, decoder.forward_packed, decoder.start
transparent = TransparentAttention(3, 2, 4)


def step(x, *given):
    """With the cache of two sentences or with what is given."""
    return decoder.step(x, *(given or (start(X.flatten(0, 1), PACKING),)))


def fusion(*args, kind="attention", own_embedding=True, **options):
    return LayerFusion(3, 6, kind, own_embedding=own_embedding)(*args, **options)


without_embedding = functools.partial(fusion, own_embedding=False)


def wide(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def meta(*shape):
    return torch.ones(*shape, device="meta")


ENCODERS = encoder, TransformerEncoderLayer(8, 2, 16)
DECODERS = decoder, TransformerDecoderLayer(8, 2, 16)
AS_WEIGHTS = r"\S* must be torch\.float32 like the weights, got torch\.float64"
ON_CPU = r"\S* must be on cpu like the weights, got meta"
WIDE = [wide(3, 6)] * 3
CALLS = [
    (ENCODERS, (X[0],), ValueError, r"x must be \(B, S, 8\), got \(3, 8\)"),
    (ENCODERS, (ENCODED[..., :7],), ValueError, r"x must be \(B, S, 8\), got \(2, 4, 7\)"),
    (ENCODERS, ([1.0],), TypeError, "x must be a tensor, got list"),
    (ENCODERS, (X, [[0]]), TypeError, "key_padding_mask must be a tensor or None, got list"),
    (ENCODERS, (X, RIGHT[:1]), ValueError, r"key_padding_mask must be bool \(2, 3\), got"),
    (ENCODERS, (X, RIGHT.float()), ValueError, r"key_padding_mask must be bool \(2, 3\), got"),
    (ENCODERS, (wide(2, 3, 8),), ValueError, f"x{AS_WEIGHTS}"),
    (DECODERS, (X[0], ENCODED), ValueError, r"x must be \(B, S, 8\), got \(3, 8\)"),
    (DECODERS, (X, ENCODED[0]), ValueError, r"encoded must be \(B, S, 8\), got \(4, 8\)"),
    (DECODERS, (X, ENCODED[:1]), ValueError, "encoded must have x's batch size 2, got 1"),
    (DECODERS, (X, None), TypeError, "encoded must be a tensor, got NoneType"),
    (DECODERS, (X, ENCODED, None, RIGHT), ValueError, r"encoded_key_padding_mask must be bool \(2"),
    (DECODERS, (X, ENCODED, RIGHT.flip(1)), ValueError, "padding of x must be on the right.*e 1"),
    (DECODERS, (X, ENCODED, RIGHT.roll(1, 1)), ValueError, "must be on the right.*sentence 1"),
    (DECODERS, (wide(2, 3, 8), wide(2, 3, 8)), ValueError, f"x{AS_WEIGHTS}"),
    (DECODERS, (X, wide(2, 3, 8)), ValueError, f"encoded{AS_WEIGHTS}"),
    (DECODERS, (X, meta(2, 3, 8)), ValueError, f"encoded{ON_CPU}"),
    (packed, (SHORT, PACKING), ValueError, r"Encoder: x must be \(6, 8\), got \(5, 8\)"),
    (packed, (SHORT, 5), TypeError, "Encoder: packing must be .*, got int"),
    (decoded, (SHORT, PACKING, X.view(6, 8), PACKING), ValueError, r"Decoder: x must be \(6, 8\)"),
    (decoded, (X.view(6, 8), PACKING, [X.view(6, 8)] * 2, PACKING), ValueError,
     "one encoder output for each of 1 layers, got 2"),
    (start, (SHORT, PACKING), ValueError, r"Decoder: encoded must be \(6, 8\), got \(5, 8\)"),
    (start, ([SHORT], PACKING), ValueError, r"Decoder: encoded must be \(6, 8\), got \(5, 8\)"),
    (start, (SHORT, 5), TypeError, "Decoder: packing must be .*, got int"),
    (step, (SHORT[:1],), ValueError, r"TransformerDecoder: x must be \(2, 8\), got"),
    (step, (SHORT, 5), TypeError, "cache must be what start returns, got int"),
    (MultiheadAttention(8, 2), (wide(6, 8), PACKING), ValueError, f"x{AS_WEIGHTS}"),
    (MultiheadAttention(8, 2), (meta(6, 8), PACKING), ValueError, f"x{ON_CPU}"),
    *(
        (Packing.of, (4, 4, mask), ValueError, r"key_padding_mask must be bool \(4, 4\), got")
        for mask in (torch.zeros(4, 3).bool(), torch.zeros(4, 4), torch.zeros(16).bool())
    ),
    (TransformerEncoder(2, 8, 2, 16, connection="residual"), (wide(2, 3, 8),), ValueError,
     f"x{AS_WEIGHTS}"),
    (LatentDepth(5, 3), (3,), ValueError, "language must be an integer from 0 to 2, got 3"),
    # A bool would index the whole table.
    (LatentDepth(5, 3), (True,), ValueError, "language must be an integer from 0 to 2, got Tr"),
    (LatentDepth(5).set_step, (-5,), ValueError, "step must be an integer of at least 0, got"),
    (fusion, ([Z] * 2,), ValueError, "expected 3 states, got 2"),
    (fusion, (WIDE,), ValueError, rf"states\[0\]{AS_WEIGHTS}"),
    (fusion, ([meta(3, 6)] * 3,), ValueError, rf"states\[0\]{ON_CPU}"),
    (fusion, ([Z] * 3, torch.zeros(3, 6)), ValueError, "only if own_embedding=False .*got one"),
    (functools.partial(fusion, kind="average", return_attention=True), ([Z] * 3,), ValueError,
     "'average' has no attention"),
    (without_embedding, ([Z] * 3,), ValueError, "if and only if own_embedding=False .*got none"),
    (without_embedding, ([Z] * 3, Z[:2]), ValueError, r"\(at least 3, 6\), got \(2, 6\)"),
    (without_embedding, ([Z] * 3, [1]), TypeError, "layer_embedding must be a tensor, got list"),
    *(
        (functools.partial(fusion, kind=kind), (states,), error, f"LayerFusion: .*{words}")
        for kind in FUSIONS
        for states, error, words in (
            ([Z, Z, "z"], TypeError, r"states\[2\] must be a tensor, got str"),
            ([Z, Z, torch.zeros(5, 7)], ValueError, r"states\[0\]'s shape \(5, 6\), got \(5, 7\)"),
            ([Z, Z, Z.double()], ValueError, "dtype torch.float32, got torch.float64"),
            ([torch.zeros(5, 7)] * 3, ValueError, r"states\[0\] must be \(\.\.\., 6\), got"),
        )
    ),
    (transparent, ([torch.zeros(1, 4)] * 3, torch.zeros(1, 4)), ValueError, "expected 4 states"),
    (transparent, (None, torch.zeros(1, 4)), TypeError, "states must be a list of tensors"),
    (transparent, ([torch.zeros(1, 5)] * 4, torch.zeros(1, 5)), ValueError,
     r"output must be \(T, 4\), got \(1, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "args", "error", "words"), CALLS)
def test_calls(calls, args, error, words):
    for call in calls if isinstance(calls, tuple) else (calls,):
        with pytest.raises(error, match=words):
            call(*args)
        if "like the weights" in words and "float64" in words:
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="float64"):
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
    for run in (vmap(push), grad(lambda x: push(x).sum()), jacrev(push),
                vmap(grad(lambda x: push(x).sum()))):  # fmt: skip
        with pytest.raises(NotImplementedError, match="DLCL: expected no transforms, got one"):
            run(x)
