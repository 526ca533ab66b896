"""What `deepfast selfcheck` does: every case of every kernel, then times.

Each op, backend and dtype has a process of its own, `deepfast.cases.worker`. So a kernel that
crashes or hangs ends only its own process, and its end is the result.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deepfast.selfcheck.store import Store

SECONDS = 300.0
"""The limit of a process: it imports torch, compiles kernels and runs all cases."""

PROCESSES = 8
"""Maximum number of parallel processes. They mostly compile."""

LENGTHS = (64, 512, 4096)
"""Longest sentences at which attention is timed: tiles that suit one do not suit another."""

WIDTHS = (512, 1024, 4096)
"""Channels of a row at which other ops are timed; of an LSTM half as many."""


def widths(op: str, kind: str) -> tuple[int, ...]:
    """Sizes at which an op is timed on devices of type ``kind``; small on a CPU, for tests."""
    found: tuple[int, ...] = LENGTHS if op == "attention" else WIDTHS
    found = found if kind == "cuda" else tuple(3 + n // 128 for n in found)
    return tuple(w // 2 for w in found) if op == "peephole_lstm" else found


def torchs(op: str) -> str:
    """The backend that is torch's own form of the op."""
    return "sdpa" if op == "attention" else "reference"


def run(job: dict, seconds: float = SECONDS, prelude: str = "") -> dict:
    """Runs a job of `deepfast.cases.worker` in a subprocess and returns its result.

    prelude: Python that the process runs first; tests break kernels in it.

    Raises:
        RuntimeError: the process ended before its first case, so no kernel was checked.
    """
    code = f"{prelude}\nfrom deepfast.cases.worker import main\nmain()"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # cuBLAS asks for it in torch's deterministic mode.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            # -P: the current folder may hold files with the names of packages.
            [sys.executable, "-P", "-c", code, json.dumps(job)],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
        )  # fmt: skip
        end, out, errors = _end(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        end, out, errors = f"no answer within {seconds:g} s", expired.stdout or b"", b""
    # The last line of a process that ends may be cut off.
    lines = [json.loads(line) for line in out.decode().rpartition("\n")[0].splitlines()]
    last = lines[-1] if lines else {}
    if "error" in last:
        return last
    said = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
    end += f": {said}" if said else ""
    if not lines:
        raise RuntimeError(f"{job['op']}: no test case was run: {end}")
    # Linux kills a process when the machine has no memory left.
    return {"error": f"{last['case']}: {end}", "by": last["by"], "memory": "SIGKILL" in end}


def _end(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the process ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


Start = Callable[[dict], dict]


def check(
    store: Store, wanted: dict[str, dict[str, list[str]]], device: torch.device, *,
    thorough: bool = False, say: Callable[[str], None] = print, start: Start | None = None,
) -> bool:  # fmt: skip
    """Runs all cases of the wanted kernels, then times those that passed. Stores and reports each
    result at once. Returns whether all kernels passed.

    wanted: op -> backend -> dtypes, such as "bfloat16".
    start: replaces `run` in tests.
    """
    kernels = [
        (op, by, dtype)
        for op, backends in wanted.items() for by, dtypes in backends.items() for dtype in dtypes
    ]  # fmt: skip
    shared = {"device": str(device), "thorough": thorough}
    start = start or run
    right: dict[tuple[str, str], list[str]] = {}
    fine = True
    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, PROCESSES)))
    try:
        jobs = [
            pool.submit(start, shared | {"op": op, "by": [by], "dtype": dtype})
            for op, by, dtype in kernels
        ]
        for (op, by, dtype), job in zip(kernels, jobs, strict=True):
            result = job.result()
            fine &= result["error"] is None
            say(f"{op} {by} {dtype}: {result['error'] or 'right'}")
            _keep(store, op, by, dtype, result, say)
            if result["error"] is None:
                right.setdefault((op, dtype), []).append(by)
    finally:
        # After an interrupt, start no further process.
        pool.shutdown(cancel_futures=True)
    for (op, dtype), names in right.items():
        if dtype == "float16" and (op, "bfloat16") in right:
            continue  # It moves as many bytes, in the same time.
        timed = start(
            shared | {"op": op, "by": [*names, torchs(op)], "dtype": dtype,
                      "widths": widths(op, device.type)}
        )  # fmt: skip
        if timed["error"] is not None:
            # At these sizes the kernel was not run before.
            fine = False
            say(f"{op} {timed['by']} {dtype}: {timed['error']}")
            if timed["by"] in names:
                _keep(store, op, timed["by"], dtype, timed, say)
            continue
        for size, seconds in timed["seconds"].items():
            times = ", ".join(f"{by} {s * 1e6:.0f} us" for by, s in seconds.items())
            say(f"{op} {dtype}, size {size}: {times}")
    return fine


def _keep(store: Store, op: str, by: str, dtype: str, result: dict, say) -> None:
    if result.get("memory"):
        say(f"{op} {by} {dtype}: out of memory, not an error of the kernel: no result is stored")
        return
    store.add(op=op, backend=by, dtype=dtype, error=result["error"], date=time.strftime("%Y-%m-%d"))
