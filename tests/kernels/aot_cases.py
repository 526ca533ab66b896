"""The calls of launchers that `aot.py` compiles: one function per launcher, named as it is.

Tensors are on the meta device: a shape, a dtype, strides and an aligned address, but no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepfast.depth.state import empty_slots

BF16, FP32 = torch.bfloat16, torch.float32

# Packed batches have any number of tokens: not a multiple of 16, so no kernel may count on it.
T = 8190
LAYERS = 100


def tensor(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def dropout(p):
    """A launcher's two dropout operands."""
    return {"dropout_p": p, "seed": tensor(dtype=torch.int64) if p else None}


def layer_norm_forward(launch, D, dtype=BF16, fused=False):
    x = tensor(T, D, dtype=dtype)
    launch(
        x=x, residual=x if fused else None, weight=tensor(D), bias=tensor(D), eps=1e-5,
        **dropout(0.1 if fused else 0.0), sum=x if fused else None, y=x, mean=tensor(T),
        rstd=tensor(T),
    )  # fmt: skip


def layer_norm_backward(launch, D, dtype=BF16, fused=False):
    x = tensor(T, D, dtype=dtype)
    launch(
        sum=x, dy=x, dsum=x if fused else None, weight=tensor(D), mean=tensor(T), rstd=tensor(T),
        **dropout(0.1 if fused else 0.0), dx=x, dresidual=x if fused else None, dweight=tensor(D),
        dbias=tensor(D),
    )  # fmt: skip


def activation_forward(launch, kind, F, dtype=BF16):
    h = tensor(T, F, dtype=dtype)
    launch(h=h, kind=kind, **dropout(0.1), out=h)


def activation_backward(launch, kind, F, dtype=BF16):
    x = tensor(T, F, dtype=dtype)
    launch(dout=x, saved=x, kind=kind, **dropout(0.1), dh=x)


def depth_mix_forward(launch, K, D, dtype=BF16, norm=True):
    x = tensor(T, D, dtype=dtype)
    launch(
        sources=[x] * K, weight=tensor(K), norm_weight=tensor(K, D), norm_bias=tensor(K, D),
        norm=norm, eps=1e-5, out=x, mean=tensor(K, T), rstd=tensor(K, T),
    )  # fmt: skip


def depth_mix_backward(launch, K, D, dtype=BF16, norm=True):
    x = tensor(T, D, dtype=dtype)
    launch(
        sources=[x] * K, weight=tensor(K), norm_weight=tensor(K, D), norm_bias=tensor(K, D),
        norm=norm, mean=tensor(K, T), rstd=tensor(K, T), dout=x, dsources=[x] * K,
        dweight=tensor(K), dnorm_weight=tensor(K, D), dnorm_bias=tensor(K, D),
    )  # fmt: skip


def attended(K, H, D, dtype, scored):
    """Operands of attention over depth: by queries, or by given scores."""
    x, query = tensor(T, D, dtype=dtype), None if scored else tensor(H, D)
    scores = tensor(T, K, H) if scored else None
    statistics = {"most": tensor(T, H), "total": tensor(T, H)}
    given = {"sources": [x] * K, "query": query, "scores": scores, "norm": not scored, "eps": 1e-6}
    return x, given | {"out": tensor(T * H, D, dtype=dtype)} | statistics


def depth_attention_forward(launch, K, D, H=1, dtype=BF16, scored=False):
    _, given = attended(K, H, D, dtype, scored)
    launch(**given, lse=tensor(T, H))


def depth_attention_backward(launch, K, D, H=1, dtype=BF16, scored=False):
    x, given = attended(K, H, D, dtype, scored)
    launch(
        **given, dout=tensor(T * H, D, dtype=dtype), dlse=tensor(T, H), dsources=[x] * K,
        dquery=None if scored else tensor(H, D), dscores=tensor(T, K, H) if scored else None,
    )  # fmt: skip


