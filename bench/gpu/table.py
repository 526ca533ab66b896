"""Writes the decisions of a run on a GPU into deepfast/backend.py: defaults and faster kernels.

    python -m bench.gpu.table bench/results/RUN.json

``PROVED`` gets the ops whose tests ran and passed there. ``SHAPES`` gets, by width, the faster of
cuda and triton if both were measured, over forward and backward together, as in a training step.
"""

import argparse
import json
import pprint
import re
import sys
from collections import defaultdict
from pathlib import Path

from deepfast.backend import NO_CUDA

BACKEND = Path(__file__).resolve().parents[2] / "deepfast" / "backend.py"
BEGIN, END = "# table: begin\n", "# table: end\n"

TESTS = {
    "layer_norm": ("layer_norm",),
    "activation": ("activation",),
    "depth_mix": ("depth_mix",),
    "depth_attention": ("depth_attention",),
    "boundary": ("boundary", "depth_mix", "stacks"),
    "attention": ("attention", "stacks"),
    "linear_cross_entropy": ("linear_cross_entropy",),
    "peephole_lstm": ("peephole_lstm",),
}
"""The groups of tests that an op must have passed."""

CASES = {
    "layer_norm": ("LN forward", "LN backward"),
    "depth_mix": ("functional depth_mix",),
    "boundary": ("boundary forward", "boundary backward", "depth mix forward", "depth mix pull"),
}
"""How the names of the benchmark cases of an op begin."""


def proved(results: dict) -> dict[str, tuple[str, ...]]:
    """For each backend, the ops whose tests all ran and passed."""
    groups = results["tests"] or {}

    def passed(name: str, op: str) -> bool:
        if name == "cuda" and op in ("attention", *NO_CUDA):
            return False
        sanitizer = results.get("sanitizer", {}).values()
        if name == "cuda" and any(said.startswith("exit") for said in sanitizer):
            return False
        for group in TESTS[op]:
            found = groups.get(group)
            # A process that crashed has an exit status, but may have no failed test.
            fine = found and (found["status"] == "ok" or found["failed"])
            if not fine or found["status"] not in ("ok", "failed, exit status 1"):
                return False
            other = {"cuda": "triton", "triton": "cuda"}[name]
            not_passed = found["failed"] + found["skipped"]
            # The parameters of a test name the kernels that it ran.
            if any(other not in line["test"].partition("[")[2] for line in not_passed):
                return False
            if not found["passed"]:
                return False
        return True

    return {name: tuple(op for op in TESTS if passed(name, op)) for name in ("cuda", "triton")}


def shapes(results: dict) -> dict[str, tuple[tuple[int, str], ...]]:
    """For each op, the faster backend by width, narrow widths first."""
    seconds: dict = defaultdict(lambda: defaultdict(dict))
    for section in results["sections"].values():
        for row in section.get("rows", []):
            by = row["variant"].removeprefix("deepfast, ")
            width = re.search(r"\bD=(\d+)", row["what"])
            for op, starts in CASES.items():
                if width and by in ("cuda", "triton") and row["what"].startswith(starts):
                    seconds[op][int(width[1])].setdefault(row["what"], {})[by] = row[
                        "median_seconds"
                    ]
    table = {}
    for op, widths in seconds.items():
        faster = []
        for width, cases in sorted(widths.items()):
            both = [c for c in cases.values() if len(c) == 2]
            if both:
                totals = {by: sum(c[by] for c in both) for by in ("cuda", "triton")}
                faster.append((width, min(totals, key=totals.get)))
        if faster:
            table[op] = tuple(faster)
    return table


def text(results: dict) -> str:
    """The lines between the markers."""
    lines = ["PROVED: dict[str, tuple[str, ...]] = " + pprint.pformat(proved(results), width=90)]
    kind = "dict[str, tuple[tuple[int, str], ...]]"
    lines += [f"SHAPES: {kind} = " + pprint.pformat(shapes(results), width=90)]
    return "\n".join(lines) + "\n"


def rewrite(source: str, results: dict) -> str:
    """backend.py with the lines between the markers replaced."""
    before, rest = source.split(BEGIN)
    return before + BEGIN + text(results) + END + rest.split(END)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the .json file that make gpu wrote")
    args = parser.parse_args(argv)
    results = json.loads(args.results.read_text())
    if results["dry_run"] or not results["complete"] or not results["tests"]:
        print(f"{args.results}: expected a complete run on a GPU with its tests, got a dry run "
              "or an incomplete one", file=sys.stderr)  # fmt: skip
        return 1
    BACKEND.write_text(rewrite(BACKEND.read_text(), results))
    print(text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
