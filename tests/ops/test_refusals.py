"""Arguments that ops refuse, each with one sentence that begins with the op's name."""

import math
import re
from inspect import signature

import pytest
import torch
from torch import ones

from deepfast import ops
from deepfast.backend import BackendError
from deepfast.cases.sentences import offsets

X, INT, ROW, TARGET = ones(3, 4), ones(3, 4).int(), ones(4), torch.tensor([0, 6, 1])
Q, CU = ones(4, 2, 16), offsets([4], "cpu")
SCORES, DROPPED = {"query": None}, {"dropout_p": 0.5, "backend": "reference"}
ACTIVATION = {"activation_dropout_p": 0.5, "training": True}
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
NORM = {"norm_weight": ROW, "norm_bias": ROW}
UP = {"up_weight": ones(21, 4), "up_bias": ones(21)}
BLOCK = UP | {"down_weight": ones(11, 21), "down_bias": ones(11)}
LOSS = {"target": TARGET, "linear_bias": ones(7)}
STATES = {"h0": ones(3, 2), "c0": ones(3, 2), "lengths": torch.tensor([2, 1, 0])}
GIVEN = {
    "layer_norm": {"x": X, "weight": ROW, "bias": ROW},
    "add_layer_norm": {"x": X, "residual": X, "weight": ROW, "bias": ROW},
    "rms_norm": {"x": X, "weight": ROW},
    "add_rms_norm": {"x": X, "residual": X, "weight": ROW},
    "activation": {"h": X, "activation": "relu", "bias": ROW},
    "norm_linear": {"x": X} | NORM | {"weight": ones(11, 4), "bias": ones(11)},
    "add_norm_linear": {"x": X, "residual": X} | NORM | {"weight": ones(11, 4), "bias": ones(11)},
    "feed_forward": {"x": X} | NORM | BLOCK | {"residual": X},
    "depth_mix": {"sources": [X, X], "weight": ones(2)} | dict.fromkeys(NORM, ones(2, 4)),
    "depth_attention": {"sources": [X, X], "query": ROW},
    "attention_residual": {"query": ROW, "residuals": [X, X], "output_rms_weight": ROW},
    "attention": {"q": Q, "k": Q, "v": Q} | LENGTHS,
    "linear_cross_entropy": {"x": X, "linear_weight": ones(7, 4)} | LOSS,
    "peephole_lstm": {"f": ones(2, 3, 8), "weight": ones(2, 8), "peephole": ones(3, 2)} | STATES,
}
"""A call of each op that it takes."""

