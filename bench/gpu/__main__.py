"""Everything that needs a GPU: `make gpu`, or single stages with `make gpu STAGE="right ratio"`.

Without a stage all run, in the order of their worth. Each ends within four minutes:

    build     compiles the CUDA kernels for this GPU, where that is needed
    right     `deepfast selfcheck`: every launch against float64, and a training step
    ratio     the bandwidth of a copy; training steps with DLCL and attention residuals over plain
              ones; what a launch costs the host
    plans     peaks of steps beside what `deepfast plan` predicts
    copy      the connections and every op beside a copy, torch and `torch.compile`
    workload  the training step that Fast-AttnRes published, in each form that is installed
    curves    losses of 200 steps in bf16 beside those of torch
    tests     the tests that need a GPU, in processes side by side

Each row is written at once to bench/results/<gpu>.jsonl. What is there is left out, unless it is an
error or the kernels changed: a stage that was cut off goes on where it was. A crash or a hang costs
one row. The exit status is 0 only if nothing failed. Needs pytest and pytest-xdist.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu import stages, workload
from bench.gpu.rows import Rows, table
from deepfast import availability, backend, build, library
from deepfast.cases import check, sizes
from deepfast.machine import environment

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 3.8
"""The limit of a stage; in a dry run, whose processor may be busy, four times as much."""


def compile_kernels(rows: Rows) -> None:
    """Compiles deepfast._C for this GPU's architecture alone, where it lacks these kernels."""
    if rows.dry or torch.version.cuda is None:
        return
    architecture = "".join(map(str, torch.cuda.get_device_capability()))
    if architecture not in (backend.build_info().get("cuda") or "").split("+"):
        build.CUDA_ARCHITECTURES = (architecture,)
        build.compile_ops(library.in_package(build.why_no_cuda() is None))


