"""The calls of launchers that `aot.py` compiles: one function per launcher, with its name.

Operands are those of `deepfast.launches`.

Tensors are on the meta device: a shape, a dtype, strides and an aligned address, but no memory.
"""

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


def call(launch, name, dtype, sizes, *, absent=(), lists=None, **given):
    """Calls a launcher with the operands of its table, of these sizes; ``absent`` ones are None.

    lists: the number of tensors in a list. given: operands that are no tensors, or are other ones
    than the table gives.
    """
    kinds = {"storage": dtype, "compute": FP32, "int32": torch.int32, "int64": torch.int64}
    for operand in LAUNCHES[name].operands:
        if operand.name in given:
            continue
        if operand.name in absent:
            given[operand.name] = None
            continue
        shape, kind = operand.shape(sizes), kinds[operand.dtype]
        if not operand.dense and operand.shapes[0][0] in "SB":
            x = empty_slots(shape[0], tensor(*shape[1:], dtype=kind))
        else:
            x = tensor(*shape, dtype=kind)
        given[operand.name] = [x] * lists if operand.type == "Tensor[]" else x
    launch(LAUNCHES[name].record(*(given[name] for name in LAUNCHES[name].names)))


def layer_norm_forward(launch, D, dtype=BF16, fused=False, rms=False):
    absent, p = ((), 0.1) if fused else (("residual", "sum", "seed"), 0.0)
    absent, sizes = (*absent, *(("mean", "bias") if rms else ())), {"T": T, "D": D}
    call(launch, "layer_norm_forward", dtype, sizes, absent=absent, eps=1e-5, rms=rms, dropout_p=p)


def layer_norm_backward(launch, D, dtype=BF16, fused=False, rms=False):
    absent, p = ((), 0.1) if fused else (("dsum", "dresidual", "seed"), 0.0)
    absent, sizes = (*absent, *(("mean", "dbias") if rms else ())), {"T": T, "D": D}
    call(launch, "layer_norm_backward", dtype, sizes, absent=absent, rms=rms, dropout_p=p)


def activation_forward(launch, kind, F, dtype=BF16):
    call(launch, "activation_forward", dtype, {"T": T, "D": F}, kind=kind, dropout_p=0.1)


def activation_backward(launch, kind, F, dtype=BF16):
    call(launch, "activation_backward", dtype, {"T": T, "D": F}, kind=kind, dropout_p=0.1)


def depth_mix_forward(launch, K, D, dtype=BF16, norm=True):
    sizes = {"T": T, "D": D, "K": K}
    call(launch, "depth_mix_forward", dtype, sizes, lists=K, norm=norm, eps=1e-5)


def depth_mix_backward(launch, K, D, dtype=BF16, norm=True):
    call(launch, "depth_mix_backward", dtype, {"T": T, "D": D, "K": K}, lists=K, norm=norm)


def attended(launch, name, K, H, D, dtype, scored, weighted):
    """Attention over depth by queries, or by given scores; ``weighted`` sums by given weights."""
    absent, sizes = ("scores", "dscores"), {"K": K, "H": H, "T": T, "D": D}
    if scored or weighted:
        absent = ("query", "dquery")
    if weighted:
        absent = (*absent, "lse", "most", "total", "dlse")
        absent = (*absent, "out") if name.endswith("backward") else absent
    norm = not (scored or weighted)
    call(launch, name, dtype, sizes, absent=absent, lists=K, eps=1e-6, norm=norm)


def depth_attention_forward(launch, K, D, H=1, dtype=BF16, scored=False, weighted=False):
    attended(launch, "depth_attention_forward", K, H, D, dtype, scored, weighted)


def depth_attention_backward(launch, K, D, H=1, dtype=BF16, scored=False, weighted=False):
    attended(launch, "depth_attention_backward", K, H, D, dtype, scored, weighted)


NUMBERS = {"dropout_p": 0.1, "norm_source": True, "eps": 1e-6, "source_eps": 1e-5, "out_eps": 1e-5}
NO_BIAS = "norm_bias", "out_mean", "out_norm_bias", "dnorm_bias", "dout_norm_bias"


def engine(launch, name, D, dtype, B=1, rms=False, **given):
    """A launch over the states of a stack."""
    sizes = {"T": T, "D": D, "R": LAYERS + 1, "S": LAYERS + 2, "B": B}
    given |= NUMBERS | {"source_rms": rms, "out_rms": rms, "accumulate": False}
    call(launch, name, dtype, sizes, absent=NO_BIAS if rms else (), **given)


def mix(launch, name, B, D, dtype, **kind):
    first = LAYERS + 1 - B
    lists = {"rows": list(range(first, LAYERS + 1)), "out_rows": list(range(B))}
    engine(launch, name, D, dtype, B, sources=list(range(first)), **lists, **kind)