WORDS = {
    "layer_norm": [
        ({"x": torch.tensor(1.0)}, r"x must be \(..., D\)"),
        ({"x": ones(3, 0)}, r"got \(3, 0\)"),
        ({"weight": ones(5)}, r"weight must be \(4,\), got \(5,\)"),
        ({"x": INT}, "torch.int32", BackendError),
    ],
    "rms_norm": [
        ({"weight": ones(5)}, r"rms_norm: weight must be \(4,\), got \(5,\)"),
        ({"x": INT}, "torch.int32", BackendError),
    ],
    "activation": [
        ({"activation": "tanh"}, "activation must be one of relu, gelu, got 'tanh'"),
        ({"activation": None}, "activation must be one of relu, gelu, got None"),
        ({"h": INT}, "torch.int32", BackendError),
    ],
    "norm_linear": [
        ({"weight": None}, "weight must be a tensor, got NoneType", TypeError),
        ({"weight": ones(11, 5)}, r"weight must be .*\(N, 4\) on cpu, got .*\(11, 5\) on cpu"),
        ({"weight": ones(11, 4).half()}, "weight must be torch.float32 .*, got torch.float16"),
    ],
    "depth_mix": [
        ({"sources": []}, "at least 1 tensor, got 0"),
        ({"sources": [X, 1]}, r"sources\[1\] must be a tensor, got int", TypeError),
        ({"sources": [X, ones(2, 4)]}, r"\[1\] must have sources\[0\]'s shape .*, got \(2, 4\)"),
        ({"sources": [X, X.half()]}, "torch.float32"),
        ({"sources": [X, ones(3, 4, device="meta")]}, "device cpu, got meta"),
        ({"weight": ones(3)}, r"must be \(2,\), got \(3,\)"),
        ({"weight": ones(3, 2)}, r"must be \(2, 4\), got \(3, 2\)"),
        ({"norm_bias": ones(3, 4)}, r"norm_bias must be \(2, 4\)"),
    ],
    "depth_attention": [
        ({"sources": []}, "at least 1 tensor, got 0"),
        ({"query": None}, "either query or scores, got neither"),
        ({"scores": ones(3, 2)}, "either query or scores, got both"),
        ({"query": ones(2, 5)}, r"query must be \(2, 4\), got \(2, 5\)"),
        ({"norm_type": "layer"}, "norm_type must be one of .*got 'layer'"),
        ({"norm_weight": ones(3)}, r"norm_weight must be \(4,\), got \(3,\)"),
        ({"norm_weight": X, "norm_type": None}, "needs a query and norm_type='rms'"),
        (SCORES | {"scores": ones(3, 3)}, r"scores must be \(3, 2\), got \(3, 3\)"),
        (SCORES | {"scores": ones(3, 5, 2)}, r"scores must be \(3, 2, 2\), got \(3, 5, 2\)"),
    ],
    "attention_residual": [
        ({"rms_weight": ones(3)}, r"rms_weight must be \(4,\)"),
        ({"residuals": ones(4)}, r"residuals must be \(K, ..., D\), got \(4,\)"),
        ({"residuals": None}, "residuals must be a list of tensors, got NoneType", TypeError),
        ({"residuals": []}, "residuals must hold at least 1 tensor, got 0"),
        ({"scale": math.nan}, "scale must be a finite number"),
        ({"rms_eps": -1.0}, "rms_eps must be a number of at least 0"),
        ({"residuals": [X.long()]}, "torch.int64", BackendError),
    ],
    "attention": [
        ({"q": ones(4, 16)}, r"q must be .*\(T, H, d\) on cpu, got .*\(4, 16\) on cpu"),
        (dict.fromkeys("kv", ones(4, 3, 16)), "k must have a divisor of q's 2 heads, got 3"),
        (dict.fromkeys("qkv", ones(4, 0, 16)), "divisor of q's 0 heads, got 0"),
        (dict.fromkeys("kv", ones(4, 0, 16)), "divisor of q's 2 heads, got 0"),
        ({"k": ones(4, 2, 15)}, r"k must be .*\(S, G, 16\) on cpu, got .*\(4, 2, 15\)"),
        ({"window": -2}, "window must be None, an integer .*, got -2"),
        ({"window": 1.5}, "window must be None, an integer .*, got 1.5"),
        ({"window": (1, 2, 3)}, r"a pair of them .*, got \(1, 2, 3\)"),
        ({"window": (1, True)}, r"a pair of them .*, got \(1, True\)"),
        ({"window": 2**63}, "window must be at most 9223372036854775807, got 9"),
        ({"k": Q.half()}, "k must be torch.float32 .*, got torch.float16"),
        ({"v": ones(3, 2, 16)}, r"v must be .*\(4, 2, 16\) on cpu, got .*\(3, 2, 16\)"),
        ({"cu_seqlens_q": [0, 4]}, "cu_seqlens_q must be a dense tensor, got list", TypeError),
        ({"cu_seqlens_k": offsets([3], "cpu")}, r"from 0 to the 4 tokens, .*got \[0, 3\]"),
        ({"cu_seqlens_q": offsets([5], "cpu")}, r"from 0 to the 4 tokens, .*got \[0, 5\]"),
        ({"cu_seqlens_q": CU.long()}, r"torch.int32 \(N \+ 1,\) on cpu, got torch.int64"),
        ({"cu_seqlens_k": CU - 1}, r"rise from 0 to the 4 tokens, by .*, got \[-1, 3\]"),
        ({"max_seqlen_q": 3}, r"by at most max_seqlen_q=3, got \[0, 4\]"),
        ({"max_seqlen_k": -1}, "max_seqlen_k must be an integer .* at least 0, got -1"),
        ({"max_seqlen_q": math.nan}, "attention: max_seqlen_q must be .*, got nan"),
        ({"scale": math.nan}, "attention: scale must be a finite number, got nan"),
        ({"backend": "varlen"}, "varlen: tensors are on cpu, not cuda", BackendError),
        ({"backend": "cuda"}, "on cpu, not cuda", BackendError),
        (dict.fromkeys("qkv", ones(4, 1, 257)) | {"backend": "triton"}, "d <= 256"),
    ],
    "linear_cross_entropy": [
        ({"linear_weight": None}, "linear_weight must be a tensor, got NoneType", TypeError),
        ({"linear_weight": ones(7, 5)}, r"_weight must be .*\(V, 4\) on cpu, got .*\(7, 5\)"),
        ({"linear_weight": ones(0, 4), "linear_bias": None}, r"target must be in \[0, 0\)"),
        ({"linear_weight": ones(7, 4).half()}, "must be torch.float32 .*, got torch.float16"),
        ({"linear_bias": ones(7).half()}, "_bias must be torch.float32 .*, got torch.float16"),
        ({"target": [1, 2, 3]}, "target must be a dense tensor, got list", TypeError),
        ({"target": TARGET.to_sparse()}, "a dense tensor, got torch.sparse", TypeError),
        ({"target": torch.tensor([0, 7, 1])}, r"target must be in \[0, 7\).*got 7"),
        ({"target": torch.tensor([0, -1, 1])}, r"\[0, 7\) or -100, got -1"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"reduction": "batchmean"}, "reduction must be one of mean, sum, none, got 'batchmean'"),
        ({"token_weight": ones(2)}, r"token_weight must be \(3,\), got \(2,\)"),
        ({"token_weight": ones(3).int()}, "token_weight must have a floating-point dtype, got"),
        ({"token_weight": ones(3).requires_grad_()}, "token_weight must not require a gradient"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"chunk_size": 10**30}, "chunk_size must be at most 9223372036854775807, got 1000"),
        ({"ignore_index": 2**31}, "ignore_index must be .* to 2147483647, got 2147483648"),
        ({"ignore_index": -(2**31) - 1}, "ignore_index must be an integer from -2147483648 to"),
        ({"x": INT}, "linear_weight must be torch.int32"),
    ],
    "peephole_lstm": [
        ({"f": ones(2, 8)}, r"f must be \(T, B, 4H\), got \(2, 8\)"),
        ({"f": ones(2, 3, 9)}, r"f must be \(T, B, 4H\), got \(2, 3, 9\)"),
        ({"weight": ones(2, 4)}, r"weight must be .*\(2, 8\) on cpu, got .*\(2, 4\)"),
        ({"weight": ones(2, 8).half()}, "weight must be torch.float32 .*, got torch.float16"),
        ({"h0": ones(2, 2)}, r"h0 must be .*\(3, 2\) on cpu, got .*\(2, 2\)"),
        ({"lengths": torch.tensor([1, 3, 0])}, "lengths must be from 0 to 2, got 0 to"),
        ({"lengths": torch.tensor([1, -1, 0])}, "from 0 to 2, got -1 to 1"),
    ],
    "feed_forward": [
        ({"up_weight": ones(21, 5)}, r"up_weight must be .*\(F, 4\) on cpu, got .*\(21, 5\)"),
        ({"down_weight": ones(11, 20)}, r"down_weight must be .*\(N, 21\) .* got .*\(11, 20\)"),
        ({"down_weight": ones(11, 21).double()}, "down_weight must be torch.float32 .*, got"),
        ({"activation": "silu"}, "activation must be one of relu, gelu, got 'silu'"),
        (ACTIVATION | {"activation_seed": 1.5}, "_seed must be an int .*, got 1.5", TypeError),
        ({"backend": "varlen"}, "varlen", BackendError),
    ],
}
"""By op: what is changed in such a call, words of the error's sentence, and its class where that is
not ValueError."""

