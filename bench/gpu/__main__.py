"""Everything that needs a GPU: `make gpu`, or single stages with `make gpu STAGE="right ratio"`.

Or `python -m bench.gpu --stage right` from the repository's root. Without a stage all run, in this
order, which is that of their worth. Each ends within four minutes:

    build     compiles the ops for this GPU, where that is needed
    right     each launch once, then `deepfast selfcheck`
    ratio     the bandwidth of a copy; training steps over those of the plain residual encoder; what
              a launch costs the host
    copy      every op and kernel beside a copy, torch and `torch.compile`
    workload  the training step that Fast-AttnRes published
    curves    losses in bf16 beside those of torch, `torch.compile` and fla
    tests     tests/gpu, in processes side by side
    sweeps    other tiles, warps, stages, residency and blocks of rows
    profile   every launch under compute-sanitizer, and ncu's counters

Every result is written at once to ``bench/results/<gpu>.jsonl``, and after each stage to a page
``<gpu>.md``. Runs with the same kernel sources add up there: what passed or was measured is left
out unless ``--again``, so a stage that was cut off goes on where it was. A crash or a hang costs
only the launch, test or section that it happened in. The exit status is 0 only if nothing failed.
Needs pytest and pytest-xdist.

``--dry-run`` runs every stage on the CPU at toy sizes, with Triton's interpreter and the emulator
of the CUDA kernels, all in one process: about a minute.
"""

import argparse
import contextlib
import csv
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.gpu import launches, machine, page, plugin, sections
from bench.gpu.machine import ROOT
from bench.gpu.results import Run
from deepfast.files import write_atomically
from deepfast.selfcheck.store import digest

MINUTES = 3.8
"""The limit of a stage."""
ITEM_SECONDS = 180
"""The limit of one launch, test or section; compiling included."""
DRY_PATIENCE = 4
"""The factor of all limits in a dry run, whose processor may be busy."""
DRY_TESTS = ["tests/gpu/test_ops.py"]

SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
"""Tools and their options. Torch asks a driver for things that it may refuse: no fault of ours."""
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of the memory's peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the multiprocessors' peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of the warps",
    "launch__registers_per_thread": "registers",
}
"""What ncu measures, by its names, and what the page calls it."""


class Stage:
    """One stage of a command: its processes, their limit, and what went wrong."""

    def __init__(self, name: str, run: Run, options: argparse.Namespace):
        self.name, self.run, self.options = name, run, options
        minutes = options.minutes or MINUTES
        self.end = time.perf_counter() + 60 * minutes * (DRY_PATIENCE if run.dry else 1)
        self.problems: list[str] = []

    def start(self, command: list[str], **more: str) -> tuple[int, str, str]:
        """The exit status of a command, what it printed, and its errors. A command that does not
        end in time is ended with the processes that it started, and has the status -9."""
        seconds = max(1.0, self.end - time.perf_counter())
        environment = machine.child_environment() | self.run.variable() | more
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                env=environment | {plugin.STAGE: self.name}, process_group=0,
            )  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.problems.append(f"{' '.join(command[:6])}: stopped after {seconds:.0f} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0), err.seek(0)
            return process.returncode, out.read(), err.read()

    def pytest(self, words: list[str], workers: int) -> None:
        """Runs the items that have not passed yet, in ``workers`` processes."""
        done = [] if self.options.again else self.run.done(self.name)
        command = [*pytest_command(), *words, *(f"--deselect={item}" for item in done)]
        print(f"{len(done)} items passed before with these sources", flush=True)
        if self.run.dry:
            # One process for all stages: each one that starts takes seconds.
            os.environ.update(self.run.variable() | {plugin.STAGE: self.name})
            status, err = int(pytest.main([*command[3:], "-n", "0"])), ""
        else:
            status, out, err = self.start([*command, "-n", str(workers)])
            print(out[-12000:], flush=True)
        if status not in (0, 5):  # 5: all items were deselected.
            self.problems.append(f"{' '.join(words)}: exit status {status} {err[-300:]}")


def pytest_command() -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "bench.gpu.plugin", "-p",
            "no:cacheprovider", "--color=no", "--max-worker-restart=1000"]  # fmt: skip


