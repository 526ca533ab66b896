"""The stages of `make gpu`. Each adds to the results and returns what went wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu import machine, page, profiling, results, sections, workers
from bench.gpu.workers import ROOT, Task

BUILD_SECONDS, PROOF_SECONDS, LAUNCH_SECONDS, TEST_SECONDS = 240, 240, 90, 180
"""Limits of the build, of the proof, of one launch, of one test; compiling included."""

DRY_PATIENCE = 4
"""The factor of all limits in a dry run, whose processor may be busy."""

DRY_TESTS = ["tests/gpu/test_activation.py"]
"""tests/gpu itself runs without a GPU elsewhere; a dry run tests how it is run."""


class Stage:
    """One stage of this command.

    Args:
        options: the command's arguments.
        seconds: the stage's limit.
    """

    def __init__(self, found: results.Results, options, seconds: float):
        self.results, self.dry, self.options = found, options.dry_run, options
        self.patience = DRY_PATIENCE if self.dry else 1
        self.end = time.perf_counter() + seconds * self.patience
        self.problems: list[str] = []

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.perf_counter())

    def run(self, tasks: list[Task], take, item_seconds, seconds: float = 1e9) -> None:
        """Runs tasks at once, see `workers.run`; saves the results as they come."""
        self.problems += workers.run(
            tasks, take,
            seconds=min(self.left, seconds * self.patience),
            item_seconds=lambda item: self.patience * item_seconds(item),
            environment=machine.child_environment(self.dry), tick=self.results.save,
        )  # fmt: skip
        self.results.save(now=True)

    def fail(self, what: str, event: dict) -> None:
        """Prints and keeps a failure."""
        self.problems.append(f"{what}: {event['outcome']}")
        print(f"  FAILED {what} ({event['outcome']})\n{event['text'][-1500:]}", flush=True)


# ---- smoke ---------------------------------------------------------------------------------------


def build(stage: Stage) -> None:
    """Compiles deepfast._C for the GPU's own architecture where that is needed, once in a command.
    If it fails, the other steps still run."""
    if "build" in stage.results.run:
        return
    stage.results.run["build"] = None
    # In a dry run the processes that need the emulator of the CUDA kernels compile it.
    if stage.dry or not machine.stale():
        return
    command = [sys.executable, "-m", "bench.gpu.machine", machine.architecture()]
    print("building the compiled ops", flush=True)
    start, seconds = time.perf_counter(), min(stage.left, BUILD_SECONDS)
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds,
            env=machine.child_environment(False),
        )  # fmt: skip
        error = None if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired:
        error = f"stopped after {seconds:.0f} s"
    taken = round(time.perf_counter() - start, 1)
    stage.results.run["build"] = {"seconds": taken, "error": error}
    print(f"  {error or 'built'}, {taken} s", flush=True)
    stage.problems += ["building the compiled ops failed"] * bool(error)
    stage.results.save(now=True)


def launches(stage: Stage) -> None:
    """Every launch once: Triton's kernels compile in several processes."""
    part = stage.results.part("launches")

    def take(task: Task, event: dict) -> None:
        if "end" in event:
            by = task.name.split()[0]
            name, outcome = event["end"], event["outcome"]
            part.setdefault(by, {})[name] = {k: v for k, v in event.items() if k != "end"}
            stage.results.changed = True
            if outcome == "ok":
                print(f"  ok {name}, {by}, {event['seconds']} s", flush=True)
            else:
                stage.fail(f"{name}, {by}", event)

    shares = {"cuda": 1, "triton": 1 if stage.dry else processes()}
    tasks = [
        Task(f"{by} {i}",
             [*profiling.LAUNCHES, "--by", by, "--share", f"{i}/{count}", *dry_run(stage)],
             {"DEEPFAST_PROOF": "off"})
        for by, count in shares.items() for i in range(count)
    ]  # fmt: skip
    stage.run(tasks, take, lambda name: LAUNCH_SECONDS, seconds=180)


def processes() -> int:
    """How many processes compile kernels or compute references side by side."""
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def dry_run(stage: Stage) -> list[str]:
    return ["--dry-run"] * stage.dry


def prove(stage: Stage) -> None:
    """`deepfast prove`, unless everything is proved: the defaults are then the kernels that are
    right and fastest here."""
    part = stage.results.part("proof")
    if stage.dry or "proof" in stage.results.run or machine.proved():
        print("a dry run proves nothing" if stage.dry else "proved before", flush=True)
        return
    print("deepfast prove", flush=True)
    command = [sys.executable, "-m", "deepfast", "prove", "--json"]
    start, part["status"], part["table"] = time.perf_counter(), "stopped", None
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True,
            timeout=min(stage.left, PROOF_SECONDS), env=machine.child_environment(False),
        )  # fmt: skip
        part["status"], part["said"] = f"exit status {done.returncode}", done.stderr[-4000:]
        part["table"] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        part["said"] = part.get("said") or str(error)
    part["seconds"] = round(time.perf_counter() - start, 1)
    print("\n".join(page.proof(stage.results.record)), flush=True)
    stage.results.run["proof"] = part["status"]
    if part["status"] != "exit status 0":
        stage.problems.append(f"deepfast prove: {part['status']}")
    stage.results.save(now=True)


def smoke(stage: Stage) -> None:
    launches(stage)
    prove(stage)
    measure(stage, sections.SMOKE)


# ---- tests ---------------------------------------------------------------------------------------


