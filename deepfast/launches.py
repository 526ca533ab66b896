"""Every kernel launch of the package: its operands by name and in order, and its arithmetic.

A launch writes into tensors that its caller allocates and returns nothing.
`deepfast.reference` shows what each one computes. Everything else is generated from this
table: the schemas that deepfast._C defines, the functions by which the package calls a launch, the
fakes and FLOPs of the compiled launches (`deepfast.ops.register`), and the operands in the tests of
kernels. This module imports only the standard library, so that the build can import it.

The package names each operand when it calls a launch. Each launcher gets one record, a named tuple
whose fields are the operands in the order of the table.

In the table a title is "op: launch", and each line under it is an operand: name, type, dtype,
shape. ``!`` marks what the launch writes. ``storage`` is the dtype of the activations, with
contiguous channels; ``dense`` is the same of a contiguous tensor. ``compute`` is float32, or
float64 where storage is float64, and contiguous; ``sums`` is the same where only the channels are
contiguous. Words are separated by bars. ``< states, R`` says that an index is smaller than the
number of slots of the operand ``states`` and than R. Shapes:

    T  tokens           D  channels        R  rows of the depth weights, L + 1
    S  slots            B  rows, or sources, of one far pass
    K  sources          H  heads or hops   N  sentences      V  vocabulary
    P  time steps       E  channels of a head                Q  tokens of the keys
    G  heads of the keys
"""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Launcher = Callable[[Any], None]
"""A function that runs a launch, from the record of its operands."""


@dataclass(frozen=True)
class Operand:
    name: str
    type: str
    """Its type in the schema: Tensor, Tensor?, Tensor[], int, int[], float, bool or str."""
    writes: bool
    """Whether the launch writes into it."""
    dtype: str = ""
    """The dtype of a tensor: storage, compute, int32 or int64."""
    shapes: tuple[tuple[str, ...], ...] = ()
    """The shapes that a tensor may have, as products and sums of the sizes."""
    dense: bool = False
    """Whether a tensor must be contiguous; else only its last dimension must."""
    below: tuple[str, ...] = ()
    """Of an int, or of those in a list: it is smaller than these sizes, or than the number of slots
    of these operands."""
    words: tuple[str, ...] = ()
    """The values that a str may have."""

    def shape(self, sizes: dict[str, int], choice: int = 0) -> tuple[int, ...]:
        """One of its shapes, with the numbers in ``sizes`` for the letters."""
        return tuple(
            sum(
                math.prod(int(x) if x.isdigit() else sizes[x] for x in term.split("*"))
                for term in entry.split("+")
            )
            for entry in self.shapes[choice]
        )


def _operand(line: str) -> Operand:
    name, kind, *rest = line.split(maxsplit=3)
    if not rest:
        return Operand(name, kind, False)
    if kind == "str":
        return Operand(name, kind, False, words=tuple(rest[0].split("|")))
    if rest[0] == "<":
        return Operand(name, kind, False, below=tuple(rest[1].split(", ")))
    dtype, choices = rest
    entries = (shape.strip()[1:-1].split(",") for shape in choices.split(" or "))
    shapes = tuple(tuple(e.strip() for e in shape if e.strip()) for shape in entries)
    dense = dtype not in ("storage", "sums")
    dtype = {"dense": "storage", "sums": "compute"}.get(dtype, dtype)
    kind, writes = kind.replace("!", ""), "!" in kind
    return Operand(name, kind, writes, dtype, shapes, dense)


