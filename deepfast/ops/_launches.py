"""What torch is told of the compiled launches, which write into their caller's tensors: that they
return nothing, and how much arithmetic they do."""

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from deepfast import backend


def _nothing(*_, **__) -> None:
    """A launch with nothing to count, or to return."""


def _mix_rows(states, sources, weight, rows, *_, **__) -> int:
    return 2 * len(sources) * len(rows) * math.prod(states[1:])


def _pull_rows(grads, grad_slots, rows, states, sources, *_, **__) -> int:
    # One product for the sources' gradients, one for the weights'.
    return 2 * _mix_rows(states, sources, None, rows)


def _boundary_forward(branch, residual, p, seed, states, slot, near, *_, **__) -> int:
    return 2 * len(near) * math.prod(states[1:])


def _boundary_backward(states, slot, near, *rest, **__) -> int:
    dout, pull_rows = rest[14], rest[18]
    again = len(near) if dout is not None else 0
    return 2 * (again + 2 * len(pull_rows)) * math.prod(states[1:])


def _lstm_forward(f, *_, **__) -> int:
    return 2 * f[0] * f[1] * f[2] * (f[2] // 4)


def _lstm_backward(
    dh, dh_last, dc_last, weight, peephole, c0, lengths, reverse, c, gates, *_, **__
):
    return _lstm_forward(gates)


def _depth_attention(sources, query, scores, norm, eps, out, *_, **__) -> int:
    """The weighted sum and, with a query, the scores."""
    return 2 * (1 if query is None else 2) * len(sources) * math.prod(out)


FLOPS = {
    "mix_rows": _mix_rows,
    "pull_rows": _pull_rows,
    "boundary_forward": _boundary_forward,
    "boundary_backward": _boundary_backward,
    "depth_mix_forward": lambda sources, *_, **__: 2 * len(sources) * math.prod(sources[0]),
    "depth_mix_backward": lambda sources, *_, **__: 4 * len(sources) * math.prod(sources[0]),
    "depth_attention_forward": _depth_attention,
    # Two products for each: the operands are the same up to the result.
    "depth_attention_backward": lambda *shapes, **__: 2 * _depth_attention(*shapes),
    "peephole_lstm_forward": _lstm_forward,
    "peephole_lstm_backward": _lstm_backward,
}
"""Formulas over shapes; a launch that is not here has no matrix product."""

for _name in sorted({name for group in backend.OPS.values() for name in group}):
    if hasattr(torch.ops.deepfast, _name):
        torch.library.register_fake(f"deepfast::{_name}", _nothing)
        register_flop_formula(getattr(torch.ops.deepfast, _name))(
            FLOPS.get(_name, lambda *_, **__: 0)
        )