def right(rows: Rows) -> None:
    """Each line of `deepfast selfcheck` is a row. It keeps by itself what it found right."""
    if rows.dry:
        rows.measure("right", ((op, "deepfast", lambda op=op: checked(op)) for op in backend.OPS))
        return
    command = [sys.executable, "-m", "deepfast", "selfcheck", *["--again"] * rows.again]
    variables = os.environ | {"DEEPFAST_SELFCHECK": "first-use"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        for line in process.stdout or ():
            what, _, found = line.strip().partition(": ")
            # Of kernels a line says op, backend and dtype, and whether they are right.
            kernels = what.partition(" ")[0] in backend.OPS and what.count(" ") == 2
            wrong = kernels and not found.startswith(("right", "out of memory"))
            rows.add("right", what, "deepfast", **{"error" if wrong else "note": found})
            print(line, end="", flush=True)
    status = str(process.returncode)
    rows.add("right", "exit status", "deepfast", **{"note" if status == "0" else "error": status})


def checked(op: str) -> dict:
    """In a dry run: the first call of an op, on the backends of a GPU."""
    case = next(iter(sizes.LISTED[op](sizes.QUICK["cpu"])))
    for by in ("triton", *["cuda"] * (op in availability.IN_CUDA)):
        if error := check.fault(case, by, torch.float32, "cpu", runs=1):
            return {"error": f"{by}: {error}"}
    return {"note": "right"}


class Outcomes:
    """A plugin of pytest: each test is a row, as soon as it has ended."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def pytest_runtest_logreport(self, report):
        # Setup and teardown count where the test fails or is skipped in them.
        if report.when == "call" or not report.passed:
            error = {"error": report.longreprtext[-2000:]} if report.failed else {}
            file, _, test = report.nodeid.partition("@")[0].partition("::")
            self.rows.add("tests", file, test, note=report.outcome, **error)

    def pytest_collectreport(self, report):
        if report.failed:
            self.rows.add("tests", report.nodeid, "", error=report.longreprtext[-2000:])


def tests(rows: Rows) -> None:
    """The tests marked gpu, in processes side by side; those in one group take turns."""
    import pytest

    marked = (p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
    files = [str(path.relative_to(ROOT)) for path in sorted(marked)]
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    words = ["-q", "-p", "no:cacheprovider", "--max-worker-restart=1000", "--dist=loadgroup"]
    words += [*files, "-m", "gpu", f"-n{workers}"]
    if rows.dry:
        words = ["-q", "-p", "no:cacheprovider", "tests/gpu/test_ops.py", "-m", "not slow", "-n0"]
    known = [key for key in rows.read() if key[0] == "tests" and not rows.lacks(*key)]
    done = [f"--deselect={file}::{test}" for _, file, test in known]
    pytest.main([*words, *done], [Outcomes(rows)])


STAGES: dict[str, Callable[[Rows], None]] = {
    "build": compile_kernels,
    "right": right,
    "ratio": lambda rows: rows.measure("ratio", stages.ratio(rows)),
    "plans": lambda rows: rows.measure("plans", stages.plans(rows)),
    "copy": lambda rows: rows.measure("copy", stages.copy(rows)),
    "workload": lambda rows: rows.measure("workload", workload.workload(rows)),
    "curves": lambda rows: rows.measure("curves", workload.curves(rows)),
    "tests": tests,
}
"""In the order in which they run."""


def work(stage: str, rows: Rows) -> None:
    """A stage, in a process of its own."""
    # Linux ends it when the command is killed that started it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.manual_seed(0)
    if rows.dry:
        from tests.cuda import build as emulator

        torch.set_num_threads(1)
        torch.ops.load_library(emulator.build())
        emulator.emulate()
    STAGES[stage](rows)


def run(command: list[str], rows: Rows, seconds: float) -> str | None:
    """Runs a command that adds rows, again after each crash, until it ends well or its time is
    over. Returns why it did not end well."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "DEEPFAST_SELFCHECK": "off"}
    # A variable of the shell must not change what is measured.
    variables |= {"DEEPFAST_BACKEND": "", "TRITON_INTERPRET": "1" if rows.dry else "0"}
    end = time.perf_counter() + seconds
    while True:
        before = rows.read()
        process = subprocess.Popen(command, cwd=ROOT, env=variables, process_group=0)
        try:
            status = process.wait(max(1.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s; the next run goes on"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == 0 or rows.read() == before:
            return f"ended with status {status}" if status else None


def machine(dry: bool) -> dict:
    """What a reader needs to judge the numbers."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = f"nvidia-smi --query-gpu={query} --format=csv,noheader"
    return environment() | ({} if dry else {"gpu": subprocess.getoutput(command)})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.gpu", description=__doc__, formatter_class=kind)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES], help="or all")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU at toy sizes: a minute")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    # The process of a stage gets these.
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    dry, options = args.dry_run, (args.since, args.again, args.dry_run)
    if args.work:
        work(args.stage[0], Rows(args.work, *options))
        return 0
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs every stage on the CPU", file=sys.stderr)
        return 2
    folder = args.output or (Path(tempfile.mkdtemp()) if dry else ROOT / "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    device = "dry run" if dry else torch.cuda.get_device_name()
    rows = Rows(folder / f"{'-'.join(device.lower().split())}.jsonl", *options)
    for stage in args.stage:
        print(f"\n==== {stage}", flush=True)
        words = ["--stage", stage, "--work", str(rows.path), "--since", str(args.since)]
        words += ["--dry-run"] * dry + ["--again"] * args.again
        command = [sys.executable, "-m", "bench.gpu", *words]
        problem = run(command, rows, 60 * MINUTES * (4 if dry else 1))
        error = {"error": problem} if problem else {}
        rows.add(stage, "the stage", "deepfast", machine=machine(dry), **error)
    found = rows.read()
    print(f"{table(found)}\n\nwritten: {rows.path}")
    return int(any("error" in row for row in found.values() if row["time"] >= args.since))


if __name__ == "__main__":
    sys.exit(main())
