"""Attention residuals, each claim a ratio within one run: `python -m bench.attention_residuals`.

The mixing alone (a stack whose layers do nothing) against plain PyTorch and against DLCL, its
growth with the number of sources, and a training step of an encoder. Forward and backward, fp32.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from bench import depth_mix
from bench.numbers import peaks, times
from deepfast.measure.attention_forms import FORMS, mixing_alone
from deepfast.measure.clock import interleave
from deepfast.measure.machine import environment
from deepfast.measure.rows import claim
from deepfast.memory import LiveBytes
from deepfast.nn import AttentionResiduals, TransformerEncoder

TOKENS, DIM, HEADS, FFN, LENGTH = 2048, 256, 4, 1024, 32


def make(sources: int) -> dict:
    """Each form, and DLCL, as a function without arguments."""
    residuals = AttentionResiduals(sources - 1, DIM)
    with torch.no_grad():
        residuals.query.normal_(std=DIM**-0.5)
    v, grad = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(TOKENS, DIM)
    forms = {
        name: lambda form=form: mixing_alone(form, residuals, v, grad)
        for name, form in FORMS.items()
    }
    return forms | {"DLCL": depth_mix.make(sources - 1, TOKENS, DIM)["deepfast"]}


def encoder_step(layers: int, connection: str, form: str | None = None):
    """Forward and backward of an encoder; with ``form`` its connection is another form."""
    torch.manual_seed(0)
    options = {} if connection == "residual" else {"reads": 2}
    encoder = TransformerEncoder(
        layers, DIM, HEADS, FFN, connection=connection, dropout=0.1, **options
    )
    x = torch.randn(TOKENS // LENGTH, LENGTH, DIM)
    if form is not None:
        encoder.connection.form = FORMS[form]

    def step():
        encoder(x).square().mean().backward()
        encoder.zero_grad(set_to_none=True)

    return step


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
    steps = {name: encoder_step(48, name) for name in ("residual", "attnres")}
    what = "a 48-layer encoder's step, two reads a layer, over the plain residual one"
    rows.append(times(what, steps, "attnres", "residual", 1.35, rounds=rounds, at_most=True))
    rows.append(peaks("peak bytes of the same", steps, "attnres", "residual", 1.1, at_most=True))
    rows.append(
        peaks("peak bytes of the mixing in a list over deepfast's, 97 sources",
              make(97), "list", "deepfast", 4)
    )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result = environment() | {"command": "python -m bench.attention_residuals"}
    result["rows"] = claims(args.rounds)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["met"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