OF_ARGUMENTS = [
    ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1, got 1.5"),
    ({"eps": math.nan}, "eps must be a number of at least 0, got nan"),
    ({"seed": 1.5} | DROPPED, "seed must be an int or a 0-dim int64 tensor on cpu, got", TypeError),
    ({"residual": ones(2, 4)}, r"shape \(3, 4\), got \(2, 4\)"),
    ({"residual": ones(3, 4).half()}, "dtype torch.float32, got"),
    ({"norm_type": "batch"}, "norm_type must be one of .*rms.*, got 'batch'"),
    ({"backend": "cud"}, "expected one of cuda, triton, .*, sdpa, reference", BackendError),
    ({"backend": [1]}, r"backend: expected one of .*got \[1\]", BackendError),
]
"""The same of every op that has the argument."""
PARAMETERS = {op: signature(getattr(ops, op)).parameters for op in GIVEN}


def called(op, **change):
    given = GIVEN[op] | change
    required = (name for name, p in PARAMETERS[op].items() if p.default is p.empty)
    first = [given.pop(name) for name in required if name not in LENGTHS]
    if op == "activation":
        return ops.activation(*first, **given)
    return getattr(ops, op)(*first, **given)


CASES = [(op, *refused) for op, table in WORDS.items() for refused in table]
NOT_A_TENSOR = {"residual": None}, "residual must be a tensor, got NoneType", TypeError
CASES += [(op, *NOT_A_TENSOR) for op in ("add_layer_norm", "add_rms_norm", "add_norm_linear")]
for refused in OF_ARGUMENTS:
    CASES += [(op, *refused) for op in GIVEN if next(iter(refused[0])) in PARAMETERS[op]]