def pull(launch, name, B, D, dtype, **kind):
    rows, sources = list(range(B, LAYERS + 1)), list(range(B))
    lists = {"rows": rows, "grad_slots": [r + 1 for r in rows], "out_rows": sources}
    engine(launch, name, D, dtype, B, sources=sources, **lists, **kind)


def forward(launch, name, near, D, dtype, rms, **kind):
    engine(launch, name, D, dtype, rms=rms, k=31, near=list(range(32 - near, 32)), **kind)


def backward(launch, name, near, D, dtype, rms, **kind):
    """A state in the middle of its block of ``near``."""
    k, pulls = 23 + near // 2, near - near // 2 + 1
    rows, slots = list(range(k, k + pulls)), list(range(k + 1, k + 1 + pulls))
    lists = {"near": list(range(24, k + 1)), "pull_rows": rows, "pull_slots": slots}
    engine(launch, name, D, dtype, rms=rms, k=k, grad_slot=k + 1, **lists, **kind)


def mix_rows(launch, B, D, dtype=BF16):
    mix(launch, "mix_rows", B, D, dtype)


def pull_rows(launch, B, D, dtype=BF16):
    pull(launch, "pull_rows", B, D, dtype)


def boundary_forward(launch, near, D, dtype=BF16, rms=False):
    forward(launch, "boundary_forward", near, D, dtype, rms)


def boundary_backward(launch, near, D, dtype=BF16, rms=False):
    backward(launch, "boundary_backward", near, D, dtype, rms)


def by_kind(kind, stats, *gradients):
    """Attention residuals have statistics by softmax, and a bias by ReLU."""
    return {"kind": kind} | (
        {stats: None} if kind == "relu" else dict.fromkeys(("bias", *gradients))
    )


def attend_rows(launch, B, D, dtype=BF16, kind="softmax"):
    mix(launch, "attend_rows", B, D, dtype, **by_kind(kind, "out_stats"))


def attend_pull(launch, B, D, dtype=BF16, kind="softmax"):
    pull(launch, "attend_pull", B, D, dtype, **by_kind(kind, "stats", "dbias"))


def attention_boundary_forward(launch, near, D, dtype=BF16, kind="softmax", rms=False):
    name = "attention_boundary_forward"
    forward(launch, name, near, D, dtype, rms, **by_kind(kind, "stats"))


def attention_boundary_backward(launch, near, D, dtype=BF16, kind="softmax", rms=False):
    name = "attention_boundary_backward"
    backward(launch, name, near, D, dtype, rms, **by_kind(kind, "stats", "dbias"))


def attention(launch, name, length, causal=False, dtype=BF16, heads=8, group=1, left=-1, width=64):
    keys = heads // group
    sizes = {"T": T, "Q": T, "H": heads, "G": keys, "E": width, "N": 256}
    given = {"max_seqlen_q": length, "max_seqlen_k": length, "dropout_p": 0.1}
    given |= {"left": left, "right": 0 if causal else left, "scale": width**-0.5}
    # As a projection gives them: views of one packed tensor.
    for d in ("", "d") if name == "attention_backward" else ("",):
        packed = tensor(T, heads + 2 * keys, width, dtype=dtype).split((heads, keys, keys), 1)
        given |= {d + x: view for x, view in zip(("q", "k", "v"), packed, strict=True)}
    call(launch, name, dtype, sizes, **given)


def attention_forward(launch, length, **options):
    attention(launch, "attention_forward", length, **options)


def attention_backward(launch, length, **options):
    attention(launch, "attention_backward", length, **options)


def cross_entropy(launch, V, dtype=BF16, rows=256):
    # One tensor of both losses, as in the op.
    given = dict(zip(("loss", "nll"), tensor(2, rows), strict=True))
    given |= {"label_smoothing": 0.1, "ignore_index": -100, "write_grad": True}
    call(launch, "cross_entropy", dtype, {"T": rows, "V": V}, **given)


def peephole_lstm_forward(launch, H, dtype=BF16):
    call(launch, "peephole_lstm_forward", dtype, {"P": 3, "N": 64, "H": H}, reverse=True)


def peephole_lstm_backward(launch, H, dtype=BF16):
    call(launch, "peephole_lstm_backward", dtype, {"P": 3, "N": 64, "H": H}, reverse=True)


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    module: str
    """The file in kernels/."""
    call: Callable
    """Takes the launcher, whose name it has, and the sizes."""
    sizes: dict
    targets: tuple[int, ...]

    @property
    def name(self) -> str:
        dtype, *sizes = ({"dtype": BF16} | self.sizes).items()
        words = [key if value is True else f"{key}={value}" for key, value in sizes]
        return " ".join([self.call.__name__, str(dtype[1]).removeprefix("torch."), *words])


