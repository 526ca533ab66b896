"""What `deepfast selfcheck` does: every case of every kernel, then times.

Each op, backend and dtype has a process of its own, `deepfast.cases.worker`. So a kernel that
crashes or hangs ends only its own process, and its end is the result.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

import torch

from deepfast.selfcheck.store import Store

SECONDS = 300.0
"""The limit of a case: a process imports torch before the first one, and compiles its kernels."""

PROCESSES = 8
"""Maximum number of parallel processes. They mostly compile."""

ORDER = (
    "boundary", "attention_boundary", "layer_norm", "linear_cross_entropy", "attention",
    "activation",
)  # fmt: skip
"""The ops of a training step come first, others later."""

DTYPES = ("bfloat16", "float32", "float16")
"""In the order in which they are checked."""

STEP = "training step"
"""The job that times steps of an encoder with depth connections and without; no op."""

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
    lines: queue.Queue[bytes] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            # -P: the current folder may hold files with the names of packages.
            [sys.executable, "-P", "-c", code, json.dumps(job)],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        with process, process.stdout as out:  # type: ignore[union-attr]
            # A read has no time limit, so that another thread waits for the lines.
            threading.Thread(target=_pass_on, args=(out, lines), daemon=True).start()
            try:
                last, end = _follow(lines, seconds)
            except BaseException:
                process.kill()
                raise
            if end is not None:
                process.kill()
        errors.seek(0)
        said = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    if "error" in last:
        return last
    if end is None:
        end = _end(process.returncode) + (f": {said}" if said else "")
    if not last:
        raise RuntimeError(f"{job['op']}: no test case was run: {end}")
    # Linux kills a process when the machine has no memory left.
    return {"error": f"{last['case']}: {end}", "by": last["by"], "memory": "SIGKILL" in end}


def _pass_on(out: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Puts each line into ``lines``, and an empty one at the end."""
    with contextlib.suppress(ValueError):  # The parent has closed it.
        for line in out:
            lines.put(line)
    lines.put(b"")


def _follow(lines: queue.Queue[bytes], seconds: float) -> tuple[dict, str | None]:
    """The last whole line, and why the process must be ended, if it must."""
    last: dict = {}
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            return last, f"no answer within {seconds:g} s"
        # The last line of a process that ends may be cut off.
        if not line.endswith(b"\n"):
            return last, None
        last = json.loads(line)


def _end(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the process ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


Start = Callable[[dict], dict]


def _rank(kernels: tuple[str, str, str]) -> tuple:
    op, by, dtype = kernels
    return DTYPES.index(dtype), ORDER.index(op) if op in ORDER else len(ORDER), op, by


def check(
    store: Store, wanted: dict[str, dict[str, list[str]]], device: torch.device, *,
    thorough: bool = False, again: bool = False, say: Callable[[str], None] = print,
    start: Start | None = None,
) -> bool:  # fmt: skip
    """Runs all cases of the wanted kernels, then times those that passed. Stores and reports each
    result at once. Returns whether all kernels passed.

    wanted: op -> backend -> dtypes, such as "bfloat16".
    again: whether kernels that were right before are checked again.
    start: replaces `run` in tests.
    """
    kernels = [
        (op, by, dtype)
        for op, backends in wanted.items() for by, dtypes in backends.items() for dtype in dtypes
    ]  # fmt: skip
    kernels.sort(key=_rank)
    shared = {"device": str(device), "thorough": thorough}
    start = start or run
    right: dict[tuple[str, str], list[str]] = {}
    fine = True
    if not (again or thorough):
        # A kernel that was wrong is checked again.
        known = [k for k in kernels if k in store.full and k not in store.wrong]
        kernels = [k for k in kernels if k not in known]
        for k in known:
            say(f"{' '.join(k)}: right on {store.full[k]}; --again checks it again")
    say(f"{device}: kernels to check, by op, backend and dtype: {len(kernels)}")
    if any(op in ("boundary", "attention_boundary") for op, _, _ in kernels):
        try:
            timed = start(shared | {"op": STEP, "by": ["deepfast"], "dtype": "bfloat16"})
        except RuntimeError as error:
            timed = {"error": str(error).removeprefix(f"{STEP}: ")}
        fine &= _time_steps(timed, say)
    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, PROCESSES)))
    try:
        jobs = {
            pool.submit(start, shared | {"op": op, "by": [by], "dtype": dtype}): (op, by, dtype)
            for op, by, dtype in kernels
        }
        for job in as_completed(jobs):
            (op, by, dtype), result = jobs[job], job.result()
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


def _time_steps(result: dict, say: Callable[[str], None]) -> bool:
    """Says what a training step with a depth connection takes over one without, alone on the
    device: the first that most users want to know. Kernels get their quick check in it. Returns
    whether it ran, or memory ran out."""
    if result["error"] is not None:
        say(f"{STEP}: {result['error']}")
        return bool(result.get("memory"))
    plain = result["seconds"].pop("residual")
    ratios = ", ".join(f"{name} {each / plain:.3f}" for name, each in result["seconds"].items())
    say(f"{STEP}, bf16, over the plain residual's {plain * 1e3:.1f} ms: {ratios}")
    return True


def _keep(store: Store, op: str, by: str, dtype: str, result: dict, say) -> None:
    if result.get("memory"):
        say(f"{op} {by} {dtype}: out of memory, not an error of the kernel: no result is stored")
        return
    store.add(op=op, backend=by, dtype=dtype, error=result["error"], date=time.strftime("%Y-%m-%d"))
