"""nvcc compiles every CUDA kernel for every architecture, without a register spill; no GPU.

    python -m tests.cuda.ptxas      # or make cuda-check

Each csrc/cuda/*.cu is compiled with warnings as errors.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from deepfast import build

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<target>sm_\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads",
    re.DOTALL,
)


def spills(said: str) -> list[str]:
    """A line for each kernel that spills, in what ptxas said."""
    reports = REPORT.findall(said)
    if not reports:
        return [f"expected a report of each kernel, got:\n{said}"]
    return [
        f"{name} for {target}: {stack} bytes of stack, {int(stores) + int(loads)} of spills"
        for name, target, stack, stores, loads in reports
        if int(stack) or int(stores) or int(loads)
    ]


def faults_of(source: Path, nvcc: str, architectures: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *build.cuda_flags(architectures), "-Xptxas=-v"]
        command += ["-Werror=all-warnings", "-c", str(source), "-o", "out"]
        build.write_headers(Path(folder))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        return [f"{source.name} does not compile:\n{said}"]
    return spills(said)


def main() -> int:
    nvcc = build.find_nvcc()
    if nvcc is None:
        print("cuda-check: no nvcc was found, nothing was compiled")
        return 0
    version, architectures = build.nvcc_facts(nvcc)
    sources = sorted(SOURCES.glob("*.cu"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(faults_of, source, nvcc, architectures) for source in sources]
        faults = [fault for job in jobs for fault in job.result()]
    print("\n".join(faults))
    print(f"nvcc {version}: {len(sources)} files compiled, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
