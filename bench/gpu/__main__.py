"""Everything that needs a GPU, in one command under ten minutes: tests, then benchmarks.

`make gpu`, or `python -m bench.gpu` from the repository's root. Each group of tests and each
section of benchmarks runs in its own process with a time limit, so a crash or a hang stops no other
one. After every step the measurements are written to ``bench/results/<gpu>-<date>.json`` and
``.md``, and copied to $OUT if it is set. The exit status is 0 only if all tests passed and no
benchmark raised.

``--dry-run`` runs every step on the CPU at toy sizes, with Triton's interpreter.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu import page, sections
from deepfast.backend import build_info
from deepfast.measure.machine import environment

ROOT = Path(__file__).resolve().parents[2]

TEST_GROUPS = {
    "layer_norm": ["tests/gpu/test_layer_norm.py"],
    "activation": ["tests/gpu/test_activation.py"],
    "depth_mix": ["tests/gpu/test_depth_mix.py"],
    "depth_attention": ["tests/gpu/test_depth_attention.py"],
    "boundary": ["tests/gpu/test_boundary.py"],
    "attention": ["tests/gpu/test_attention.py"],
    "linear_cross_entropy": ["tests/gpu/test_linear_cross_entropy.py"],
    "peephole_lstm": ["tests/gpu/test_peephole_lstm.py"],
    "stacks": ["tests/gpu/test_stacks.py"],
    "elsewhere": [],
}
"""Processes of pytest. A group with the name of a section tests what that section measures.
"elsewhere" is every other file with a test marked ``gpu``."""
TEST_SECONDS, BUILD_SECONDS, SANITIZER_SECONDS = 220, 200, 60
DRY_PATIENCE = 4
"""The factor of all these limits in a dry run, whose processor may be busy."""


def first_line(*command: str, last: bool = False) -> str | None:
    """The first or last line of a tool's output; None if there is no such tool."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if done.returncode == 0 and lines else None


