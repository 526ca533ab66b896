"""Everything that needs a GPU: `make gpu STAGE=smoke`, then tests, bench and profile.

Or `python -m bench.gpu --stage smoke` from the repository's root. Without a stage all run, in this
order. Each ends within ten minutes:

    smoke     compiles the ops for this GPU; each launch once; what `deepfast prove` finds; the
              bandwidth of a copy; a training step beside plain compiled PyTorch
    tests     tests/gpu, in processes side by side
    bench     benchmarks: the training step first, at the end other tiles, warps and blocks
    profile   every launch under compute-sanitizer, and ncu's counters

Every result is written at once to ``bench/results/<gpu>.json``, and to a page ``<gpu>.md``. Runs
with the same kernel sources add up there: what passed or was measured is left out unless
``--again``. A crash or a hang costs only the launch, test or section that it happened in. The exit
status is 0 only if nothing failed.

``--dry-run`` runs every stage on the CPU at toy sizes, with Triton's interpreter and the emulator
of the CUDA kernels.
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from bench.gpu import machine, page, sections
from bench.gpu.results import Results
from bench.gpu.stages import STAGES, Stage, build
from deepfast.proof.table import digest


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--stage", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--copies", type=Path, help="a second folder that gets every result")
    parser.add_argument("--minutes", type=float, help="limit of each stage, in place of its own")
    parser.add_argument("--again", action="store_true", help="also what passed or was measured")
    parser.add_argument("--sections", nargs="*", choices=sections.SECTIONS, help="of bench")
    parser.add_argument("--tests", nargs="*", help="files of tests")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    dry = args.dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs every stage on the CPU", file=sys.stderr)
        return 2
    machine.link_kernels(machine.ROOT)
    folder = args.output or (Path(tempfile.mkdtemp()) if dry else machine.ROOT / "bench/results")
    facts = machine.facts(dry)
    for name, value in facts.items():
        print(f"{name}: {value}")
    run = {"date": time.strftime("%Y-%m-%d %H:%M"), "dry_run": dry, "machine": facts}
    results = Results(folder, digest(), run, args.copies)
    problems = []
    for name in args.stage:
        print(f"\n==== {name}", flush=True)
        work, minutes = STAGES[name]
        stage, start = Stage(results, args, 60 * (args.minutes or minutes)), time.perf_counter()
        results.run["stages"][name] = {"status": "begun"}
        try:
            build(stage)
            work(stage)
        except Exception:
            # The other stages and the results so far do not depend on it.
            stage.problems.append(traceback.format_exc())
            print(stage.problems[-1], flush=True)
        seconds = round(time.perf_counter() - start, 1)
        results.run["stages"][name] = {
            "status": "; ".join(stage.problems) or "ok",
            "seconds": seconds,
        }
        results.save(now=True)
        problems += stage.problems
    print("\n" + page.summary(results.record))
    print(f"written: {', '.join(map(str, results.paths))}, {results.run['seconds']} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