@dataclass(frozen=True)
class Launch:
    op: str
    """The op of `deepfast.backend` that it belongs to."""
    name: str
    operands: tuple[Operand, ...]
    flops: Callable[..., int]
    """Multiplications and additions, from the operands by name, a shape for each tensor."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def record(self) -> type:
        """The record of its operands, a named tuple."""
        return namedtuple(self.name, self.names)  # type: ignore[misc]

    def by_name(self, run: Launcher) -> Callable[..., None]:
        """``run`` as a function that takes the operands by name and makes the record of them. A
        ``Tensor?`` that is not named is None. Its attribute ``run`` takes a record."""
        named = (f"{o.name}=None" if o.type == "Tensor?" else o.name for o in self.operands)
        # Compiled once, because a function with **kwargs would cost each call more time, as would
        # the named tuple's own constructor.
        call = eval(
            f"lambda *, {', '.join(named)}: run(new(record, ({', '.join(self.names)},)))",
            {"run": run, "new": tuple.__new__, "record": self.record},
        )
        call.__name__ = call.__qualname__ = self.name
        call.run = run
        return call

    @property
    def schema(self) -> str:
        """The schema for torch; each operand that is written has its own letter."""
        letters, arguments = iter("abcdefghijklmnopqrstuvwxyz"), []
        for o in self.operands:
            written = f"Tensor({next(letters)}!)" if o.writes else "Tensor"
            arguments.append(f"{o.type.replace('Tensor', written)} {o.name}")
        return f"{self.name}({', '.join(arguments)}) -> ()"


def _mix_rows(states, sources, rows, **_) -> int:
    return 2 * len(sources) * len(rows) * math.prod(states[1:])


def _boundary_backward(states, near, dout, pull_rows, **_) -> int:
    # The norm's backward recomputes the row. A pulled row takes two products, for dz and dW.
    mixed = len(near) if dout is not None else 0
    return 2 * (mixed + 2 * len(pull_rows)) * math.prod(states[1:])


def _depth_mix(sources, **_) -> int:
    return 2 * len(sources) * math.prod(sources[0])


def _depth_attention(sources, query, scores, **_) -> int:
    hops = scores[-1] if query is None else query[0]
    return 2 * (1 if query is None else 2) * len(sources) * hops * math.prod(sources[0])


def _lstm(gates, **_) -> int:
    steps, batch, width = gates
    return 2 * steps * batch * width * (width // 4)


# Backward has two products for each product of forward.
_FLOPS: dict[str, Callable[..., int]] = {
    "boundary_forward": lambda near, states, **_: 2 * len(near) * math.prod(states[1:]),
    "boundary_backward": _boundary_backward,
    "mix_rows": _mix_rows,
    # A score and a weighted sum; backward computes the score again, and <g, z>, dz and dq.
    "attention_boundary_forward": lambda near, states, **_: 4 * len(near) * math.prod(states[1:]),
    "attention_boundary_backward": lambda states, near, pull_rows, **_: (
        (4 * len(near) + 10 * len(pull_rows)) * math.prod(states[1:])
    ),
    "attend_rows": lambda **shapes: 2 * _mix_rows(**shapes),
    "attend_pull": lambda **shapes: 5 * _mix_rows(**shapes),
    "pull_rows": lambda **shapes: 2 * _mix_rows(**shapes),
    "depth_mix_forward": _depth_mix,
    "depth_mix_backward": lambda **shapes: 2 * _depth_mix(**shapes),
    "depth_attention_forward": _depth_attention,
    "depth_attention_backward": lambda **shapes: 2 * _depth_attention(**shapes),
    "peephole_lstm_forward": lambda f, **_: _lstm(f),
    "peephole_lstm_backward": _lstm,
}


def _launch(block: str) -> Launch:
    title, *lines = block.splitlines()
    op, name = title.split(": ")
    return Launch(op, name, tuple(map(_operand, lines)), _FLOPS.get(name, lambda **_: 0))


_TABLE = """
layer_norm: layer_norm_forward
    x          Tensor    storage  (T, D)
    residual   Tensor?   storage  (T, D)
    weight     Tensor?   compute  (D)
    bias       Tensor?   compute  (D)
    eps        float
    rms        bool
    dropout_p  float
    seed       Tensor?   int64    ()
    sum        Tensor?!  storage  (T, D)
    y          Tensor!   storage  (T, D)
    mean       Tensor?!  compute  (T)
    rstd       Tensor!   compute  (T)

layer_norm: layer_norm_backward
    sum        Tensor    storage  (T, D)
    dy         Tensor    storage  (T, D)
    dsum       Tensor?   storage  (T, D)
    weight     Tensor?   compute  (D)
    rms        bool
    mean       Tensor?   compute  (T)
    rstd       Tensor    compute  (T)
    dropout_p  float
    seed       Tensor?   int64    ()
    dx         Tensor?!  storage  (T, D)
    dresidual  Tensor?!  storage  (T, D)
    dweight    Tensor?!  compute  (D)
    dbias      Tensor?!  compute  (D)