def machine(dry: bool) -> dict:
    """The facts about the machine for the page: its device, and versions."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    version = importlib.metadata.version if importlib.util.find_spec("triton") else lambda _: None
    found = {"device": "dry run" if dry else torch.cuda.get_device_name()}
    found |= {k: v for k, v in environment().items() if not isinstance(v, dict)}
    found |= {
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "nvcc": first_line(nvcc, "--version", last=True),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    if not dry:
        p = torch.cuda.get_device_properties(0)
        found |= {
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
            "l2_mib": round(p.L2_cache_size / 2**20, 1),
        }
    return found


def clocks() -> str | None:
    """The clocks, temperature and power of the GPU, which nothing here changes."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
    return first_line("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


class Results:
    """The results file, rewritten after every step."""

    def __init__(self, folder: Path, name: str, facts: dict):
        self.start = time.perf_counter()
        self.paths = folder / f"{name}.json", folder / f"{name}.md"
        self.data = facts | {"complete": False, "tests": None, "sections": {}}
        folder.mkdir(parents=True, exist_ok=True)
        self.save()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def save(self) -> None:
        self.data["seconds"] = round(self.elapsed, 1)
        for path, text in zip(
            self.paths, (json.dumps(self.data, indent=1) + "\n", page.page(self.data)),
            strict=True,
        ):  # fmt: skip
            path.write_text(text)
            if os.environ.get("OUT"):
                shutil.copy(path, os.environ["OUT"])


def child_environment(dry: bool, **more: str) -> dict[str, str]:
    """The environment of the processes started here."""
    changed = {"PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1"} | more
    if dry:
        changed |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # A variable of the shell must not change what is measured.
    ours = ("DEEPFAST_BACKEND", "TRITON_INTERPRET")
    return {k: v for k, v in os.environ.items() if k not in ours} | changed


def build(results: Results) -> None:
    """Builds deepfast._C in place if there is none, or none with CUDA. If that fails, the other
    steps still run."""
    if results.data["dry_run"]:
        # The emulator of the CUDA kernels is built here, because a section has too little time.
        program = ROOT / "tests" / "cuda" / "build.py"
        if program.exists():
            subprocess.run([sys.executable, str(program)], stdout=subprocess.DEVNULL, check=True)
    info = build_info()
    if "missing" not in info and (torch.version.cuda is None or info["cuda"] is not None):
        return
    print("building deepfast._C", flush=True)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
        error = None if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired:
        error = f"stopped after {BUILD_SECONDS} s"
    results.data["build_error"] = error
    if error:
        print(f"building deepfast._C failed\n{error}", flush=True)
    results.save()


def sanitize(results: Results, seconds: float) -> None:
    """Runs every CUDA kernel under compute-sanitizer, if it is installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    results.data["sanitizer"] = found = {}
    if not Path(program).exists():
        found["note"] = "compute-sanitizer was not found"
        return
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m"]
        try:
            done = subprocess.run(
                [*command, "bench.gpu.launches"], cwd=ROOT, capture_output=True,
                text=True, timeout=seconds, env=child_environment(False),
            )  # fmt: skip
            said = (done.stdout + done.stderr)[-2000:]
            found[tool] = "ok" if done.returncode == 0 else f"exit {done.returncode}:\n{said}"
        except subprocess.TimeoutExpired:
            found[tool] = f"stopped after {seconds:.0f} s"
        print(f"{tool}: {found[tool]}", flush=True)
        results.save()


def read_lines(path: Path) -> list[dict]:
    """The lines that a process wrote; a killed process may leave the last one incomplete."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def files_of(group: str) -> list[str]:
    if group != "elsewhere":
        return TEST_GROUPS[group]
    # Collecting every file would take longer, and would import files that need Triton's
    # interpreter.
    marked = (p for p in (ROOT / "tests").glob("*/test_*.py") if "mark.gpu" in p.read_text())
    return sorted(str(p.relative_to(ROOT)) for p in marked if p.parent.name != "gpu")


def run_tests(results: Results, dry: bool, groups: list[str], seconds: float) -> None:
    """Runs all groups at once: they spend most of their time compiling kernels on the processor."""
    end = time.perf_counter() + seconds
    started = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in groups:
            log, out = Path(folder, f"{name}.jsonl"), Path(folder, f"{name}.txt")
            command = [sys.executable, "-m", "pytest", *files_of(name), "-m", "gpu", "-q"]
            command += ["-p", "bench.gpu.log", "-p", "no:cacheprovider", "--color=no"]
            command += [] if dry else ["--all-cases"]
            with out.open("w") as file:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                    env=child_environment(dry, DEEPFAST_TEST_LOG=str(log)),
                )  # fmt: skip
            # A small machine runs the groups one after another.
            alone = (os.cpu_count() or 1) < 2 * len(groups)
            started[name] = process, log, out, alone and _wait(process, end)
        results.data["tests"] = {}
        for name, (process, log, out, stopped) in started.items():
            stopped = stopped or _wait(process, end)
            results.data["tests"][name] = group = _group(process, stopped, read_lines(log), out)
            print(f"tests of {name}: {group['passed']} passed, {len(group['failed'])} failed, "
                  f"{len(group['skipped'])} skipped, {group['status']}", flush=True)  # fmt: skip
            for failure in group["failed"]:
                print(f"  FAILED {failure['test']}\n{failure['text'][-1500:]}", flush=True)
            results.save()


