"""MUDD, each claim a ratio within one run: `python -m bench.mudd`.

The connection of a stack whose layers only add up their streams, against plain PyTorch, and a
training step of an encoder. Forward and backward, fp32.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.attention_residuals import DIM, FFN, HEADS, LENGTH, TOKENS
from bench.numbers import peaks, times
from deepfast.measure.clock import keep_memory
from deepfast.measure.machine import environment
from deepfast.measure.mudd_forms import FORMS, mixing_alone
from deepfast.nn import MUDD, TransformerEncoder
from deepfast.ops import depth_mix

LAYERS = 24


def make(layers: int) -> dict:
    """Each form as a function without arguments."""
    mudd = MUDD(layers, DIM)
    with torch.no_grad():
        for down in mudd.down:
            down.normal_(std=0.1 / down.shape[1] ** 0.5)
    y, grad = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(TOKENS, DIM)
    return {
        name: lambda form=form: mixing_alone(form, mudd, y, grad) for name, form in FORMS.items()
    }


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


def encoder_step(layers: int, connection: str, memory: str = "keep"):
    """Forward and backward of an encoder."""
    torch.manual_seed(0)
    encoder = TransformerEncoder(
        layers, DIM, HEADS, FFN, connection=connection, dropout=0.1, memory=memory
    )
    x = torch.randn(TOKENS // LENGTH, LENGTH, DIM)

    def step():
        encoder(x).square().mean().backward()
        encoder.zero_grad(set_to_none=True)

    return step


def claims(rounds: int) -> list[dict]:
    """Every row of the table."""
    made, what = make(LAYERS), f"MUDD, {LAYERS} layers, against"
    rows = [
        times(f"{what} a stack", made, "stack", "deepfast", 5, rounds=rounds),
        peaks(f"{what} a stack, peak bytes", made, "stack", "deepfast", 4),
        times(f"{what} a list", made, "list", "deepfast", 2, rounds=rounds),
        times("the sums of 25 states with given weights, against a stack", sums(LAYERS + 1),
              "stack", "deepfast", 5, rounds=rounds),
    ]  # fmt: skip
    steps = {name: encoder_step(LAYERS, name) for name in ("residual", "mudd")}
    what = f"a {LAYERS}-layer encoder's step over the plain residual one"
    rows.append(times(what, steps, "mudd", "residual", 2, rounds=rounds, at_most=True))
    rows.append(peaks(f"{what}, peak bytes", steps, "mudd", "residual", 2, at_most=True))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result = environment() | {"command": "python -m bench.mudd", "rows": claims(args.rounds)}
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["met"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
