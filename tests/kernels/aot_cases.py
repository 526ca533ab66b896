"""The launches that `aot.py` compiles: which operands they have, and at which sizes.

Operands are those of `deepfast.launches`.

Tensors are on the meta device: a shape, a dtype, strides and an aligned address, but no memory.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots

BF16, FP32 = torch.bfloat16, torch.float32

# Packed batches have any number of tokens: not a multiple of 16, so no kernel may count on it.
T = 8190
LAYERS = 100


def tensor(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(name, dtype, sizes, given):
    """The record of a launch: the operands of its table, at these sizes, but for those in
    ``given``, which may hold more names than the table. A list of tensors has K."""
    kinds = {"storage": dtype, "compute": FP32, "int32": torch.int32, "int64": torch.int64}
    sizes, made = {"T": T} | sizes, {}
    for o in LAUNCHES[name].operands:
        if o.name in given:
            made[o.name] = given[o.name]
            continue
        shape, kind = o.shape(sizes), kinds[o.dtype]
        if not o.dense and o.shapes[0][0] in "SB":
            x = empty_slots(shape[0], tensor(*shape[1:], dtype=kind))
        else:
            x = tensor(*shape, dtype=kind)
        made[o.name] = [x] * sizes["K"] if o.type == "Tensor[]" else x
    return LAUNCHES[name].record(**made)


# Each takes the launch's name and a case's sizes, and returns sizes and ``given`` of `operands`.


def layer_norm(name, D, fused=False, rms=False):
    absent = () if fused else ("residual", "dsum", "dresidual", "seed")
    absent = (*absent, "sum") if not fused and name.endswith("forward") else absent
    absent = (*absent, "mean", "bias", "dbias") if rms else absent
    given = {"eps": 1e-5, "rms": rms, "dropout_p": 0.1 if fused else 0.0}
    return {"D": D}, given | dict.fromkeys(absent)


def activation(_, kind, F):
    return {"D": F}, {"kind": kind, "dropout_p": 0.1}


def depth_mix(_, K, D):
    return {"D": D, "K": K}, {"norm": True, "eps": 1e-5}


def depth_attention(name, K, D, H=1, scored=False, weighted=False):
    """By queries, by given scores, or ``weighted`` by given weights."""
    norm = not (scored or weighted)
    absent = ("scores", "dscores") if norm else ("query", "dquery")
    if weighted:
        absent = (*absent, "lse", "most", "total", "dlse")
        absent = (*absent, "out") if name.endswith("backward") else absent
    return {"K": K, "H": H, "D": D}, {"eps": 1e-6, "norm": norm} | dict.fromkeys(absent)


NUMBERS = {"dropout_p": 0.1, "norm_source": True, "eps": 1e-6, "source_eps": 1e-5, "out_eps": 1e-5}
NO_BIAS = "norm_bias", "out_mean", "out_norm_bias", "dnorm_bias", "dout_norm_bias"


def engine(name, D, B=1, rms=False, kind="softmax", **lists):
    """A launch over the states of a stack. Attention residuals have statistics by softmax, and a
    bias by ReLU."""
    given = NUMBERS | {"source_rms": rms, "out_rms": rms, "accumulate": False} | lists
    given |= dict.fromkeys(NO_BIAS) if rms else {}
    if name.startswith("att"):
        absent = ("stats", "out_stats") if kind == "relu" else ("bias", "dbias")
        given |= {"kind": kind} | dict.fromkeys(absent)
    return {"D": D, "R": LAYERS + 1, "S": LAYERS + 2, "B": B}, given


def mix(name, B, D, **kind):
    first = LAYERS + 1 - B
    lists = {"rows": list(range(first, LAYERS + 1)), "out_rows": list(range(B))}
    return engine(name, D, B, sources=list(range(first)), **lists, **kind)


def pull(name, B, D, **kind):
    rows, sources = list(range(B, LAYERS + 1)), list(range(B))
    lists = {"rows": rows, "grad_slots": [r + 1 for r in rows], "out_rows": sources}
    return engine(name, D, B, sources=sources, **lists, **kind)


def forward(name, near, D, **kind):
    return engine(name, D, k=31, near=list(range(32 - near, 32)), **kind)


def backward(name, near, D, **kind):
    """A state in the middle of its block of ``near``."""
    k, pulls = 23 + near // 2, near - near // 2 + 1
    rows, slots = list(range(k, k + pulls)), list(range(k + 1, k + 1 + pulls))
    lists = {"near": list(range(24, k + 1)), "pull_rows": rows, "pull_slots": slots}
    return engine(name, D, k=k, grad_slot=k + 1, **lists, **kind)


def attention(_, length, causal=False, dtype=BF16, heads=8, group=1, left=-1, width=64):
    keys = heads // group
    given = {"max_seqlen_q": length, "max_seqlen_k": length, "dropout_p": 0.1}
    given |= {"left": left, "right": 0 if causal else left, "scale": width**-0.5}
    # As a projection gives them: views of one packed tensor.
    for d in ("", "d"):
        packed = tensor(T, heads + 2 * keys, width, dtype=dtype).split((heads, keys, keys), 1)
        given |= {d + x: view for x, view in zip(("q", "k", "v"), packed, strict=True)}
    return {"Q": T, "H": heads, "G": keys, "E": width, "N": 256}, given


def cross_entropy(_, V, rows=256):
    # One tensor of both losses, as in the op.
    given = dict(zip(("loss", "nll"), tensor(2, rows), strict=True))
    given |= {"label_smoothing": 0.1, "ignore_index": -100, "write_grad": True}
    return {"T": rows, "V": V}, given


def peephole_lstm(_, H):
    return {"P": 3, "N": 64, "H": H}, {"reverse": True}


@dataclass(frozen=True)
class Case:
    """One launch."""

    module: str
    """The file in kernels/."""
    launch: str
    given: Callable
    sizes: dict
    targets: tuple[int, ...]

    @property
    def name(self) -> str:
        dtype, *sizes = ({"dtype": BF16} | self.sizes).items()
        words = [key if value is True else f"{key}={value}" for key, value in sizes]
        return " ".join([self.launch, str(dtype[1]).removeprefix("torch."), *words])

    @property
    def launcher(self) -> Callable:
        return getattr(importlib.import_module(f"deepfast.kernels.{self.module}"), self.launch)

    def run(self, launcher: Callable) -> None:
        sizes = {"dtype": BF16} | self.sizes
        dtype = sizes["dtype"] if self.given is attention else sizes.pop("dtype")
        launcher(operands(self.launch, dtype, *self.given(self.launch, **sizes)))


def every(launches, **sizes):
    """For the main sizes: every target. A target of `aot.py` by hand takes all cases."""
    return [Case(*launch, sizes, (80, 90, 100)) for launch in launches]


def hopper(launches, **sizes):
    return [Case(*launch, sizes, (90,)) for launch in launches]


def both(op, forward, backward=None):
    return (op, f"{op}_forward", forward), (op, f"{op}_backward", backward or forward)


NORM = both("layer_norm", layer_norm)
ACTIVATION = both("activation", activation)
MIX = both("depth_mix", depth_mix)
DEPTH_ATTENTION = both("depth_attention", depth_attention)
ENGINE = ("mix_rows", "mix_rows", mix), ("mix_rows", "pull_rows", pull)
BOUNDARY = both("boundary", forward, backward)
ATTEND = ("attend_rows", "attend_rows", mix), ("attend_rows", "attend_pull", pull)
ATTENTION_BOUNDARY = both("attention_boundary", forward, backward)
LSTM = both("peephole_lstm", peephole_lstm)
ATTENTION = both("attention", attention)
LOSS = [("cross_entropy", "cross_entropy", cross_entropy)]

CASES = [
    *every(NORM, D=512, fused=True),
    *hopper(NORM, D=4096, fused=True),
    *hopper(NORM, D=512),
    *hopper(NORM, D=512, fused=True, dtype=FP32),
    *hopper(NORM, D=512, fused=True, rms=True),
    *every(ACTIVATION, kind="gelu", F=2048),
    *hopper(ACTIVATION, kind="relu", F=2048),
    *hopper(ACTIVATION, kind="gelu", F=2048, dtype=FP32),
    *every(MIX, K=16, D=512),
    *hopper(MIX, K=33, D=512),
    *hopper(MIX, K=16, D=512, dtype=FP32),
    *every(DEPTH_ATTENTION, K=16, D=512),
    *hopper(DEPTH_ATTENTION, K=33, D=512, H=4),
    *hopper(DEPTH_ATTENTION, K=7, D=512, H=4, scored=True),
    *hopper(DEPTH_ATTENTION, K=16, D=512, H=4, weighted=True),
    *hopper(DEPTH_ATTENTION, K=16, D=512, H=4, weighted=True, dtype=FP32),
    *hopper(DEPTH_ATTENTION, K=16, D=512, dtype=FP32),
    *every(ENGINE, B=8, D=512),
    *hopper(ENGINE, B=16, D=512),
    *hopper(ENGINE, B=8, D=512, dtype=FP32),
    *every(BOUNDARY, near=8, D=512),
    *hopper(BOUNDARY, near=8, D=4096),
    *hopper(BOUNDARY, near=8, D=512, dtype=FP32),
    *hopper(BOUNDARY, near=8, D=512, rms=True),
    *every(ATTEND, B=8, D=512),
    *hopper(ATTEND, B=16, D=512),
    *every(ATTEND, B=8, D=1024),
    *hopper(ATTEND, B=4, D=4096),
    *hopper(ATTEND, B=8, D=512, kind="relu"),
    *hopper(ATTEND, B=8, D=512, dtype=FP32),
    *every(ATTENTION_BOUNDARY, near=8, D=512),
    *hopper(ATTENTION_BOUNDARY, near=8, D=4096),
    *hopper(ATTENTION_BOUNDARY, near=8, D=512, kind="relu"),
    *hopper(ATTENTION_BOUNDARY, near=8, D=512, dtype=FP32),
    *hopper(ATTENTION_BOUNDARY, near=8, D=512, rms=True),
    *every(ATTENTION, length=128, causal=True),
    *every(ATTENTION, length=512, causal=True),
    *hopper(ATTENTION, length=64),
    *hopper(ATTENTION, length=512),
    *hopper(ATTENTION, length=128, dtype=FP32),
    *every(ATTENTION, length=128, causal=True, group=4),
    *every(ATTENTION, length=1024, causal=True, group=4, left=255),
    *hopper(ATTENTION, length=64, group=4),
    *hopper(ATTENTION, length=128, left=16),
    *hopper(ATTENTION, length=1024, left=64),
    *hopper(ATTENTION, length=1024, group=4, left=64, dtype=FP32),
    *hopper(ATTENTION, length=1024, causal=True, group=4, left=255, width=128),
    *every(LOSS, V=32000),
    *hopper(LOSS, V=32000, dtype=FP32),
    *every(LSTM, H=512),
    *hopper(LSTM, H=512, dtype=FP32),
]