def _wait(process: subprocess.Popen, end: float) -> bool:
    """Waits for the process; returns whether it had to be stopped at ``end``."""
    try:
        process.wait(max(0.0, end - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def _group(process: subprocess.Popen, stopped: bool, lines: list[dict], out: Path) -> dict:
    fine = process.returncode == 0
    done = "ok" if fine else f"failed, exit status {process.returncode}"
    group = {
        "status": "stopped: out of time" if stopped else done,
        "passed": sum(line["outcome"] == "passed" for line in lines),
        "failed": [line for line in lines if line["outcome"] == "failed"],
        "skipped": [line for line in lines if line["outcome"] == "skipped"],
        "slowest": sorted(
            ([line["seconds"], line["test"]] for line in lines), reverse=True
        )[:5],
    }  # fmt: skip
    if not fine and not group["failed"]:
        group["output"] = out.read_text(errors="replace")[-4000:]
        print(group["output"], flush=True)
    return group


def run_section(results: Results, name: str, dry: bool, seconds: float) -> None:
    """One section in its own process, which saves its results after every case."""
    print(f"\n== {name} (at most {seconds:.0f} s)", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.json")
        command = [sys.executable, "-m", "bench.gpu.sections", name, str(part)]
        process = subprocess.Popen(
            command + ["--dry-run"] * dry, cwd=ROOT, env=child_environment(dry), stdout=None
        )
        stopped = _wait(process, start + seconds)
        section = json.loads(part.read_text()) if part.exists() else {}
    if stopped:
        section["status"] = f"stopped after {seconds:.0f} s; its results until then are kept"
    elif process.returncode:
        section["status"] = f"failed, exit status {process.returncode}"
    else:
        section["status"] = "ok"
    section["seconds"] = round(time.perf_counter() - start, 1)
    print(f"  {section['status']}, {section['seconds']} s", flush=True)
    group = (results.data["tests"] or {}).get(name)
    if group and group["status"] != "ok":
        section["tests_failed"] = [f["test"] for f in group["failed"]] or [group["status"]]
    results.data["sections"][name] = section
    results.save()


def succeeded(data: dict) -> bool:
    groups = (data["tests"] or {}).values()
    sections = data["sections"].values()
    return (
        not data.get("build_error")
        and not any(said.startswith("exit") for said in data.get("sanitizer", {}).values())
        and all(group["status"] == "ok" for group in groups)
        and all(s["status"] == "ok" and not s.get("errors") for s in sections)
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="Tests and benchmarks on a GPU."
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the results file")
    parser.add_argument("--minutes", type=float, default=9.4, help="time for everything")
    names = list(sections.SECTIONS)
    parser.add_argument("--sections", nargs="*", default=names, choices=names)
    groups = list(TEST_GROUPS)
    parser.add_argument("--tests", nargs="*", default=groups, choices=groups)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    dry = args.dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs every step on the CPU", file=sys.stderr)
        return 2
    folder = args.output or (Path(tempfile.mkdtemp()) if dry else ROOT / "bench" / "results")
    facts = machine(dry)
    for name, value in facts.items():
        print(f"{name}: {value}")
    slug = "-".join("".join(c if c.isalnum() else " " for c in facts["device"].lower()).split())
    date = time.strftime("%Y-%m-%d")
    head = {"date": date, "command": "make gpu", "dry_run": dry, "machine": facts}
    results = Results(folder, f"{slug}-{date}", head)
    build(results)
    patience = DRY_PATIENCE if dry else 1
    left = 60 * args.minutes * patience
    if not dry and args.tests:
        sanitize(results, SANITIZER_SECONDS)
    run_tests(results, dry, args.tests, min(TEST_SECONDS * patience, left - results.elapsed))
    results.data["clocks_before"] = clocks()
    for name in args.sections:
        limit = min(sections.SECTIONS[name].seconds * patience, left - results.elapsed)
        if limit < 15:
            results.data["sections"][name] = {"status": "not run: no time was left"}
            print(f"\n== {name}: not run, no time was left", flush=True)
        else:
            run_section(results, name, dry, limit)
    results.data["clocks_after"] = clocks()
    results.data["complete"] = True
    results.save()
    print("\n" + page.summary(results.data))
    print(f"written: {', '.join(map(str, results.paths))} in {results.elapsed:.0f} s")
    return 0 if succeeded(results.data) else 1


if __name__ == "__main__":
    sys.exit(main())
