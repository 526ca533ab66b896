"""MUDD, each claim a ratio within one run: `python -m bench.mudd`.

The connection of a stack whose layers only add up their streams, against plain PyTorch, and a
training step of an encoder. Forward and backward, fp32.
"""

import sys

import torch

from bench.numbers import DIM, TOKENS, mixing, peaks, report, step, times
from deepfast.measure.clock import keep_memory
from deepfast.measure.forms import MUDD_FORMS
from deepfast.nn import MUDD
from deepfast.ops import depth_mix

LAYERS = 24


def make(layers: int) -> dict:
    """Each form as a function without arguments."""
    mudd = MUDD(layers, DIM)
    with torch.no_grad():
        for down in mudd.down:
            down.normal_(std=0.1 / down.shape[1] ** 0.5)
    return mixing(mudd, MUDD_FORMS)


def sums(count: int) -> dict:
    """One row's four sums alone, with their gradients."""
    states = [torch.randn(TOKENS, DIM, requires_grad=True) for _ in range(count)]
    weight = torch.randn(TOKENS, count, 4, requires_grad=True)
    grad = torch.randn(TOKENS, 4, DIM)

    def stack():
        return torch.einsum("ktd,tks->tsd", torch.stack(states), weight)

    forms = {"stack": stack, "deepfast": lambda: depth_mix(states, weight)}
    return {
        name: lambda form=form: torch.autograd.grad(form(), [*states, weight], grad)
        for name, form in forms.items()
    }


def claims(rounds: int) -> list[dict]:
    """Every row of the table."""
    keep_memory()
    made, what = make(LAYERS), f"MUDD, {LAYERS} layers, against"
    rows = [
        times(f"{what} a stack", made, "stack", "deepfast", 5, rounds=rounds),
        peaks(f"{what} a stack, peak bytes", made, "stack", "deepfast", 4),
        times(f"{what} a list", made, "list", "deepfast", 2, rounds=rounds),
        times("the sums of 25 states with given weights, against a stack", sums(LAYERS + 1),
              "stack", "deepfast", 5, rounds=rounds),
    ]  # fmt: skip
    steps = {name: step(LAYERS, name, optimizer=False) for name in ("residual", "mudd")}
    what = f"a {LAYERS}-layer encoder's step over the plain residual one"
    rows.append(times(what, steps, "mudd", "residual", 2, rounds=rounds, at_most=True))
    rows.append(peaks(f"{what}, peak bytes", steps, "mudd", "residual", 2, at_most=True))
    return rows


if __name__ == "__main__":
    sys.exit(report("bench.mudd", __doc__, claims))