activation: activation_forward
    h          Tensor   storage  (T, D)
    bias       Tensor?  compute  (D)
    kind       str  relu|gelu
    dropout_p  float
    seed       Tensor?  int64    ()
    out        Tensor!  storage  (T, D)

activation: activation_backward
    dout       Tensor    storage  (T, D)
    saved      Tensor    storage  (T, D)
    bias       Tensor?   compute  (D)
    kind       str  relu|gelu
    dropout_p  float
    seed       Tensor?   int64    ()
    dh         Tensor!   storage  (T, D)
    dbias      Tensor?!  compute  (D)

boundary: boundary_forward
    branch           Tensor?   storage  (T, D)
    residual         Tensor?   storage  (T, D)
    dropout_p        float
    seed             Tensor?   int64    ()
    states           Tensor!   storage  (S, T, D)
    k                int  < states, R
    near             int[]  < states, R
    weight           Tensor    compute  (R, R) or (R, R, D)
    norm_weight      Tensor?   compute  (R, D)
    norm_bias        Tensor?   compute  (R, D)
    norm_source      bool
    source_eps       float
    source_rms       bool
    partial          Tensor?   sums     (T, D)
    out_norm_weight  Tensor?   compute  (D)
    out_norm_bias    Tensor?   compute  (D)
    out_eps          float
    out_rms          bool
    x                Tensor?!  storage  (T, D)
    out              Tensor?!  storage  (T, D)
    source_rstd      Tensor?!  compute  (T)
    out_mean         Tensor?!  compute  (T)
    out_rstd         Tensor?!  compute  (T)

boundary: boundary_backward
    states            Tensor    storage  (S, T, D)
    k                 int  < states, R
    near              int[]  < states, R
    weight            Tensor    compute  (R, R) or (R, R, D)
    norm_weight       Tensor?   compute  (R, D)
    norm_bias         Tensor?   compute  (R, D)
    norm_source       bool
    source_rms        bool
    partial           Tensor?   sums     (T, D)
    out_norm_weight   Tensor?   compute  (D)
    out_norm_bias     Tensor?   compute  (D)
    out_rms           bool
    source_rstd       Tensor?   compute  (T)
    out_mean          Tensor?   compute  (T)
    out_rstd          Tensor?   compute  (T)
    dropout_p         float
    seed              Tensor?   int64    ()
    dx                Tensor?   storage  (T, D)
    dout              Tensor?   storage  (T, D)
    grads             Tensor!   storage  (S, T, D)
    grad_slot         int  < grads
    pull_rows         int[]  < R
    pull_slots        int[]  < grads
    pulled            Tensor?   sums     (T, D)
    dbranch           Tensor?!  storage  (T, D)
    dresidual         Tensor?!  storage  (T, D)
    dweight           Tensor?!  compute  (R, R) or (R, R, D)
    dnorm_weight      Tensor?!  compute  (D)
    dnorm_bias        Tensor?!  compute  (D)
    dout_norm_weight  Tensor?!  compute  (D)
    dout_norm_bias    Tensor?!  compute  (D)

boundary: mix_rows
    states       Tensor   storage  (S, T, D)
    sources      int[]  < states, R
    weight       Tensor   compute  (R, R) or (R, R, D)
    rows         int[]  < R
    norm_weight  Tensor?  compute  (R, D)
    norm_bias    Tensor?  compute  (R, D)
    out          Tensor!  sums     (B, T, D)
    out_rows     int[]  < out
    accumulate   bool

boundary: pull_rows
    grads        Tensor    storage  (S, T, D)
    grad_slots   int[]  < grads
    rows         int[]  < R
    states       Tensor    storage  (S, T, D)
    sources      int[]  < states, R
    weight       Tensor    compute  (R, R) or (R, R, D)
    norm_weight  Tensor?   compute  (R, D)
    norm_bias    Tensor?   compute  (R, D)
    out          Tensor!   sums     (B, T, D)
    out_rows     int[]  < out
    accumulate   bool
    dweight      Tensor?!  compute  (R, R) or (R, R, D)

