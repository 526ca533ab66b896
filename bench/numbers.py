"""The claims, each a ratio between variants of one run: `python -m bench.numbers`.

Every row is measured on 2 threads with the variants taking turns; the ratio quoted is the median
of the rounds' own ratios.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from bench import depth_mix, layer_norm, transformer
from deepfast.backend import build_info
from deepfast.measure.clock import (
    copy_variant,
    interleave,
    keep_memory,
    ratio,
)
from deepfast.measure.machine import cpu_model
from deepfast.memory import LiveBytes


def _row(name, slow, fast, timings, reach, *, at_most=False, value=None) -> dict:
    value = ratio(timings[slow], timings[fast]) if value is None else value
    met = value <= reach if at_most else value >= reach
    row = {
        "what": name,
        "value": round(value, 3),
        "reach": f"{'at most' if at_most else 'at least'} {reach}",
        "met": met,
        "rounds": len(timings[fast].seconds) if timings else None,
        "seconds": {k: round(t.median, 5) for k, t in timings.items()} if timings else {},
    }
    print(f"{'ok  ' if met else 'MISS'} {name}: {row['value']} ({row['reach']})  {row['seconds']}",
          flush=True)  # fmt: skip
    return row


def peak_bytes(run) -> int:
    """Most bytes of tensors made by ``run`` alive at once; what lives before it counts as zero."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak


def mixing_against_stack(rounds: int, suffix: str = "") -> dict:
    made = depth_mix.make(100, 2048, 256)
    variants = {name: made[name] for name in ("deepfast", "stack and sum")}
    timings = interleave(variants, repeats=rounds)
    name = f"mixing alone against stack and sum, L=100, T=2048, D=256, fp32{suffix}"
    return _row(name, "stack and sum", "deepfast", timings, 60)


def mixing_against_denseformer(rounds: int, suffix: str = "") -> dict:
    made = depth_mix.make(60, 2048, 256)
    variants = {name: made[name] for name in ("deepfast", "DenseFormer form")}
    timings = interleave(variants, repeats=rounds)
    name = f"mixing alone against the DenseFormer form, L=60, T=2048, D=256, fp32{suffix}"
    return _row(name, "DenseFormer form", "deepfast", timings, 10)


def mixing_forward(rounds: int) -> dict:
    made = depth_mix.make(100, 4096, 512, backward=False)
    variants = {name: made[name] for name in ("deepfast", "one fused pass per layer")}
    timings = interleave(variants, repeats=rounds)
    name = "mixing forward against one fused pass per layer, L=100, T=4096, D=512, fp32"
    return _row(name, "one fused pass per layer", "deepfast", timings, 2.5)


def layer_norm_rows(rounds: int) -> list[dict]:
    rows = []
    for dtype, reach in ((torch.bfloat16, 2.0), (torch.float32, 1.0)):
        made = layer_norm.make(dtype)
        variants = {name: made[name] for name in ("deepfast", "torch")}
        timings = interleave(variants, repeats=rounds, warmup=5)
        name = f"LN forward and backward against torch's, T=8192, D=512, {dtype}"
        rows.append(_row(name, "torch", "deepfast", timings, reach))
    return rows


def training_step(rounds: int) -> list[dict]:
    variants = {c: transformer.make(100, c) for c in ("residual", "dlcl")}
    timings = interleave(variants, repeats=rounds)
    time_row = _row(
        "training step of a DLCL encoder over the plain residual one, L=100, T=2048, D=256",
        "dlcl", "residual", timings, 1.10, at_most=True,
    )  # fmt: skip
    peaks = {name: peak_bytes(run) for name, run in variants.items()}
    memory_row = _row(
        "peak bytes of the same", None, None, None, 1.05, at_most=True,
        value=peaks["dlcl"] / peaks["residual"],
    )  # fmt: skip
    return [time_row, memory_row | {"bytes": peaks}]


def stack_memory() -> dict:
    made = depth_mix.make(100, 2048, 256)
    peaks = {name: peak_bytes(made[name]) for name in ("deepfast", "stack and sum")}
    row = _row(
        "mixing alone, peak bytes of stack and sum over deepfast's, L=100", None, None, None, 6,
        value=peaks["stack and sum"] / peaks["deepfast"],
    )  # fmt: skip
    return row | {"bytes": peaks}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    copy, nbytes = copy_variant()
    bandwidth = interleave({"copy": copy}, repeats=9, nbytes={"copy": nbytes})["copy"]
    print(f"copy: {bandwidth.gb_per_second:.1f} GB/s on {args.threads} threads")
    rows = [
        mixing_forward(args.rounds),
        mixing_against_denseformer(args.rounds),
        mixing_against_stack(args.rounds),
        stack_memory(),
        *training_step(args.rounds),
    ]
    # From here on freed memory is kept. Peers with large temporaries gain most from that, and
    # layer-norm is too short to be measured beside page faults.
    if keep_memory():
        suffix = ", freed memory kept"
        rows += [mixing_against_denseformer(args.rounds, suffix)]
        rows += [mixing_against_stack(min(args.rounds, 3), suffix)]
    rows += layer_norm_rows(max(args.rounds, 31))
    if args.output:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "command": "python -m bench.numbers",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": args.threads,
            "cpu": cpu_model(),
            "build": build_info(),
            "copy_gb_per_second": round(bandwidth.gb_per_second, 2),
            "rows": rows,
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