def test_files(dry: bool) -> list[str]:
    """The files with tests for a GPU. Collecting every file would take longer, and would import
    files that need Triton's interpreter."""
    if dry:
        return DRY_TESTS
    marked = (p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
    return sorted(str(p.relative_to(ROOT)) for p in marked if p != Path(__file__))


def complete(found: dict) -> bool:
    """Whether every test of a file ran, and none failed."""
    return not found["failed"] and found["passed"] + len(found["skipped"]) == found["collected"]


def tests(stage: Stage) -> None:
    """Runs the tests in processes side by side, then alone those that need much memory."""
    part = stage.results.part("tests")
    files = stage.options.tests or test_files(stage.dry)
    if not stage.options.again:
        done = [f for f in files if f in part and complete(part[f])]
        print(f"passed before with these sources, not run again: {', '.join(done) or 'none'}")
        files = [f for f in files if f not in done]
    for file in files:
        part[file] = {"collected": -1, "passed": 0, "failed": [], "skipped": [], "seconds": 0.0}

    def take(task: Task, event: dict) -> None:
        stage.results.changed = True
        if "collected" in event:
            part[event["file"]]["collected"] = event["collected"]
        if "end" not in event:
            return
        file = event["end"].partition("::")[0]
        found, told = part[file], {"test": event["end"], "text": event["text"]}
        found["seconds"] = round(found["seconds"] + event["seconds"], 1)
        if event["outcome"] == "ok":
            found["passed"] += 1
        elif event["outcome"] == "skipped":
            found["skipped"].append(told)
        else:
            found["failed"].append(told)
            stage.fail(event["end"], event)

    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "bench.gpu.log"]
    command += ["-p", "no:cacheprovider", "--color=no", *["--all-cases"] * (not stage.dry)]
    for alone, count in ((0, 1 if stage.dry else processes()), (1, 1)):
        if files:
            shares = [f"{i}/{count} {alone}" for i in range(count)]
            tasks = [
                Task(f"tests {share}", command, {"DEEPFAST_SHARE": share, "DEEPFAST_PROOF": "off"})
                for share in shares
            ]
            stage.run(tasks, take, lambda test: TEST_SECONDS)
    for file in files:
        found = part[file]
        print(f"{file}: {found['passed']} passed, {len(found['failed'])} failed, "
              f"{len(found['skipped'])} skipped of {found['collected']}", flush=True)  # fmt: skip


# ---- bench ---------------------------------------------------------------------------------------


def measure(stage: Stage, names: tuple[str, ...]) -> None:
    """Sections of benchmarks, one after another in one process; a new one after a crash."""
    part = stage.results.part("sections")

    def take(task: Task, event: dict) -> None:
        stage.results.changed = True
        if "section" in event:
            name = event["section"]
            part[name] = results.merge(part.get(name, {}), event["record"])
        elif "begin" in event:
            part.setdefault(event["begin"], {})["status"] = "begun"
            print(f"\n== {event['begin']}", flush=True)
        elif "end" in event:
            found = part[event["end"]]
            found["status"], found["seconds"] = event["outcome"], event["seconds"]
            print(page.told(event["end"], found), flush=True)
            if event["outcome"] != "ok":
                stage.fail(f"section {event['end']}", event)

    if not stage.options.again:
        done = [name for name in names if part.get(name, {}).get("status") == "ok"]
        print(f"measured before with these sources, not again: {', '.join(done) or 'none'}")
        names = tuple(name for name in names if name not in done)
    if names:
        command = [sys.executable, "-m", "bench.gpu.sections", *names, *dry_run(stage)]
        stage.run([Task("sections", command)], take, lambda name: sections.SECTIONS[name].seconds)


def bench(stage: Stage) -> None:
    # What is measured first is what a user gets, so it has to be known which kernels serve.
    prove(stage)
    before = machine.clocks()
    measure(stage, tuple(stage.options.sections or sections.BENCH))
    stage.results.run["clocks"] = {"before": before, "after": machine.clocks()}


# ---- profile -------------------------------------------------------------------------------------


def profile(stage: Stage) -> None:
    """Every launch under compute-sanitizer, and then alone the main ones under ncu."""
    part = stage.results.part("profile")

    def take(task: Task, event: dict) -> None:
        found = part.setdefault(task.name, {"launches": 0, "failed": []})
        stage.results.changed = True
        if "end" in event and event["outcome"] == "ok":
            found["launches"] += 1
        elif "end" in event:
            found["failed"].append(event)
            stage.fail(f"{task.name}: {event['end']}", event)
        elif "exit" in event:
            found["exit"] = event["exit"]
            if task.name.startswith("ncu"):
                found["kernels"] = profiling.kernels(event["output"])
            elif event["exit"] != 0:
                found["output"] = event["output"][-4000:]
                stage.problems.append(f"{task.name}: exit status {event['exit']}")

    groups = {
        check: profiling.sanitizer_tasks(check, stage.dry, processes())
        for check in profiling.SANITIZERS
    }
    groups["ncu"] = profiling.ncu_tasks(stage.dry)
    for name, (tasks, missing) in groups.items():
        if missing is not None:
            print(missing, flush=True)
            part[name] = {"note": missing}
        for task in tasks:
            part.pop(task.name, None)
        # What ncu times has to be alone.
        for group in [[task] for task in tasks] if name == "ncu" else [tasks]:
            stage.run(group, take, lambda launch: 3 * LAUNCH_SECONDS)


STAGES = {
    "smoke": (smoke, 9.0), "tests": (tests, 9.3), "bench": (bench, 9.3), "profile": (profile, 9.0)
}  # fmt: skip
"""Each with its limit in minutes, in the order in which they run."""
