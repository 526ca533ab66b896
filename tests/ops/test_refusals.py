"""Arguments that ops refuse, each with one sentence that begins with the op's name."""

import math
from inspect import signature

import pytest
import torch
from torch import ones

from deepfast import ops
from deepfast.backend import BackendError
from deepfast.cases.sentences import offsets

X, ROW, CU = ones(3, 4), ones(4), offsets([4], "cpu")
Q = ones(4, 2, 16)
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
GIVEN = {
    "layer_norm": {"x": X, "weight": ROW, "bias": ROW},
    "add_layer_norm": {"x": X, "residual": X, "weight": ROW, "bias": ROW},
    "rms_norm": {"x": X, "weight": ROW},
    "add_rms_norm": {"x": X, "residual": X, "weight": ROW},
    "activation": {"h": X, "activation": "relu"},
    "norm_linear": {"x": X, "norm_weight": None, "norm_bias": None, "weight": ones(11, 4)},
    "add_norm_linear": {
        "x": X, "residual": X, "norm_weight": ROW, "norm_bias": ROW, "weight": ones(11, 4)
    },
    "feed_forward": {
        "x": X, "norm_weight": ROW, "norm_bias": ROW, "up_weight": ones(21, 4),
        "up_bias": ones(21), "down_weight": ones(11, 21), "down_bias": ones(11),
    },
    "depth_mix": {"sources": [X, X], "weight": ones(2)},
    "depth_attention": {"sources": [X, X], "query": ROW},
    "attention_residual": {"query": ROW, "residuals": [X, X]},
    "attention": {"q": Q, "k": Q, "v": Q} | LENGTHS,
    "linear_cross_entropy": {
        "x": X, "linear_weight": ones(7, 4), "target": torch.tensor([0, 6, 1])
    },
    "peephole_lstm": {"f": ones(2, 3, 8), "weight": ones(2, 8), "peephole": ones(3, 2)},
}  # fmt: skip
"""A call of each op that it takes."""

