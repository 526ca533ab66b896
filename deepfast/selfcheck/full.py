"""The work of `deepfast selfcheck`: every case of every kernel, then times.

Each op, backend and dtype has a process of its own, `deepfast.cases.worker`. So a kernel that
crashes or hangs ends only its own process, and its end is the result.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from deepfast.selfcheck.store import Kernels, Store

SECONDS = 300
"""The limit of a case: a process imports torch before the first one, and compiles its kernels."""

PROCESSES = 8
"""Maximum number of parallel processes. They mostly compile."""

BOUNDARIES = ("boundary", "attention_boundary")
ORDER = (*BOUNDARIES, "layer_norm", "linear_cross_entropy", "attention", "activation")
"""The ops of a training step come first, others later."""

DTYPES = ("bfloat16", "float32", "float16")
"""In the order in which they are checked."""

STEP = "training step"
"""The job that times steps of an encoder with depth connections and without; no op."""


def run(job: dict, seconds: int = SECONDS, prelude: str = "") -> dict:
    """Runs a job of `deepfast.cases.worker` in a subprocess and returns its result.

    prelude: Python that the process runs first; tests break kernels in it.

    Raises:
        RuntimeError: the process ended before its first case, so no kernel was checked.
    """
    # The alarm ends a process that hangs, whatever it waits for. The worker sets it again.
    start = f"import signal\nsignal.alarm({seconds})\n{prelude}"
    code = f"{start}\nfrom deepfast.cases.worker import main\nmain()"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # cuBLAS asks for it in torch's deterministic mode.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }
    # -P: the current folder may hold files with the names of packages.
    command = [sys.executable, "-P", "-c", code, json.dumps(job | {"seconds": seconds})]
    # Files, because a compiler that the process started would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        status = subprocess.run(command, env=environment, **streams).returncode  # type: ignore[call-overload]
        out.seek(0)
        errors.seek(0)
        # The last line of a process that ends may be cut off.
        lines = [line for line in out if line.endswith(b"\n")]
        said = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    last = json.loads(lines[-1]) if lines else {}
    if "error" in last:
        return last
    end = f"the process ended with status {status}"
    with contextlib.suppress(ValueError):
        end = f"the process ended by {signal.Signals(-status).name}"
    end = f"{end}: {said}" if said else end
    if status == -signal.SIGALRM:
        end = f"no answer within {seconds} s"
    if not last:
        raise RuntimeError(f"{job['op']}: no test case was run: {end}")
    # Linux kills a process when the machine has no memory left.
    memory = status == -signal.SIGKILL
    return {"error": f"{last['case']}: {end}", "by": last["by"], "memory": memory}


def _rank(kernels: Kernels) -> tuple:
    op, by, dtype = kernels
    return DTYPES.index(dtype), ORDER.index(op) if op in ORDER else len(ORDER), op, by


def check(
    store: Store,
    kernels: list[Kernels],
    device: torch.device,
    *,
    thorough: bool = False,
    again: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Runs all cases of the kernels, then times those that passed. Stores and reports each result
    at once. Returns whether all kernels passed.

    again: whether kernels that were right before are checked again.
    """

    def start(op: str, by: list[str], dtype: str, **more: object) -> dict:
        return run({"op": op, "by": by, "dtype": dtype, "device": str(device), **more})

    def keep(kernels: Kernels, result: dict) -> bool:
        """Reports and stores a result; returns whether the kernels are right."""
        name, (op, by, dtype), error = " ".join(kernels), kernels, result["error"]
        say(f"{name}: {error or 'right'}")
        if result.get("memory"):
            say(f"{name}: out of memory, not an error of the kernel: no result is stored")
        else:
            date = time.strftime("%Y-%m-%d")
            store.add(op=op, backend=by, dtype=dtype, error=error, date=date)
        return error is None

    skip = not (again or thorough)
    known = [k for k in kernels if skip and k in store.full and k not in store.wrong]
    for k in known:
        say(f"{' '.join(k)}: right on {store.full[k]}; --again checks it again")
    kernels = sorted(set(kernels) - set(known), key=_rank)
    say(f"{device}: kernels to check, by op, backend and dtype: {len(kernels)}")
    fine, right = True, dict[tuple[str, str], list[str]]()
    if any(op in BOUNDARIES for op, _, _ in kernels):
        fine = say_step(start(STEP, ["deepfast"], "bfloat16"), say)
    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, PROCESSES)))
    try:
        jobs = {
            pool.submit(start, op, [by], dtype, thorough=thorough): (op, by, dtype)
            for op, by, dtype in kernels
        }
        for job in as_completed(jobs):
            op, by, dtype = jobs[job]
            if keep(jobs[job], job.result()):
                right.setdefault((op, dtype), []).append(by)
            else:
                fine = False
    finally:
        # After an interrupt, start no further process.
        pool.shutdown(cancel_futures=True)
    for (op, dtype), names in right.items():
        if dtype == "float16" and (op, "bfloat16") in right:
            continue  # It moves as many bytes, in the same time.
        torchs = "sdpa" if op == "attention" else "reference"
        timed = start(op, [*names, torchs], dtype, timed=True)
        if timed["error"] is not None:
            # At these sizes the kernel was not run before.
            fine = False
            if timed["by"] in names:
                keep((op, timed["by"], dtype), timed)
            else:
                say(f"{op} {timed['by']} {dtype}: {timed['error']}")
            continue
        for size, seconds in timed["seconds"].items():
            times = ", ".join(f"{by} {s * 1e6:.0f} us" for by, s in seconds.items())
            say(f"{op} {dtype}, size {size}: {times}")
    return fine


def say_step(result: dict, say: Callable[[str], None]) -> bool:
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
