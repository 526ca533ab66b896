"""Every kernel launch of the package: its operands by name and in order, and its arithmetic.

A launch writes into tensors that its caller allocates and returns nothing.
`deepfast.reference` shows what each one computes. Everything else is generated from this
table: the schemas that deepfast._C defines, the functions by which the package calls a launch, the
fakes and FLOPs of the compiled launches (`deepfast.ops.register`), and the operands in the tests of
kernels. This module imports only the standard library, so that the build can import it.

The package names each operand when it calls a launch. Each launcher gets one record, a named tuple
whose fields are the operands in the order of the table.

In the table a block has an op, operands, and launches with their operands in order. A line of
operands has names, the type, and of a tensor its dtype and shape. Those of "every op" belong to all
blocks, and those of a block to each that is ``like`` it. In the list of a launch ``?`` marks a
tensor that may be missing, and ``!`` what the launch writes. ``storage`` is the dtype of the
activations, with contiguous channels; ``dense`` is the same of a contiguous tensor. ``compute`` is
float32, or float64 where storage is float64, and contiguous; ``sums`` is the same where only the
channels are contiguous. Words are separated by bars. ``< states, R`` says that an index is smaller
than the number of slots of the operand ``states`` and than R. Shapes:

    T  tokens           D  channels        R  rows of the depth weights, L + 1
    S  slots            B  rows, or sources, of one far pass
    K  sources          H  heads or hops   N  sentences      V  vocabulary
    P  time steps       E  channels of a head                Q  tokens of the keys
    G  heads of the keys
"""

import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Launcher = Callable[[Any], None]
"""A function that runs a launch, from the record of its operands."""


@dataclass(frozen=True)
class Operand:
    name: str
    type: str
    """Its type in the schema: Tensor, Tensor?, Tensor[], int, int[], float, bool or str."""
    writes: bool = False
    """Whether the launch writes into it."""
    dtype: str = ""
    """The dtype of a tensor: storage, compute, int32 or int64."""
    shapes: tuple[tuple[str, ...], ...] = ()
    """The shapes that a tensor may have, as products and sums of the sizes."""
    dense: bool = False
    """Whether a tensor must be contiguous; else only its last dimension must."""
    below: tuple[str, ...] = ()
    """The sizes that an int, or each in a list, must be smaller than, or operands whose number of
    slots it must be smaller than."""
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


def _operand(name: str, definition: str) -> Operand:
    kind, _, rest = definition.partition(" ")
    if kind == "str":
        return Operand(name, kind, words=tuple(rest.split("|")))
    if "Tensor" not in kind:
        return Operand(name, kind, below=tuple(rest.removeprefix("< ").split(", ")) if rest else ())
    dtype, _, choices = rest.partition(" ")
    entries = (shape.strip()[1:-1].split(",") for shape in choices.split(" or "))
    shapes = tuple(tuple(e.strip() for e in shape if e.strip()) for shape in entries)
    dense = dtype not in ("storage", "sums")
    dtype = {"dense": "storage", "sums": "compute"}.get(dtype, dtype)
    return Operand(name, kind, False, dtype, shapes, dense)


@dataclass(frozen=True)
class Launch:
    op: str
    """The op of `deepfast.backend` that it belongs to."""
    name: str
    operands: tuple[Operand, ...]
    flops: Callable[..., int]
    """Multiplications and additions, from the operands by name, a shape for each tensor. Those of
    a launch that only ops of `deepfast.ops` call are stated there, and 0 here."""

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
        # the named tuple's own constructor, or a record that only passes on to an op of torch.
        operands, op = ", ".join(self.names), getattr(run, "op", None)
        call = eval(
            f"lambda *, {', '.join(named)}: "
            + (f"op({operands})" if op else f"run(new(record, ({operands},)))"),
            {"op": op, "run": run, "new": tuple.__new__, "record": self.record},
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
}