def engine(D, dtype):
    """A (T, D) tensor, the engine's states, and the weights that mix them."""
    rows, x = LAYERS + 1, tensor(T, D, dtype=dtype)
    weights = {
        "weight": tensor(rows, rows),
        "norm_weight": tensor(rows, D),
        "norm_bias": tensor(rows, D),
    }
    return x, empty_slots(rows + 1, x), weights


def mix_rows(launch, B, D, dtype=BF16):
    x, states, weights = engine(D, dtype)
    first = LAYERS + 1 - B
    launch(
        states=states, sources=list(range(first)), **weights, rows=list(range(first, LAYERS + 1)),
        out=empty_slots(B, x), out_rows=list(range(B)), accumulate=False,
    )  # fmt: skip


def pull_rows(launch, B, D, dtype=BF16):
    x, states, weights = engine(D, dtype)
    rows = list(range(B, LAYERS + 1))
    launch(
        grads=states, grad_slots=[r + 1 for r in rows], rows=rows, states=states,
        sources=list(range(B)), **weights, out=empty_slots(B, x), out_rows=list(range(B)),
        accumulate=False, dweight=torch.empty_like(weights["weight"]),
    )  # fmt: skip


def boundary_forward(launch, near, D, dtype=BF16):
    x, states, weights = engine(D, dtype)
    launch(
        branch=x, residual=x, **dropout(0.1), states=states, k=31,
        near=list(range(32 - near, 32)), **weights, norm_source=True, source_eps=1e-5,
        partial=x, out_norm_weight=tensor(D), out_norm_bias=tensor(D), out_eps=1e-5, x=x, out=x,
        source_rstd=tensor(T), out_mean=tensor(T), out_rstd=tensor(T),
    )  # fmt: skip


def boundary_backward(launch, near, D, dtype=BF16):
    """A state in the middle of its block of ``near``."""
    x, states, weights = engine(D, dtype)
    k, pulls = 23 + near // 2, near - near // 2 + 1
    launch(
        states=states, k=k, near=list(range(24, k + 1)), **weights,
        norm_source=True, partial=x, out_norm_weight=tensor(D), out_norm_bias=tensor(D),
        source_rstd=tensor(T), out_mean=tensor(T), out_rstd=tensor(T), **dropout(0.1), dx=x,
        dout=x, grads=states, grad_slot=k + 1,
        pull_rows=list(range(k, k + pulls)),
        pull_slots=list(range(k + 1, k + 1 + pulls)), pulled=x, dbranch=x, dresidual=x,
        dweight=torch.empty_like(weights["weight"]), dnorm_weight=tensor(D), dnorm_bias=tensor(D),
        dout_norm_weight=tensor(D), dout_norm_bias=tensor(D),
    )  # fmt: skip


def attention(length, causal, dtype, heads, width):
    """What both launches of attention take."""
    # As a projection leaves them: views of one packed tensor.
    q, k, v = tensor(T, 3, heads, width, dtype=dtype).unbind(1)
    seqlens = tensor(257, dtype=torch.int32)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": seqlens, "cu_seqlens_k": seqlens,
        "max_seqlen_q": length, "max_seqlen_k": length, "causal": causal, "scale": width**-0.5,
        **dropout(0.1), "o": tensor(T, heads, width, dtype=dtype), "lse": tensor(heads, T),
    }  # fmt: skip


def attention_forward(launch, length, causal=False, dtype=BF16, heads=8, width=64):
    launch(**attention(length, causal, dtype, heads, width))


def attention_backward(launch, length, causal=False, dtype=BF16, heads=8, width=64):
    dq, dk, dv = tensor(T, 3, heads, width, dtype=dtype).unbind(1)
    do = tensor(T, heads, width, dtype=dtype)
    launch(**attention(length, causal, dtype, heads, width), do=do, dq=dq, dk=dk, dv=dv)


