"""Attention residuals, each claim a ratio within one run: `python -m bench.attention_residuals`.

The mixing alone (a stack whose layers do nothing) against plain PyTorch and against DLCL, its
growth with the number of sources, and a training step of an encoder. Forward and backward, fp32.
"""

import functools
import math
import sys

import torch

from bench.numbers import DIM, dlcl, mixing, peaks, report, step, times
from deepfast.measure.clock import claim, interleave
from deepfast.measure.forms import ATTENTION_FORMS, InStack
from deepfast.memory import LiveBytes
from deepfast.nn import AttentionResiduals


def make(sources: int) -> dict:
    """Each form, and DLCL, as a function without arguments."""
    residuals = AttentionResiduals(sources - 1, DIM)
    with torch.no_grad():
        residuals.query.normal_(std=DIM**-0.5)
    return mixing(residuals, ATTENTION_FORMS) | {"DLCL": dlcl(sources - 1)["deepfast"]}


def growth(rounds: int) -> list[dict]:
    """The exponents of time and of peak bytes from 49 to 193 sources."""
    sizes = (49, 97, 193)
    runs = {n: make(n)["deepfast"] for n in sizes}
    rows = interleave({str(n): run for n, run in runs.items()}, repeats=rounds, warmup=1)
    seconds = {n: rows[str(n)].median for n in sizes}
    nbytes = {}
    for n, run in runs.items():
        with LiveBytes() as live:
            run()
        nbytes[n] = live.peak
    found = []
    for what, values, most in (("time", seconds, 1.6), ("peak bytes", nbytes, 1.0)):
        exponent = math.log(values[193] / values[49]) / math.log(193 / 49)
        name = f"growth of {what} from 49 to 193 sources, exponent"
        found.append(claim(name, exponent, most, at_most=True, **{what.replace(" ", "_"): values}))
    return found


def claims(rounds: int) -> list[dict]:
    """Every row of the table."""
    where = "mixing of full attention residuals"
    rows = [
        times(f"{where} against a list, 97 sources", make(97), "list", "deepfast", 6,
              rounds=min(rounds, 3)),
        times(f"{where} against a stack, 49 sources", make(49), "stack", "deepfast", 40,
              rounds=min(rounds, 3)),
        times(f"{where} over DLCL's, 97 sources", make(97), "deepfast", "DLCL", 2.5,
              rounds=rounds, at_most=True),
        *growth(rounds),
    ]  # fmt: skip

    def in_a_list(encoder):
        encoder.connection.residuals = InStack(
            ATTENTION_FORMS["list"], encoder.connection.residuals
        )

    of_48 = functools.partial(step, 48, optimizer=False)
    steps = {name: of_48(name) for name in ("residual", "attnres")}
    steps["list"] = of_48("attnres", change=in_a_list)
    name = "step of an encoder of 48 layers, two reads a layer"
    rows += [
        times(f"{name}, over the plain residual one", steps, "attnres", "residual", 1.35,
              rounds=rounds, at_most=True),
        peaks("peak bytes of the same", steps, "attnres", "residual", 1.1, at_most=True),
        peaks(f"peak bytes of a list over deepfast's, {name}", steps, "list", "attnres", 4),
    ]  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(report("bench.attention_residuals", __doc__, claims))
