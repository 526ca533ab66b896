"""Arguments that ops refuse, each in one sentence that begins with the op and the argument."""

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
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
RMS = "rms_weight", "output_rms_weight"
NORM = {"norm_weight": ROW, "norm_bias": ROW}
UP = {"up_weight": ones(21, 4), "up_bias": ones(21)}
BLOCK = UP | {"down_weight": ones(11, 21), "down_bias": ones(11)}
LOSS = {"target": TARGET, "linear_bias": ones(7), "token_weight": ones(3)}
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
    "depth_attention": {"sources": [X, X], "query": ROW, "norm_weight": ROW},
    "attention_residual": {"query": ROW, "residuals": [X, X], **dict.fromkeys(RMS, ROW)},
    "attention": {"q": Q, "k": Q, "v": Q} | LENGTHS,
    "linear_cross_entropy": {"x": X, "linear_weight": ones(7, 4)} | LOSS,
    "peephole_lstm": {"f": ones(2, 3, 8), "weight": ones(2, 8), "peephole": ones(3, 2)} | STATES,
}
"""A call of each op that it takes."""

PARAMETERS = {op: signature(getattr(ops, op)).parameters for op in GIVEN}


def called(op, **change):
    return getattr(ops, op)(**GIVEN[op] | change)


PROBABILITY = ((1.5, "between 0 and 1, got 1.5"),)
NOT_A_SEED = 1.5, "an int or a 0-dim int64 tensor on cpu, got 1.5", TypeError
LENGTH = (-1, "an integer .* at least 0, got -1"), (math.nan, "an integer .*, got nan")
WRONG = {
    **dict.fromkeys(("eps", "rms_eps"), ((math.nan, "a number of at least 0, got nan"),)),
    **dict.fromkeys(("dropout_p", "activation_dropout_p", "label_smoothing"), PROBABILITY),
    "scale": [(math.nan, "a finite number, got nan")],
    "activation": [(wrong, f"one of relu, gelu, got {wrong!r}") for wrong in ("tanh", None)],
    "norm_type": [("batch", "one of .*rms.*, got 'batch'")],
    "reduction": [("batchmean", "one of mean, sum, none, got 'batchmean'")],
    **dict.fromkeys(("seed", "activation_seed"), (NOT_A_SEED,)),
    "chunk_size": [(0, "an integer of at least 1, got 0"), (10**30, "at most 9223372036854775807")],
    "ignore_index": [(2**31, ".* to 2147483647, got"), (-(2**31) - 1, ".* from -2147483648 to")],
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), LENGTH),
    "window": [
        (wrong, f"None, an integer .*a pair of them .*, got {re.escape(str(wrong))}")
        for wrong in (-2, 1.5, (1, 2, 3), (1, True))
    ],
    "backend": [
        (wrong, "expected one of cuda, .*sdpa, ref", BackendError) for wrong in ("cud", [1])
    ],
}
"""By argument: a wrong value, the words after its name, and the error's class where that is not
ValueError."""

SCORES = {"query": None, "norm_weight": None}


def of_keys(heads):
    return dict.fromkeys("kv", ones(4, heads, 16))