def every(module, *calls, **sizes):
    """For the main sizes: every target. A target of `aot.py` by hand takes all cases."""
    return [Case(module, call, sizes, (80, 90, 100)) for call in calls]


def hopper(module, *calls, **sizes):
    return [Case(module, call, sizes, (90,)) for call in calls]


NORM = ("layer_norm", layer_norm_forward, layer_norm_backward)
ACTIVATION = ("activation", activation_forward, activation_backward)
MIX = ("depth_mix", depth_mix_forward, depth_mix_backward)
DEPTH_ATTENTION = ("depth_attention", depth_attention_forward, depth_attention_backward)
ENGINE = ("mix_rows", mix_rows, pull_rows)
BOUNDARY = ("boundary", boundary_forward, boundary_backward)
ATTEND = ("attend_rows", attend_rows, attend_pull)
ATTENTION_BOUNDARY = "attention_boundary", attention_boundary_forward, attention_boundary_backward
LSTM = ("peephole_lstm", peephole_lstm_forward, peephole_lstm_backward)
ATTENTION = ("attention", attention_forward, attention_backward)

CASES = [
    *every(*NORM, D=512, fused=True),
    *hopper(*NORM, D=4096, fused=True),
    *hopper(*NORM, D=512),
    *hopper(*NORM, D=512, fused=True, dtype=FP32),
    *hopper(*NORM, D=512, fused=True, rms=True),
    *every(*ACTIVATION, kind="gelu", F=2048),
    *hopper(*ACTIVATION, kind="relu", F=2048),
    *hopper(*ACTIVATION, kind="gelu", F=2048, dtype=FP32),
    *every(*MIX, K=16, D=512),
    *hopper(*MIX, K=33, D=512),
    *hopper(*MIX, K=16, D=512, dtype=FP32),
    *every(*DEPTH_ATTENTION, K=16, D=512),
    *hopper(*DEPTH_ATTENTION, K=33, D=512, H=4),
    *hopper(*DEPTH_ATTENTION, K=7, D=512, H=4, scored=True),
    *hopper(*DEPTH_ATTENTION, K=16, D=512, H=4, weighted=True),
    *hopper(*DEPTH_ATTENTION, K=16, D=512, H=4, weighted=True, dtype=FP32),
    *hopper(*DEPTH_ATTENTION, K=16, D=512, dtype=FP32),
    *every(*ENGINE, B=8, D=512),
    *hopper(*ENGINE, B=16, D=512),
    *hopper(*ENGINE, B=8, D=512, dtype=FP32),
    *every(*BOUNDARY, near=8, D=512),
    *hopper(*BOUNDARY, near=8, D=4096),
    *hopper(*BOUNDARY, near=8, D=512, dtype=FP32),
    *hopper(*BOUNDARY, near=8, D=512, rms=True),
    *every(*ATTEND, B=8, D=512),
    *hopper(*ATTEND, B=16, D=512),
    *every(*ATTEND, B=8, D=1024),
    *hopper(*ATTEND, B=4, D=4096),
    *hopper(*ATTEND, B=8, D=512, kind="relu"),
    *hopper(*ATTEND, B=8, D=512, dtype=FP32),
    *every(*ATTENTION_BOUNDARY, near=8, D=512),
    *hopper(*ATTENTION_BOUNDARY, near=8, D=4096),
    *hopper(*ATTENTION_BOUNDARY, near=8, D=512, kind="relu"),
    *hopper(*ATTENTION_BOUNDARY, near=8, D=512, dtype=FP32),
    *hopper(*ATTENTION_BOUNDARY, near=8, D=512, rms=True),
    *every(*ATTENTION, length=128, causal=True),
    *every(*ATTENTION, length=512, causal=True),
    *hopper(*ATTENTION, length=64),
    *hopper(*ATTENTION, length=512),
    *hopper(*ATTENTION, length=128, dtype=FP32),
    *every(*ATTENTION, length=128, causal=True, group=4),
    *every(*ATTENTION, length=1024, causal=True, group=4, left=255),
    *hopper(*ATTENTION, length=64, group=4),
    *hopper(*ATTENTION, length=128, left=16),
    *hopper(*ATTENTION, length=1024, left=64),
    *hopper(*ATTENTION, length=1024, group=4, left=64, dtype=FP32),
    *hopper(*ATTENTION, length=1024, causal=True, group=4, left=255, width=128),
    *every("cross_entropy", cross_entropy, V=32000),
    *hopper("cross_entropy", cross_entropy, V=32000, dtype=FP32),
    *every(*LSTM, H=512),
    *hopper(*LSTM, H=512, dtype=FP32),
]