def processes() -> int:
    """How many processes compile kernels or compute references side by side."""
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def build(stage: Stage) -> None:
    """Compiles deepfast._C for the GPU's own architecture where that is needed. If it fails, the
    other stages still run."""
    if stage.run.dry or not machine.stale():
        return
    print("building the compiled ops", flush=True)
    command = [sys.executable, "-m", "bench.gpu.machine", machine.architecture()]
    status, out, err = stage.start(command)
    if status:
        stage.problems.append("building the compiled ops failed")
        print((out + err)[-4000:], flush=True)


def selfcheck(stage: Stage) -> None:
    """`deepfast selfcheck`, unless all kernels were checked before: the defaults are then right."""
    if stage.run.dry or machine.checked():
        print("no selfcheck in a dry run" if stage.run.dry else "checked before", flush=True)
        return
    start = time.perf_counter()
    command = [sys.executable, "-m", "deepfast", "selfcheck"]
    status, out, err = stage.start(command, DEEPFAST_SELFCHECK="first-use")
    found = {"status": f"exit status {status}", "lines": out.splitlines(), "said": err[-4000:],
             "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
    stage.run.write("selfcheck", **found)
    print("\n".join(page.selfcheck(found)), flush=True)
    if status:
        stage.problems.append(f"deepfast selfcheck: {found['status']}")


def measure(stage: Stage) -> None:
    """The stage's sections of benchmarks, one after another in one process; a new one after a
    crash."""
    asked = stage.options.sections or sections.SECTIONS
    names = [name for name in sections.STAGES[stage.name] if name in asked]
    stage.pytest([f"bench/gpu/sections.py::test_section[{name}]" for name in names], 1)


def right(stage: Stage) -> None:
    stage.pytest(["bench/gpu/launches.py"], processes())
    selfcheck(stage)


def test_files(dry: bool) -> list[str]:
    """The files with tests for a GPU. Collecting every file would take longer, and would import
    files that need Triton's interpreter."""
    if dry:
        return DRY_TESTS
    marked = (p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
    return sorted(str(p.relative_to(ROOT)) for p in marked)


def tests(stage: Stage) -> None:
    """Runs the tests in processes side by side, then alone those that need much memory."""
    files = stage.options.tests or test_files(stage.run.dry)
    words = [*files, "--all-cases"]
    stage.pytest([*words, "-m", "gpu and not room"], processes())
    stage.pytest([*words, "-m", "gpu and room"], 1)


def profile(stage: Stage) -> None:
    """Every launch under compute-sanitizer, each in a process of its own, and then alone under
    ncu."""
    each = [f"bench/gpu/launches.py::test_launch[{by}-{name}]"
            for by in ("cuda", "triton") for name in launches.names(by)]  # fmt: skip
    tool = machine.tool("compute-sanitizer")
    for check, options in SANITIZERS.items():
        if stage.run.dry:
            stage.pytest(each[:1], 1)
            break
        if tool is None:
            print("compute-sanitizer was not found", flush=True)
            break
        prefix = [tool, "--tool", check, *options, "--error-exitcode", "9"]

        def sanitize(item: str, check: str = check, prefix: list[str] = prefix) -> None:
            # Torch's allocator keeps freed memory, in which a wrong access would not be found.
            status, out, err = stage.start(
                [*prefix, *pytest_command(), "-n", "0", item], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
            )
            if status:
                stage.problems.append(f"{check} of {item}: exit status {status}")
                print(f"{stage.problems[-1]}\n{(out + err)[-3000:]}", flush=True)

        with ThreadPoolExecutor(processes()) as pool:
            list(pool.map(sanitize, each))
    tool = machine.tool("ncu")
    if tool is None or stage.run.dry:
        print("ncu was not found, or this is a dry run", flush=True)
        return
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--nvtx", "--nvtx-include",
               "launch/", "--metrics", ",".join(METRICS)]  # fmt: skip
    for by in ("cuda", "triton"):
        words = [*pytest_command(), "-n", "0", "bench/gpu/launches.py", "-k", by]
        _, out, _ = stage.start([tool, *options, *words], **{launches.MAIN: "8192x512"})
        if rows := list(kernels(out)):
            stage.run.write("kernels", name=f"ncu of {by}", rows=rows)


def kernels(output: str) -> Iterator[dict]:
    """For each kernel that ncu measured its name and METRICS by the page's names."""
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        # The line after the head has the units.
        if row["ID"]:
            found = {said: row.get(metric) for metric, said in METRICS.items()}
            yield {"kernel": row["Kernel Name"][:80]} | found


STAGES: dict[str, Callable[[Stage], None]] = {
    "build": build, "right": right, "ratio": measure, "copy": measure, "workload": measure,
    "curves": measure, "tests": tests, "sweeps": measure, "profile": profile,
}  # fmt: skip
"""In the order in which they run."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--stage", nargs="+", choices=STAGES, help="default: all")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--copies", type=Path, help="a second folder that gets the results")
    parser.add_argument("--minutes", type=float, help="limit of each stage, in place of its own")
    parser.add_argument("--again", action="store_true", help="also what passed or was measured")
    names = ", ".join(sections.SECTIONS)
    parser.add_argument("--sections", nargs="+", choices=sections.SECTIONS, metavar="SECTION",
                        help=f"only these of the stages: {names}")  # fmt: skip
    parser.add_argument("--tests", nargs="+", help="files of tests")
    args = parser.parse_args(argv)
    asked = {*(args.sections or ())}
    holding = [name for name, found in sections.STAGES.items() if asked & found.keys()]
    args.stage = args.stage or holding or list(STAGES)
    if args.sections and not {*args.stage} <= {*holding}:
        of, got = ", ".join(holding), " ".join(args.stage)
        parser.error(f"--sections: these are of {of}, got --stage {got}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    dry = args.dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs every stage on the CPU", file=sys.stderr)
        return 2
    if importlib.util.find_spec("xdist") is None:
        print("bench.gpu needs pytest and pytest-xdist", file=sys.stderr)
        return 2
    if dry:
        torch.set_num_threads(1)
    machine.link_kernels(ROOT)
    folder = args.output or (Path(tempfile.mkdtemp()) if dry else ROOT / "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(dry)
    for name, value in facts.items():
        print(f"{name}: {value}")
    path, problems = folder / f"{machine.slug(facts['device'])}.jsonl", []
    for name in args.stage:
        print(f"\n==== {name}", flush=True)
        run = Run(str(path), digest(), dry, ITEM_SECONDS * (DRY_PATIENCE if dry else 1))
        stage, start, clocks = Stage(name, run, args), time.perf_counter(), machine.clocks()
        try:
            STAGES[name](stage)
        except Exception:
            # The other stages and the results so far do not depend on it.
            stage.problems.append(traceback.format_exc())
        run.write(
            "run", date=time.strftime("%Y-%m-%d %H:%M"), stage=name, machine=facts,
            status="; ".join(stage.problems) or "ok",
            seconds=round(time.perf_counter() - start, 1),
            clocks=clocks and f"{clocks} before, {machine.clocks()} after",
        )  # fmt: skip
        write_atomically(path.with_suffix(".md"), page.page(run).encode())
        for each in (path, path.with_suffix(".md")) if args.copies else ():
            shutil.copy(each, args.copies)
        print("\n".join(stage.problems), flush=True)
        problems += stage.problems
    print("\n" + page.summary(run))
    print(f"written: {path}, {path.with_suffix('.md')}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