# What several arguments are together, and what a tensor holds.
TOGETHER = [
    ("layer_norm", {"x": torch.tensor(1.0)}, r"x must be \(..., D\)"),
    ("layer_norm", {"x": ones(3, 0)}, r"x must be .* got \(3, 0\)"),
    ("layer_norm", {"x": INT}, "torch.int32", BackendError),
    ("depth_mix", {"sources": []}, "at least 1 tensor, got 0"),
    ("depth_mix", {"sources": [X, ones(2, 4)]}, r"sources\[1\] .*shape .*, got \(2, 4\)"),
    ("depth_mix", {"weight": ones(3, 2)}, r"must be \(2, 4\), got \(3, 2\)"),
    ("depth_attention", {"query": None}, "either query or scores, got neither"),
    ("depth_attention", {"scores": ones(3, 2)}, "either query or scores, got both"),
    ("depth_attention", {"query": ones(2, 5)}, r"query must be \(2, 4\), got \(2, 5\)"),
    ("depth_attention", {"norm_type": None}, "norm_weight needs a query and norm_type='rms'"),
    ("depth_attention", {"scores": ones(3, 5, 2)} | SCORES, r"\(3, 2, 2\), got \(3, 5, 2\)"),
    ("attention_residual", {"residuals": ones(4)}, r"residuals must be \(K, ..., D\), got \(4,\)"),
    ("attention", {"q": ones(4, 16)}, r"q must be .*\(T, H, d\) on cpu, got .*\(4, 16\) on cpu"),
    ("attention", of_keys(3), "k must have a divisor of q's 2 heads, got 3"),
    ("attention", of_keys(0) | {"q": ones(4, 0, 16)}, "divisor of q's 0 heads, got 0"),
    ("attention", {"window": 2**63}, "window must be at most 9223372036854775807, got 9"),
    ("attention", {"cu_seqlens_k": offsets([3], "cpu")}, r"from 0 to the 4 tokens, .*got \[0, 3\]"),
    ("attention", {"cu_seqlens_k": CU - 1}, r"rise from 0 to the 4 tokens, by .*, got \[-1, 3\]"),
    ("attention", {"max_seqlen_q": 3}, r"by at most max_seqlen_q=3, got \[0, 4\]"),
    ("attention", {"backend": "varlen"}, "varlen: tensors are on cpu, not cuda", BackendError),
    ("attention", dict.fromkeys("qkv", ones(4, 1, 257)) | {"backend": "triton"}, "d <= 256"),
    ("linear_cross_entropy", {"target": torch.tensor([0, 7, 1])}, r"in \[0, 7\).*got 7"),
    ("linear_cross_entropy", {"target": torch.tensor([0, -1, 1])}, r"\[0, 7\) or -100, got -1"),
    ("linear_cross_entropy", {"token_weight": ones(3).requires_grad_()}, "not require a gradient"),
    ("peephole_lstm", {"f": ones(2, 3, 9)}, r"f must be \(T, B, 4H\), got \(2, 3, 9\)"),
    ("peephole_lstm", {"lengths": torch.tensor([1, 3, 0])}, "from 0 to 2, got 0 to 3"),
    ("peephole_lstm", {"lengths": torch.tensor([1, -1, 0])}, "from 0 to 2, got -1 to 1"),
]


def generated():
    """By the ops' signatures. The first operand is what the others are compared with."""
    for op, parameters in PARAMETERS.items():
        for name, p in parameters.items():
            for wrong, words, *error in WRONG.get(name, ()):
                before = "" if name == "backend" else rf"{name} must (be )?"
                if name != "window" or op == "attention":
                    yield op, {name: wrong}, before + words, *error
            if isinstance(p.default, bool):
                for wrong in ("False", 1, None, torch.zeros(2)):
                    yield op, {name: wrong}, f"{name} must be True or False, got "
            x = GIVEN[op].get(name)
            if torch.is_tensor(x):
                yield op, {name: [1.0]}, f"{name} must be a (dense )?tensor.*, got list", TypeError
                if p.default is p.empty and "None" not in str(p.annotation):
                    yield op, {name: None}, f"{name} must be a .*tensor, got NoneType", TypeError
            if torch.is_tensor(x) and name not in ("x", "h", "f", "q", "cu_seqlens_q"):
                dtype = torch.int32 if x.dtype != torch.int32 else torch.int64
                wide = torch.cat((x, x), -1)
                words = f"{name} must (be|have) .*, got .*"
                yield op, {name: wide}, words + re.escape(str(tuple(wide.shape)))
                yield op, {name: x.to(dtype)}, words + str(dtype)
                yield op, {name: x.to("meta")}, words + "meta"


CASES = [(*case, ValueError)[:4] for case in (*TOGETHER, *generated())]


@pytest.mark.parametrize(("op", "change", "words", "error"), CASES)
def test_refuses(op, change, words, error):
    called(op)
    if any("seed" in name for name in change):
        dropped = {"training": True, "dropout_p": 0.5, "activation_dropout_p": 0.5}
        change = change | {n: x for n, x in dropped.items() if n in PARAMETERS[op]}
        change |= {"backend": "reference"}
    with pytest.raises(error, match=words) as raised:
        called(op, **change)
    # Its own name, or that of the op whose kernels it runs.
    assert str(raised.value).startswith((f"{op}: ", "layer_norm: ", "depth_attention: "))