attention_boundary: attention_boundary_forward
    branch           Tensor?   storage  (T, D)
    residual         Tensor?   storage  (T, D)
    dropout_p        float
    seed             Tensor?   int64    ()
    states           Tensor!   storage  (S, T, D)
    k                int  < states, R
    near             int[]  < states, R
    query            Tensor    compute  (R, D)
    bias             Tensor?   compute  (R, R)
    kind             str  softmax|relu
    eps              float
    partial          Tensor?   sums     (T, D)
    partial_stats    Tensor?   compute  (2, T)
    out_norm_weight  Tensor?   compute  (D)
    out_norm_bias    Tensor?   compute  (D)
    out_eps          float
    out_rms          bool
    x                Tensor?!  storage  (T, D)
    out              Tensor?!  storage  (T, D)
    source_rstd      Tensor!   compute  (R, T)
    stats            Tensor?!  compute  (R, 3, T)
    out_mean         Tensor?!  compute  (T)
    out_rstd         Tensor?!  compute  (T)

attention_boundary: attention_boundary_backward
    states            Tensor    storage  (S, T, D)
    k                 int  < states, R
    near              int[]  < states, R
    query             Tensor    compute  (R, D)
    bias              Tensor?   compute  (R, R)
    kind              str  softmax|relu
    partial           Tensor?   sums     (T, D)
    partial_stats     Tensor?   compute  (2, T)
    out_norm_weight   Tensor?   compute  (D)
    out_norm_bias     Tensor?   compute  (D)
    out_rms           bool
    source_rstd       Tensor    compute  (R, T)
    stats             Tensor?!  compute  (R, 3, T)
    out_mean          Tensor?   compute  (T)
    out_rstd          Tensor?   compute  (T)
    dropout_p         float
    seed              Tensor?   int64    ()
    dx                Tensor?   storage  (T, D)
    dout              Tensor?   storage  (T, D)
    grads             Tensor!   storage  (S, T, D)
    grad_slot         int  < grads
    pull_rows         int[]  < R
    pull_slots        int[]  < grads
    pulled            Tensor?   sums     (T, D)
    dbranch           Tensor?!  storage  (T, D)
    dresidual         Tensor?!  storage  (T, D)
    dquery            Tensor?!  compute  (R, D)
    dbias             Tensor?!  compute  (R, R)
    dout_norm_weight  Tensor?!  compute  (D)
    dout_norm_bias    Tensor?!  compute  (D)

attention_boundary: attend_rows
    states       Tensor    storage  (S, T, D)
    sources      int[]  < states, R
    query        Tensor    compute  (R, D)
    bias         Tensor?   compute  (R, R)
    kind         str  softmax|relu
    source_rstd  Tensor    compute  (R, T)
    rows         int[]  < R
    out          Tensor!   sums     (B, T, D)
    out_stats    Tensor?!  compute  (B, 2, T)
    out_rows     int[]  < out
    accumulate   bool

attention_boundary: attend_pull
    grads        Tensor    storage  (S, T, D)
    grad_slots   int[]  < grads
    rows         int[]  < R
    states       Tensor    storage  (S, T, D)
    sources      int[]  < states, R
    query        Tensor    compute  (R, D)
    bias         Tensor?   compute  (R, R)
    kind         str  softmax|relu
    source_rstd  Tensor    compute  (R, T)
    stats        Tensor?   compute  (R, 3, T)
    out          Tensor!   sums     (B, T, D)
    out_rows     int[]  < out
    accumulate   bool
    dquery       Tensor?!  compute  (R, D)
    dbias        Tensor?!  compute  (R, R)

depth_mix: depth_mix_forward
    sources      Tensor[]  storage  (T, D)
    weight       Tensor    compute  (K) or (K, D)
    norm_weight  Tensor?   compute  (K, D)
    norm_bias    Tensor?   compute  (K, D)
    norm         bool
    eps          float
    out          Tensor!   storage  (T, D)
    mean         Tensor?!  compute  (K, T)
    rstd         Tensor?!  compute  (K, T)

depth_mix: depth_mix_backward
    sources       Tensor[]   storage  (T, D)
    weight        Tensor     compute  (K) or (K, D)
    norm_weight   Tensor?    compute  (K, D)
    norm_bias     Tensor?    compute  (K, D)
    norm          bool
    mean          Tensor?    compute  (K, T)
    rstd          Tensor?    compute  (K, T)
    dout          Tensor     storage  (T, D)
    dsources      Tensor[]!  storage  (T, D)
    dweight       Tensor?!   compute  (K) or (K, D)
    dnorm_weight  Tensor?!   compute  (K, D)
    dnorm_bias    Tensor?!   compute  (K, D)

