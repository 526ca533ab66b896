"""The sections of `bench.gpu`; each runs in its own process."""

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu import (
    attention,
    losses,
    models,
    ops,
)
from bench.gpu.clock import Bench
from deepfast import backend


class Section(NamedTuple):
    run: Callable[[Bench], object]
    seconds: float
    """The time limit, compiling included."""


SECTIONS = {
    "copy": Section(Bench.copy, 25),
    "layer_norm": Section(ops.layer_norm, 100),
    "depth_mix": Section(ops.depth_mix, 45),
    "boundary": Section(ops.boundary, 40),
    "linear_cross_entropy": Section(losses.linear_cross_entropy, 30),
    "launching": Section(models.launching, 25),
    "mixing": Section(models.mixing, 45),
    "attention": Section(attention.attention, 45),
    "training": Section(models.training, 90),
}
"""In the order in which they run."""


def _emulate_cuda() -> None:
    """Runs the CUDA kernels on the CPU, in the emulator of tests/cuda, if that exists.

    `bench.gpu` has compiled it before the time of a section begins.
    """
    path = Path(__file__).resolve().parents[2] / "tests" / "cuda" / "build.py"
    if not path.exists():
        return
    spec = importlib.util.spec_from_file_location("build", path)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    torch.ops.load_library(build.build())
    backend.emulate_cuda(torch.ops.deepfast_emulated)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("output", type=Path, help="written again after every case")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    args = parser.parse_args(argv)
    torch.manual_seed(0)

    def save(record: dict) -> None:
        # The file is replaced at once: a process that is killed leaves no half-written file.
        fresh = args.output.with_suffix(".new")
        fresh.write_text(json.dumps(record))
        fresh.replace(args.output)

    if args.dry_run:
        _emulate_cuda()
    bench = Bench("cpu" if args.dry_run else "cuda", save)
    try:
        SECTIONS[args.section].run(bench)
    except Exception:
        bench.error(args.section, traceback.format_exc())
    save(bench.record)
    return 1 if bench.record["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
