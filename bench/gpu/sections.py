"""The sections of `bench.gpu`. A process runs some of them, one after another."""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.gpu import attention, losses, models, ops, sweep
from bench.gpu.clock import Bench
from bench.gpu.journal import Journal
from bench.gpu.machine import device


class Section(NamedTuple):
    run: Callable[[Bench], object]
    seconds: float
    """The time limit, compiling included."""


SECTIONS = {
    "copy": Section(ops.copy, 40),
    "training ratio": Section(models.ratio, 150),
    "training": Section(models.training, 300),
    "layer_norm": Section(ops.layer_norm, 100),
    "depth_mix": Section(ops.depth_mix, 60),
    "boundary": Section(ops.boundary, 60),
    "mixing": Section(models.mixing, 60),
    "attention": Section(attention.attention, 60),
    "linear_cross_entropy": Section(losses.linear_cross_entropy, 60),
    "launching": Section(models.launching, 40),
} | {f"sweep of {name}": Section(run, 150) for name, run in sweep.SWEEPS.items()}
"""In the order in which they run."""

SMOKE = ("copy", "training ratio")
"""The sections of the first stage."""

BENCH = tuple(name for name in SECTIONS if name not in SMOKE)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    args = parser.parse_args(argv)
    kind, journal = device(args.dry_run), Journal()

    def work(name: str) -> None:
        torch.manual_seed(0)
        bench = Bench(kind, lambda record: journal.write(section=name, record=record))
        SECTIONS[name].run(bench)
        if bench.record["errors"]:
            raise RuntimeError(bench.record["errors"][0]["what"])

    return 0 if journal.run(args.sections, work) else 1


if __name__ == "__main__":
    sys.exit(main())