REFUSED = {
    "layer_norm": [
        ({"x": torch.tensor(1.0)}, ValueError, r"x must be \(..., D\)"),
        ({"x": ones(3, 0)}, ValueError, r"got \(3, 0\)"),
        ({"weight": ones(5)}, ValueError, r"weight must be \(4,\), got \(5,\)"),
        ({"bias": ones(1, 4)}, ValueError, r"bias must be \(4,\), got \(1, 4\)"),
        ({"weight": ones(4, device="meta")}, ValueError, "weight must be on cpu, got meta"),
        ({"x": ones(3, 4).int()}, BackendError, "torch.int32"),
    ],
    "rms_norm": [
        ({"weight": ones(5)}, ValueError, r"rms_norm: weight must be \(4,\), got \(5,\)"),
        ({"x": ones(3, 4).int()}, BackendError, "torch.int32"),
    ],
    "activation": [
        ({"activation": "tanh"}, ValueError, "activation must be one of relu, gelu, got 'tanh'"),
        ({"bias": ones(3)}, ValueError, r"bias must be \(4,\), got \(3,\)"),
        ({"activation": None}, ValueError, "activation must be one of relu, gelu, got None"),
        ({"h": ones(3, 4).int()}, BackendError, "torch.int32"),
    ],
    "norm_linear": [
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"weight": ones(11, 5)}, ValueError, r"weight must be \(N, 4\), got \(11, 5\)"),
        ({"weight": ones(4)}, ValueError, r"weight must be \(N, 4\), got \(4,\)"),
        ({"weight": ones(11, 4).half()}, ValueError, "weight must be torch.float32 on cpu"),
        ({"bias": ones(4)}, ValueError, r"bias must be \(11,\), got \(4,\)"),
        ({"norm_weight": ones(5)}, ValueError, r"weight must be \(4,\), got \(5,\)"),
    ],
    "depth_mix": [
        ({"sources": []}, ValueError, "at least 1 tensor, got 0"),
        ({"sources": [ones(3, 4), 1]}, TypeError, r"sources\[1\] must be a tensor, got int"),
        ({"sources": [ones(3, 4), ones(2, 4)]}, ValueError,
         r"sources\[1\] must have sources\[0\]'s shape \(3, 4\), got \(2, 4\)"),
        ({"sources": [ones(3, 4), ones(3, 4).half()]}, ValueError, "torch.float32"),
        ({"sources": [ones(3, 4), ones(3, 4, device="meta")]}, ValueError,
         "device cpu, got meta"),
        ({"weight": ones(3)}, ValueError, r"must be \(2,\) or \(2, 4\), got \(3,\)"),
        ({"weight": ones(3, 2)}, ValueError, r"must be \(2,\) or \(2, 4\), got \(3, 2\)"),
        ({"weight": ones(2, 1)}, ValueError, r"got \(2, 1\)"),
        ({"weight": ones(2, device="meta")}, ValueError, "weight must be on cpu"),
        ({"norm_weight": ones(4)}, ValueError, r"norm_weight must be \(2, 4\), got \(4,\)"),
        ({"norm_bias": ones(3, 4)}, ValueError, r"norm_bias must be \(2, 4\)"),
    ],
    "depth_attention": [
        ({"sources": []}, ValueError, "at least 1 tensor, got 0"),
        ({"sources": [X, 1]}, TypeError, r"sources\[1\] must be a tensor, got int"),
        ({"sources": [X, ones(2, 4)]}, ValueError,
         r"sources\[1\] must have sources\[0\]'s shape \(3, 4\), got \(2, 4\)"),
        ({"query": None}, ValueError, "either query or scores, got neither"),
        ({"scores": ones(3, 2)}, ValueError, "either query or scores, got both"),
        ({"query": ones(5)}, ValueError, r"must be \(4,\) or \(H, 4\).*got \(5,\)"),
        ({"query": ones(0, 4)}, ValueError, r"H >= 1, got \(0, 4\)"),
        ({"query": ones(4, device="meta")}, ValueError, "query must be on cpu, got meta"),
        ({"norm_type": "layer"}, ValueError, "norm_type must be one of .*got 'layer'"),
        ({"norm_weight": ones(3)}, ValueError, r"norm_weight must be \(4,\), got \(3,\)"),
        ({"norm_weight": X, "norm_type": None}, ValueError, "needs a query and norm_type='rms'"),
        ({"query": None, "scores": ones(3, 3)}, ValueError,
         r"scores must be \(3, 2\), got \(3, 3\)"),
        ({"query": None, "scores": ones(3, 5, 2)}, ValueError,
         r"scores must be \(3, 2, 2\), got \(3, 5, 2\)"),
    ],
    "attention_residual": [
        ({"query": torch.zeros(3)}, (ValueError, TypeError), r"query must be \(4,\)"),
        ({"rms_weight": torch.zeros(3)}, (ValueError, TypeError), r"rms_weight must be \(4,\)"),
        ({"output_rms_weight": torch.zeros(3)}, (ValueError, TypeError),
         r"output_rms_weight must be \(4,\)"),
        ({"residuals": torch.zeros(4)}, (ValueError, TypeError),
         r"residuals must be \(K, ..., D\), got \(4,\)"),
        ({"residuals": None}, (ValueError, TypeError),
         "residuals must be a list of tensors, got NoneType"),
        ({"residuals": []}, (ValueError, TypeError),
         "residuals must hold at least 1 tensor, got 0"),
        ({"scale": float("nan")}, (ValueError, TypeError), "scale must be a finite number"),
        ({"rms_eps": -1.0}, (ValueError, TypeError), "rms_eps must be a number of at least 0"),
        ({"residuals": [torch.zeros(2, 4).long()]}, (ValueError, TypeError),
         "^attention_residual: residuals must have a floating-point dtype, got torch.int64"),
        ({"query": torch.zeros(4).long()}, (ValueError, TypeError),
         "query must have a floating-point dtype"),
        ({"query": torch.zeros(4, dtype=torch.complex64)}, (ValueError, TypeError),
         "query must have a floating-point dty"),
        ({"rms_weight": torch.zeros(4).long()}, (ValueError, TypeError),
         "rms_weight must have a floating-point dtype"),
    ],
    "attention": [
        ({"q": ones(4, 16)}, ValueError, r"q must be \(T, H, d\), got \(4, 16\)"),
        ({"k": ones(4, 3, 16)}, ValueError,
         r"divisor of q's heads, .* of \(2, 16\), got \(3, 16\)"),
        (dict.fromkeys("qkv", ones(4, 0, 16)), ValueError,
         r"divisor of q's heads, .* of \(0, 16\), got \(0, 16\)"),
        ({"k": ones(4, 0, 16)}, ValueError, r"divisor of q's heads, .*, got \(0, 16\)"),
        ({"k": ones(4, 2, 16 - 1)}, ValueError, r"and q's width, of \(2, 16\), got \(2, 15"),
        ({"window": -2}, ValueError, "window must be None, an integer .*, got -2"),
        ({"window": 1.5}, ValueError, "window must be None, an integer .*, got 1.5"),
        ({"window": (1, 2, 3)}, ValueError, r"a pair of them .*, got \(1, 2, 3\)"),
        ({"window": (1, True)}, ValueError, r"a pair of them .*, got \(1, True\)"),
        ({"window": 2**63}, ValueError, "window must be at most 9223372036854775807, got 9"),
        ({"k": ones(4, 2, 16).half()}, ValueError, "k must have q's dtype and device"),
        ({"v": ones(3, 2, 16)}, ValueError, r"v must have k's shape \(4, 2, 16\)"),
        ({"cu_seqlens_q": [0, 4]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, ValueError, r"\(N \+ 1,\) int32 on cpu, got"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, ValueError, r"shape \(2,\), got"),
        ({"cu_seqlens_k": offsets([3], "cpu")}, ValueError, r"from 0 to the 4 tokens, got \[0, 3"),
        ({"cu_seqlens_q": offsets([5], "cpu")}, ValueError, r"from 0 to the 4 tokens, got \[0, 5"),
        ({"max_seqlen_q": 3}, ValueError, "at least the longest sentence, 4, got 3"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be an integer .* at least 0, got -1"),
        ({"max_seqlen_q": math.nan}, ValueError, "attention: max_seqlen_q must be .*, got nan"),
        ({"scale": math.nan}, ValueError, "attention: scale must be a finite number, got nan"),
        ({"scale": math.inf}, ValueError, "attention: scale must be a finite number, got inf"),
        ({"scale": "a"}, ValueError, "attention: scale must be a finite number, got 'a'"),
        ({"backend": "varlen"}, BackendError, "varlen: tensors are on cpu, not cuda"),
        ({"backend": "cuda"}, BackendError, "on cpu, not cuda"),
        (dict.fromkeys("qkv", ones(4, 1, 257)) | {"backend": "triton"}, ValueError,
         "d <= 256"),
    ],
    "linear_cross_entropy": [
        ({"linear_weight": None}, TypeError, "linear_weight must be a tensor, got NoneType"),
        ({"linear_weight": ones(7, 5)}, ValueError, r"_weight must be \(V, 4\).*got \(7, 5\)"),
        ({"linear_weight": ones(0, 4)}, ValueError, r"with V >= 1, got \(0, 4\)"),
        ({"linear_weight": ones(7, 4).half()}, ValueError, "be torch.float32, got torch.float16"),
        ({"linear_weight": ones(7, 4, device="meta")}, ValueError, "weight must be on cpu, got me"),
        ({"linear_bias": ones(6)}, ValueError, r"linear_bias must be \(7,\), got \(6,\)"),
        ({"linear_bias": ones(7).half()}, ValueError, "linear_bias must be torch.float32, got to"),
        ({"target": [1, 2, 3]}, TypeError, "target must be a tensor, got list"),
        ({"target": torch.tensor([0, 6, 1]).to_sparse()}, TypeError, "target must be a dense ten"),
        ({"target": ones(3)}, ValueError, r"target must be torch.int64 \(3,\), got torch.fl"),
        ({"target": ones(3, 1).long()}, ValueError, r"got torch.int64 \(3, 1\)"),
        ({"target": torch.tensor([0, 7, 1])}, ValueError, r"target must be in \[0, 7\).*got 7"),
        ({"target": torch.tensor([0, -1, 1])}, ValueError, r"\[0, 7\) or -100, got -1"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing must be between 0 and 1"),
        ({"label_smoothing": "a"}, ValueError, "label_smoothing must be between 0 and 1, got 'a'"),
        ({"reduction": "none"}, ValueError, "reduction must be one of mean, sum, got 'none'"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be None or at least 1, got 0"),
        ({"x": ones(3, 4).int()}, ValueError, "linear_weight must be torch.int32"),
    ],
    "peephole_lstm": [
        ({"f": ones(2, 8)}, ValueError, r"f must be \(T, B, 4H\), got \(2, 8\)"),
        ({"f": ones(2, 3, 9)}, ValueError, r"f must be \(T, B, 4H\), got \(2, 3, 9\)"),
        ({"weight": ones(2, 4)}, ValueError, r"weight must be \(2, 8\), got \(2, 4\)"),
        ({"weight": ones(2, 8).half()}, ValueError, "weight must have f's dtype"),
        ({"peephole": ones(2)}, ValueError, r"peephole must be \(3, 2\), got \(2,\)"),
        ({"h0": ones(2, 2)}, ValueError, r"h0 must be \(3, 2\), got \(2, 2\)"),
        ({"c0": ones(3)}, ValueError, r"c0 must be \(3, 2\), got \(3,\)"),
        ({"lengths": ones(3)}, ValueError, "lengths must be int64, got torch.float32"),
        ({"lengths": torch.tensor([1, 3, 0])}, ValueError, "lengths must be from 0 to 2, got 0 to"),
        ({"lengths": torch.tensor([1, -1, 0])}, ValueError, "from 0 to 2, got -1 to 1"),
    ],
    "feed_forward": [
        ({"up_weight": ones(21, 5)}, ValueError, r"up_weight must be \(F, 4\), got \(21, 5\)"),
        ({"down_weight": ones(11, 20)}, ValueError,
         r"down_weight must be \(N, 21\), got \(11, 20\)"),
        ({"up_bias": ones(20)}, ValueError, r"up_bias must be \(21,\), got \(20,\)"),
        ({"down_weight": ones(11, 21).double()}, ValueError,
        "down_weight must be torch.float32 on"),
        ({"activation": "silu"}, ValueError, "activation must be one of relu, gelu, got 'silu'"),
        ({"activation_dropout_p": 0.5, "training": True, "activation_seed": 1.5}, TypeError,
         "activation_seed must be an int or a 0-dim int64 tensor on cpu, got 1.5"),
        ({"backend": "varlen"}, BackendError, "varlen"),
    ],
}  # fmt: skip
"""By op: what is changed in such a call, the error, and words of its sentence."""
for _op in ("add_layer_norm", "add_rms_norm", "add_norm_linear"):
    REFUSED[_op] = [({"residual": None}, TypeError, "residual must be a tensor, got NoneType")]

DROPPED = {"dropout_p": 0.5, "backend": "reference"}
OF_ARGUMENTS = [
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1, got -0.1"),
    ({"dropout_p": math.nan}, ValueError, "dropout_p must be between 0 and 1, got nan"),
    ({"dropout_p": "a"}, ValueError, "dropout_p must be between 0 and 1, got 'a'"),
    ({"eps": math.nan}, ValueError, "eps must be a number of at least 0, got nan"),
    ({"eps": -1}, ValueError, "eps must be a number of at least 0, got -1"),
    ({"eps": "a"}, ValueError, "eps must be a number of at least 0, got 'a'"),
    ({"seed": 1.5} | DROPPED, TypeError, "seed must be an int or a 0-dim int64 tensor on cpu, got"),
    ({"residual": ones(2, 4)}, ValueError, r"shape \(3, 4\), got \(2, 4\)"),
    ({"residual": ones(3, 4).half()}, ValueError, "dtype torch.float32, got"),
    ({"residual": ones(3, 4, device="meta")}, ValueError, "device cpu, got meta"),
    ({"norm_type": "batch"}, ValueError, "norm_type must be one of .*rms.*, got 'batch'"),
    ({"backend": "cud"}, BackendError, "expected one of cuda, triton, .*, sdpa, reference"),
    ({"backend": [1]}, BackendError, r"backend: expected one of .*got \[1\]"),
]  # fmt: skip
"""The same of every op that has the argument."""
PARAMETERS = {op: signature(getattr(ops, op)).parameters for op in GIVEN}


def called(op, **change):
    given = GIVEN[op] | change
    first = [given.pop(name) for name in GIVEN[op] if name not in LENGTHS]
    if op == "activation":
        return ops.activation(*first, **given)
    return getattr(ops, op)(*first, **given)


@pytest.mark.parametrize(
    ("op", "change", "error", "words"),
    [(op, *refused) for op, table in REFUSED.items() for refused in table]
    + [(op, *refused) for refused in OF_ARGUMENTS for op in GIVEN
       if next(iter(refused[0])) in PARAMETERS[op]],
)  # fmt: skip
def test_refuses(op, change, error, words):
    called(op)
    if "seed" in change and "training" in PARAMETERS[op]:
        change = change | {"training": True}
    with pytest.raises(error, match=words) as raised:
        called(op, **change)
    # Its own name, or that of the op whose kernels it runs.
    assert str(raised.value).startswith((f"{op}: ", "layer_norm: ", "depth_attention: "))


FLAGS = {
    "add_layer_norm": ["training"], "add_rms_norm": ["training"], "activation": ["training"],
    "add_norm_linear": ["training"], "attention": ["causal"], "peephole_lstm": ["reverse"],
    "feed_forward": ["training", "recompute", "return_norm"], "depth_attention": ["return_lse"],
    "attention_residual": ["return_weights"], "linear_cross_entropy": ["return_nll"],
}  # fmt: skip


@pytest.mark.parametrize("wrong", ["False", 1, None, torch.zeros(2)])
@pytest.mark.parametrize(("op", "flag"), [(op, f) for op in FLAGS for f in FLAGS[op]])
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
    for wrong, words in (
        ([1.0], "a tensor, got list"), (x.to_sparse(), f"{dense} torch.sparse"),
        (nested, f"{dense} nested one"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^{op}: .* must be {words}"):
            called(op, **{name: [wrong, x] if listed else wrong})


@pytest.mark.parametrize("op", ["depth_mix", "depth_attention"])
def test_sources_are_no_scalar(op):
    with pytest.raises(TypeError, match=f"^{op}: sources must be a list of tensors, got Tensor"):
        called(op, sources=torch.tensor(1.0))


@pytest.mark.parametrize(("name", "value", "bits"), [
    ("ignore_index", 2**31, 32), ("ignore_index", -(2**31) - 1, 32), ("chunk_size", 10**30, 64),
])  # fmt: skip
def test_whole_numbers_of_too_many_bits(name, value, bits):
    with pytest.raises(ValueError, match=f"{name} must fit into {bits} bits, got {value}"):
        called("linear_cross_entropy", **{name: value})