@pytest.mark.parametrize(("op", "change", "words", "error"), [(*c, ValueError)[:4] for c in CASES])
def test_refuses(op, change, words, error):
    called(op)
    if "seed" in change and "training" in PARAMETERS[op]:
        change = change | {"training": True}
    with pytest.raises(error, match=words) as raised:
        called(op, **change)
    # Its own name, or that of the op whose kernels it runs.
    assert str(raised.value).startswith((f"{op}: ", "layer_norm: ", "depth_attention: "))


TENSORS = [(op, name) for op in GIVEN for name, x in GIVEN[op].items() if torch.is_tensor(x)]
# Without those that the others are compared with.
TENSORS = [each for each in TENSORS if each[1] not in ("x", "h", "f", "q", "cu_seqlens_q")]


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_the_shape_dtype_and_device_of_an_operand(op, name):
    x = GIVEN[op][name]
    dtype = torch.int32 if x.dtype != torch.int32 else torch.int64
    for wrong in (torch.cat((x, x), -1), x[None, None], x.to(dtype), x.to("meta")):
        of = next(a for a in ("shape", "dtype", "device") if getattr(wrong, a) != getattr(x, a))
        got = tuple(wrong.shape) if of == "shape" else getattr(wrong, of)
        words = rf"^{op}: {name} must (be|have) .*, got .*{re.escape(str(got))}"
        with pytest.raises(ValueError, match=words):
            called(op, **{name: wrong})


FLAGS = [
    (op, name)
    for op in GIVEN
    for name, argument in PARAMETERS[op].items()
    if isinstance(argument.default, bool)
]


@pytest.mark.parametrize("wrong", ["False", 1, None, torch.zeros(2)])
@pytest.mark.parametrize(("op", "flag"), FLAGS)
def test_a_flag_is_a_bool(op, flag, wrong):
    called(op, **{flag: True})
    with pytest.raises(ValueError, match=f"^{op}: {flag} must be True or False, got "):
        called(op, **{flag: wrong})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("op", GIVEN)
def test_a_tensor_is_a_dense_one(op):
    name, given = next((n, x) for n, x in GIVEN[op].items() if n != "query")
    listed = isinstance(given, list)
    x = given[0] if listed else given
    nested = torch.nested.nested_tensor([X, X[:2]])
    dense = "a dense tensor, got a"
    sparse = x.to_sparse(), f"{dense} torch.sparse"
    for wrong, words in (([1.0], "a tensor, got list"), sparse, (nested, f"{dense} nested one")):
        with pytest.raises(TypeError, match=rf"^{op}: .* must be {words}"):
            called(op, **{name: [wrong, x] if listed else wrong})