depth_attention: depth_attention_forward
    sources  Tensor[]  storage  (T, D)
    query    Tensor?   compute  (H, D)
    scores   Tensor?   compute  (T, K, H)
    norm     bool
    eps      float
    out      Tensor!   dense    (T*H, D)
    lse      Tensor?!  compute  (T, H)
    most     Tensor?!  compute  (T, H)
    total    Tensor?!  compute  (T, H)

depth_attention: depth_attention_backward
    sources     Tensor[]   storage  (T, D)
    query       Tensor?    compute  (H, D)
    scores      Tensor?    compute  (T, K, H)
    norm        bool
    eps         float
    out         Tensor?    dense    (T*H, D)
    most        Tensor?    compute  (T, H)
    total       Tensor?    compute  (T, H)
    dout        Tensor     storage  (T*H, D)
    dlse        Tensor?    compute  (T, H)
    dsources    Tensor[]!  storage  (T, D)
    dquery      Tensor?!   compute  (H, D)
    dscores     Tensor?!   compute  (T, K, H)

attention: attention_forward
    q             Tensor   storage  (T, H, E)
    k             Tensor   storage  (Q, G, E)
    v             Tensor   storage  (Q, G, E)
    cu_seqlens_q  Tensor   int32    (N+1)
    cu_seqlens_k  Tensor   int32    (N+1)
    max_seqlen_q  int
    max_seqlen_k  int
    left          int
    right         int
    scale         float
    dropout_p     float
    seed          Tensor?  int64    ()
    o             Tensor!  storage  (T, H, E)
    lse           Tensor!  compute  (H, T)

attention: attention_backward
    q             Tensor   storage  (T, H, E)
    k             Tensor   storage  (Q, G, E)
    v             Tensor   storage  (Q, G, E)
    o             Tensor   storage  (T, H, E)
    lse           Tensor   compute  (H, T)
    dout          Tensor   storage  (T, H, E)
    cu_seqlens_q  Tensor   int32    (N+1)
    cu_seqlens_k  Tensor   int32    (N+1)
    max_seqlen_q  int
    max_seqlen_k  int
    left          int
    right         int
    scale         float
    dropout_p     float
    seed          Tensor?  int64    ()
    dq            Tensor!  storage  (T, H, E)
    dk            Tensor!  storage  (Q, G, E)
    dv            Tensor!  storage  (Q, G, E)

linear_cross_entropy: cross_entropy
    logits           Tensor!  storage  (T, V)
    target           Tensor   int64    (T)
    label_smoothing  float
    ignore_index     int
    write_grad       bool
    loss             Tensor!  compute  (T)
    nll              Tensor!  compute  (T)

peephole_lstm: peephole_lstm_forward
    f         Tensor    dense    (P, N, 4*H)
    weight    Tensor    dense    (H, 4*H)
    peephole  Tensor    compute  (3, H)
    h0        Tensor?   dense    (N, H)
    c0        Tensor?   compute  (N, H)
    lengths   Tensor?   int64    (N)
    reverse   bool
    h         Tensor!   dense    (P, N, H)
    h_last    Tensor!   dense    (N, H)
    c_last    Tensor!   compute  (N, H)
    c         Tensor?!  compute  (P, N, H)
    gates     Tensor?!  dense    (P, N, 4*H)

peephole_lstm: peephole_lstm_backward
    dh         Tensor?   dense    (P, N, H)
    dh_last    Tensor?   dense    (N, H)
    dc_last    Tensor?   compute  (N, H)
    weight     Tensor    dense    (H, 4*H)
    peephole   Tensor    compute  (3, H)
    c0         Tensor?   compute  (N, H)
    lengths    Tensor?   int64    (N)
    reverse    bool
    c          Tensor    compute  (P, N, H)
    gates      Tensor    dense    (P, N, 4*H)
    df         Tensor!   dense    (P, N, 4*H)
    dh0        Tensor?!  dense    (N, H)
    dc0        Tensor?!  compute  (N, H)
    dpeephole  Tensor!   compute  (3, H)
"""

LAUNCHES = {launch.name: launch for launch in map(_launch, _TABLE.strip().split("\n\n"))}