def _launches(table: str) -> Iterator[Launch]:
    known: dict[str, dict[str, Operand]] = {}
    for block in table.strip().split("\n\n"):
        heading, text = block.split("\n", 1)
        op, _, like = heading.partition(" like ")
        defined = known.get("every op", {}) | known.get(like, {})
        for names, definition in re.findall(r"^    ([\w ]+): (.+)$", text, re.MULTILINE):
            defined |= {name: _operand(name, definition) for name in names.split()}
        known.setdefault(op, defined)
        for name, signature in re.findall(r"^  (\w+)\(([\w\s,?!]+)\)$", text, re.MULTILINE):
            operands = []
            for word in signature.replace(",", " ").split():
                operand = defined[word.rstrip("?!")]
                kind = "Tensor?" if "?" in word else operand.type
                operands.append(replace(operand, type=kind, writes="!" in word))
            yield Launch(op, name, tuple(operands), _FLOPS.get(name, lambda **_: 0))


_TABLE = """
every op
    eps dropout_p source_eps out_eps scale label_smoothing: float
    rms norm_source source_rms out_rms accumulate norm write_grad reverse: bool
    seed: Tensor int64 ()

layer_norm
    x residual sum y dy dsum dx dresidual: Tensor storage (T, D)
    weight bias dweight dbias: Tensor compute (D)
    mean rstd: Tensor compute (T)
  layer_norm_forward(x, residual?, weight?, bias?, eps, rms, dropout_p, seed?, sum?!, y!, mean?!,
      rstd!)
  layer_norm_backward(sum, dy, dsum?, weight?, rms, mean?, rstd, dropout_p, seed?, dx?!,
      dresidual?!, dweight?!, dbias?!)

activation
    h out dout saved dh: Tensor storage (T, D)
    bias dbias: Tensor compute (D)
    kind: str relu|gelu
  activation_forward(h, bias?, kind, dropout_p, seed?, out!)
  activation_backward(dout, saved, bias?, kind, dropout_p, seed?, dh!, dbias?!)

boundary
    branch residual x out dx dout dbranch dresidual: Tensor storage (T, D)
    states grads: Tensor storage (S, T, D)
    k: int < states, R
    near: int[] < states, R
    weight dweight: Tensor compute (R, R) or (R, R, D)
    norm_weight norm_bias: Tensor compute (R, D)
    partial pulled: Tensor sums (T, D)
    out_norm_weight out_norm_bias dout_norm_weight dout_norm_bias: Tensor compute (D)
    dnorm_weight dnorm_bias: Tensor compute (D)
    source_rstd out_mean out_rstd: Tensor compute (T)
    grad_slot: int < grads
    pull_rows: int[] < R
    pull_slots: int[] < grads
  boundary_forward(branch?, residual?, dropout_p, seed?, states!, k, near, weight, norm_weight?,
      norm_bias?, norm_source, source_eps, source_rms, partial?, out_norm_weight?, out_norm_bias?,
      out_eps, out_rms, x?!, out?!, source_rstd?!, out_mean?!, out_rstd?!)
  boundary_backward(states, k, near, weight, norm_weight?, norm_bias?, norm_source, source_rms,
      partial?, out_norm_weight?, out_norm_bias?, out_rms, source_rstd?, out_mean?, out_rstd?,
      dropout_p, seed?, dx?, dout?, grads!, grad_slot, pull_rows, pull_slots, pulled?, dbranch?!,
      dresidual?!, dweight?!, dnorm_weight?!, dnorm_bias?!, dout_norm_weight?!, dout_norm_bias?!)

boundary like boundary
    sources: int[] < states, R
    rows: int[] < R
    out: Tensor sums (B, T, D)
    out_rows: int[] < out
    grad_slots: int[] < grads
  mix_rows(states, sources, weight, rows, norm_weight?, norm_bias?, out!, out_rows, accumulate)
  pull_rows(grads, grad_slots, rows, states, sources, weight, norm_weight?, norm_bias?, out!,
      out_rows, accumulate, dweight?!)

attention_boundary like boundary
    query dquery: Tensor compute (R, D)
    bias dbias: Tensor compute (R, R)
    kind: str softmax|relu
    partial_stats: Tensor compute (2, T)
    source_rstd: Tensor compute (R, T)
    stats: Tensor compute (R, 3, T)
  attention_boundary_forward(branch?, residual?, dropout_p, seed?, states!, k, near, query, bias?,
      kind, eps, partial?, partial_stats?, out_norm_weight?, out_norm_bias?, out_eps, out_rms, x?!,
      out?!, source_rstd!, stats?!, out_mean?!, out_rstd?!)
  attention_boundary_backward(states, k, near, query, bias?, kind, partial?, partial_stats?,
      out_norm_weight?, out_norm_bias?, out_rms, source_rstd, stats?!, out_mean?, out_rstd?,
      dropout_p, seed?, dx?, dout?, grads!, grad_slot, pull_rows, pull_slots, pulled?, dbranch?!,
      dresidual?!, dquery?!, dbias?!, dout_norm_weight?!, dout_norm_bias?!)

attention_boundary like attention_boundary
    sources: int[] < states, R
    rows: int[] < R
    out: Tensor sums (B, T, D)
    out_stats: Tensor compute (B, 2, T)
    out_rows: int[] < out
    grad_slots: int[] < grads
  attend_rows(states, sources, query, bias?, kind, source_rstd, rows, out!, out_stats?!, out_rows,
      accumulate)
  attend_pull(grads, grad_slots, rows, states, sources, query, bias?, kind, source_rstd, stats?,
      out!, out_rows, accumulate, dquery?!, dbias?!)

depth_mix
    sources dsources: Tensor[] storage (T, D)
    weight dweight: Tensor compute (K) or (K, D)
    norm_weight norm_bias dnorm_weight dnorm_bias: Tensor compute (K, D)
    out dout: Tensor storage (T, D)
    mean rstd: Tensor compute (K, T)
  depth_mix_forward(sources, weight, norm_weight?, norm_bias?, norm, eps, out!, mean?!, rstd?!)
  depth_mix_backward(sources, weight, norm_weight?, norm_bias?, norm, mean?, rstd?, dout, dsources!,
      dweight?!, dnorm_weight?!, dnorm_bias?!)

depth_attention
    sources dsources: Tensor[] storage (T, D)
    query dquery: Tensor compute (H, D)
    scores dscores: Tensor compute (T, K, H)
    out: Tensor dense (T*H, D)
    lse most total dlse: Tensor compute (T, H)
    dout: Tensor storage (T*H, D)
  depth_attention_forward(sources, query?, scores?, norm, eps, out!, lse?!, most?!, total?!)
  depth_attention_backward(sources, query?, scores?, norm, eps, out?, most?, total?, dout, dlse?,
      dsources!, dquery?!, dscores?!)

attention
    q o dout dq: Tensor storage (T, H, E)
    k v dk dv: Tensor storage (Q, G, E)
    cu_seqlens_q cu_seqlens_k: Tensor int32 (N+1)
    max_seqlen_q max_seqlen_k left right: int
    lse: Tensor compute (H, T)
  attention_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right,
      scale, dropout_p, seed?, o!, lse!)
  attention_backward(q, k, v, o, lse, dout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
      left, right, scale, dropout_p, seed?, dq!, dk!, dv!)

linear_cross_entropy
    logits: Tensor storage (T, V)
    target: Tensor int64 (T)
    ignore_index: int
    loss nll: Tensor compute (T)
  cross_entropy(logits!, target, label_smoothing, ignore_index, write_grad, loss!, nll!)

peephole_lstm
    f gates df: Tensor dense (P, N, 4*H)
    weight: Tensor dense (H, 4*H)
    peephole dpeephole: Tensor compute (3, H)
    h0 h_last dh_last dh0: Tensor dense (N, H)
    c0 c_last dc_last dc0: Tensor compute (N, H)
    lengths: Tensor int64 (N)
    h dh: Tensor dense (P, N, H)
    c: Tensor compute (P, N, H)
  peephole_lstm_forward(f, weight, peephole, h0?, c0?, lengths?, reverse, h!, h_last!, c_last!, c?!,
      gates?!)
  peephole_lstm_backward(dh?, dh_last?, dc_last?, weight, peephole, c0?, lengths?, reverse, c,
      gates, df!, dh0?!, dc0?!, dpeephole!)
"""

LAUNCHES = {launch.name: launch for launch in _launches(_TABLE)}