def cross_entropy(launch, V, dtype=BF16, rows=256):
    losses = tensor(2, rows)
    launch(
        logits=tensor(rows, V, dtype=dtype), target=tensor(rows, dtype=torch.int64),
        label_smoothing=0.1, ignore_index=-100, write_grad=True, loss=losses[0], nll=losses[1],
    )  # fmt: skip


def peephole_lstm(H, dtype, steps=3, batch=64):
    """What both launches of the LSTM take; lengths make no other kernel of the rest."""
    state = tensor(batch, H)
    return {
        "weight": tensor(H, 4 * H, dtype=dtype), "peephole": tensor(3, H), "c0": state,
        "lengths": tensor(batch, dtype=torch.int64), "reverse": True, "c": tensor(steps, batch, H),
        "gates": tensor(steps, batch, 4 * H, dtype=dtype),
    }  # fmt: skip


def peephole_lstm_forward(launch, H, dtype=BF16):
    given = peephole_lstm(H, dtype)
    h = torch.empty_like(given["c"], dtype=dtype)
    launch(**given, f=given["gates"], h0=h[0], h=h, h_last=h[0], c_last=given["c0"])


def peephole_lstm_backward(launch, H, dtype=BF16):
    given = peephole_lstm(H, dtype)
    dh, dc = torch.empty_like(given["c"], dtype=dtype), given["c0"]
    launch(
        **given, dh=dh, dh_last=dh[0], dc_last=dc, df=given["gates"], dh0=dh[0], dc0=dc,
        dpeephole=given["peephole"],
    )  # fmt: skip


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
    def main(self) -> bool:
        """Compiled even where nothing changed."""
        return len(self.targets) > 1

    @property
    def name(self) -> str:
        words = [
            str(value).removeprefix("torch.") if key == "dtype"
            else key if value is True else f"{key}={value}"
            for key, value in ({"dtype": BF16} | self.sizes).items()
        ]  # fmt: skip
        return " ".join([self.call.__name__, *words])


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
LSTM = ("peephole_lstm", peephole_lstm_forward, peephole_lstm_backward)
ATTENTION = ("attention", attention_forward, attention_backward)

CASES = [
    *every(*NORM, D=512, fused=True),
    *hopper(*NORM, D=4096, fused=True),
    *hopper(*NORM, D=512),
    *hopper(*NORM, D=512, fused=True, dtype=FP32),
    *every(*ACTIVATION, kind="gelu", F=2048),
    *hopper(*ACTIVATION, kind="relu", F=2048),
    *hopper(*ACTIVATION, kind="gelu", F=2048, dtype=FP32),
    *every(*MIX, K=16, D=512),
    *hopper(*MIX, K=33, D=512),
    *hopper(*MIX, K=16, D=512, dtype=FP32),
    *every(*DEPTH_ATTENTION, K=16, D=512),
    *hopper(*DEPTH_ATTENTION, K=33, D=512, H=4),
    *hopper(*DEPTH_ATTENTION, K=7, D=512, H=4, scored=True),
    *hopper(*DEPTH_ATTENTION, K=16, D=512, dtype=FP32),
    *every(*ENGINE, B=8, D=512),
    *hopper(*ENGINE, B=16, D=512),
    *hopper(*ENGINE, B=8, D=512, dtype=FP32),
    *every(*BOUNDARY, near=8, D=512),
    *hopper(*BOUNDARY, near=8, D=4096),
    *hopper(*BOUNDARY, near=8, D=512, dtype=FP32),
    *every(*ATTENTION, length=128, causal=True),
    *every(*ATTENTION, length=512, causal=True),
    *hopper(*ATTENTION, length=64),
    *hopper(*ATTENTION, length=512),
    *hopper(*ATTENTION, length=128, dtype=FP32),
    *every("cross_entropy", cross_entropy, V=32000),
    *hopper("cross_entropy", cross_entropy, V=32000, dtype=FP32),
    *every(*LSTM, H=512),
    *hopper(*LSTM, H=512, dtype=FP32),
]
