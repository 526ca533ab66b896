"""The claims, each a ratio between variants of one run: `python -m bench.numbers`.

Every row is measured on 2 threads. The variants take turns, and a claim is the median of the ratios
of the rounds.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench import ops
from deepfast.files import write_atomically
from deepfast.measure.clock import claim, copy_bandwidth, interleave, keep_memory, ratio
from deepfast.measure.forms import FORMS, Connection, FusedPerLayer, mixing_alone
from deepfast.measure.machine import environment
from deepfast.memory import LiveBytes
from deepfast.nn import DLCL, TransformerEncoder

SENTENCES, LENGTH, DIM, HEADS, FFN = 64, 32, 256, 4, 1024
TOKENS = SENTENCES * LENGTH


def mixing(
    module: Connection, forms: dict, tokens: int = TOKENS, dim: int = DIM, *, backward: bool = True
) -> dict[str, Callable]:
    """Each form of the connection of a whole stack whose layers do nothing, as a function without
    arguments, on the same weights and input."""
    y = torch.randn(tokens, dim, requires_grad=backward)
    grad = torch.randn(tokens, dim) if backward else None

    def run(form):
        with torch.set_grad_enabled(backward):
            mixing_alone(form, module, y, grad)

    return {name: partial(run, form) for name, form in forms.items()}


def dlcl(layers: int, tokens: int = TOKENS, dim: int = DIM, *, backward: bool = True) -> dict:
    forms = FORMS | {"one fused pass per layer": FusedPerLayer}
    return mixing(DLCL(layers, dim), forms, tokens, dim, backward=backward)


def step(
    layers: int,
    connection: str,
    *,
    optimizer: bool = True,
    change: Callable[[TransformerEncoder], None] = lambda encoder: None,
) -> Callable[[], None]:
    """A training step of an encoder: forward, backward, Adam. ``change`` is called with the encoder
    first."""
    torch.manual_seed(0)
    encoder = TransformerEncoder(layers, DIM, HEADS, FFN, connection=connection, dropout=0.1)
    change(encoder)
    adam = torch.optim.Adam(encoder.parameters(), lr=1e-4, fused=True) if optimizer else None
    x, target = torch.randn(2, SENTENCES, LENGTH, DIM).unbind(0)

    def run():
        loss = (encoder(x) - target).square().mean()
        loss.backward()
        if adam is not None:
            adam.step()
        encoder.zero_grad(set_to_none=True)

    return run


def times(
    what: str, variants: dict, slow: str, fast: str, wanted: float, *, rounds: int, warmup: int = 1,
    at_most: bool = False,
) -> dict:  # fmt: skip
    """How many times faster ``fast`` is than ``slow``."""
    some = {name: variants[name] for name in (slow, fast)}
    rows = interleave(some, repeats=rounds, warmup=warmup)
    seconds = {name: round(row.median, 5) for name, row in rows.items()}
    value = ratio(rows[slow], rows[fast])
    return claim(what, value, wanted, at_most=at_most, rounds=rounds, seconds=seconds)


def peaks(
    what: str, variants: dict, above: str, below: str, wanted: float, *, at_most: bool = False
) -> dict:
    """How many times as many bytes the tensors of ``above`` have at its peak as those of ``below``;
    tensors that existed before count as zero."""
    found = {}
    for name in (above, below):
        variants[name]()
        with LiveBytes() as live:
            variants[name]()
        found[name] = live.peak
    return claim(what, found[above] / found[below], wanted, at_most=at_most, bytes=found)


def against(form: str, layers: int, wanted: float, rounds: int, suffix: str = "") -> dict:
    """The mixing alone beside another form of DLCL."""
    what = f"mixing alone against {form}, L={layers}, T=2048, D=256, fp32{suffix}"
    return times(what, dlcl(layers), form, "deepfast", wanted, rounds=rounds)


def claims(rounds: int) -> list[dict]:
    """Every row of the table."""
    forward = dlcl(100, 4096, 512, backward=False)
    rows = [
        times("mixing forward against one fused pass per layer, L=100, T=4096, D=512, fp32",
              forward, "one fused pass per layer", "deepfast", 2.5, rounds=rounds),
        against("DenseFormer form", 60, 10, rounds),
        against("stack and sum", 100, 60, rounds),
        peaks("mixing alone, peak bytes of stack and sum over deepfast's, L=100",
              dlcl(100), "stack and sum", "deepfast", 6),
    ]  # fmt: skip
    steps = {connection: step(100, connection) for connection in ("residual", "dlcl")}
    what = "training step of a DLCL encoder over the plain residual one, L=100, T=2048, D=256"
    rows.append(times(what, steps, "dlcl", "residual", 1.10, rounds=rounds, at_most=True))
    rows.append(peaks("peak bytes of the same", steps, "dlcl", "residual", 1.05, at_most=True))
    # From here on freed memory is kept. This helps forms with large temporaries most, and
    # layer-norm is too short to measure beside page faults.
    if keep_memory():
        suffix = ", freed memory kept"
        rows.append(against("DenseFormer form", 60, 10, rounds, suffix))
        rows.append(against("stack and sum", 100, 60, min(rounds, 3), suffix))
    for dtype, wanted in ((torch.bfloat16, 2.0), (torch.float32, 1.0)):
        what = f"LN forward and backward against torch's, T=8192, D=512, {dtype}"
        made = ops.make(ops.CASES["layer_norm"](), dtype)
        rows.append(
            times(what, made, "torch", "deepfast", wanted, rounds=max(rounds, 31), warmup=5)
        )
    return rows


def report(name: str, about: str, claims: Callable[[int], list[dict]], argv=None) -> int:
    """The command ``python -m name``: measures and prints the claims; 1 where one is not met."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result = environment() | {"command": f"python -m {name}"}
    result["copy_gb_per_second"] = round(copy_bandwidth(), 2)
    print(f"copy: {result['copy_gb_per_second']} GB/s on {args.threads} threads")
    result["rows"] = claims(args.rounds)
    if args.output:
        write_atomically(args.output, (json.dumps(result, indent=2) + "\n").encode())
    return 0 if all(row["met"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(report("bench.numbers", __doc__, claims))
