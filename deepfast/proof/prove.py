"""Proves kernels in processes of their own, then times the proved ones, and writes the table.

A fault in a kernel ends its process, or lets it run out of time, and is an entry of the table. The
process that asks is not touched.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepfast.proof import table as tables
from deepfast.proof.table import Entry, Table

ROUNDS = 9


class NoWorker(RuntimeError):
    """A worker did not even start, which says nothing about the kernels."""


@dataclass
class Runner:
    """Starts workers and reads their lines."""

    device: torch.device
    start: float = 300.0
    """Seconds until a worker is ready: it imports torch and opens the device."""
    silence: float = 120.0
    """Seconds for one case, with the compilation of its kernels."""
    workers: int = 8
    thorough: bool = False
    prelude: str = ""
    """Python that a worker runs first; tests load an emulator in it, and break kernels."""
    _live: set[subprocess.Popen] = field(default_factory=set)
    _stopped: bool = False

    def _start(self, op: str, items: list[dict], errors) -> subprocess.Popen:
        job = {
            "op": op, "device": str(self.device), "thorough": self.thorough, "rounds": ROUNDS,
            "items": items,
        }  # fmt: skip
        code = f"{self.prelude}\nfrom deepfast.cases.worker import main\nmain()"
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "DEEPFAST_PROOF": "off",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # cuBLAS asks for it in torch's deterministic mode.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("DEEPFAST_BACKEND", None)
        try:
            return subprocess.Popen(
                # -P: the current folder may hold files with the names of packages.
                [sys.executable, "-P", "-c", code, json.dumps(job)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise NoWorker(
                f"{op}: no process could be started to prove kernels: {error}"
            ) from error

    def _lines(self, process: subprocess.Popen) -> Iterator[dict | None]:
        """What the worker says; None where it ran out of time."""
        lines: queue.Queue = queue.Queue()

        def read() -> None:
            for line in process.stdout:
                # The last line of a process that ends may be cut off.
                if line.endswith("\n"):
                    lines.put(json.loads(line))
            lines.put(EOFError)

        threading.Thread(target=read, daemon=True).start()
        limit = self.start
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                yield None
                return
            if line is EOFError:
                # It has closed stdout and is about to end, with a status that tells why.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.silence)
                return
            yield line
            limit = self.silence

    def run(self, op: str, items: list[dict]) -> Iterator[tuple[dict, dict]]:
        """(item, result) of every item, in their order. The item that was running when a worker
        ended has its end as the error, and another worker continues with the next item. A result's
        "memory" says that memory ran out: in the kernels, or so that the system killed the worker.

        Raises:
            NoWorker: where a worker ends before its first item.
        """
        while items and not self._stopped:
            finished, end = 0, ""
            running: dict | None = None
            with tempfile.TemporaryFile("w+", errors="replace") as errors:
                process = self._start(op, items, errors)
                self._live.add(process)
                try:
                    for line in self._lines(process):
                        if line is None:
                            limit = self.silence if running else self.start
                            end = f"no answer within {limit:g} s"
                        elif "begin" in line:
                            running = line
                        elif "done" in line:
                            yield items[line["done"]], line
                            finished = line["done"] + 1
                    ended = process.poll()
                finally:
                    kill(process)
                    self._live.discard(process)
                if finished < len(items) and not self._stopped:
                    errors.seek(0)
                    last = (errors.read().strip().splitlines() or [""])[-1]
                    end = end or _end(process.returncode) + (f": {last}" if last else "")
                    if running is None or running["begin"] < finished:
                        raise NoWorker(f"{op}: the process that proves kernels ended: {end}")
                    result = {
                        "backend": running["backend"], "error": f"{running['case']}: {end}",
                        # Linux kills a process when the machine has no memory left.
                        "memory": ended is not None and -ended == getattr(signal, "SIGKILL", None),
                    }  # fmt: skip
                    yield items[finished], result
                    finished += 1
            items = items[finished:]

    def stop(self) -> None:
        """Ends all workers; `run` starts no more."""
        self._stopped = True
        for process in list(self._live):
            kill(process)


def _end(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the process ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def kill(process: subprocess.Popen) -> None:
    """Ends a worker and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            process.kill()
    process.wait()
    process.stdin.close()


Wanted = dict[str, dict[str, list[str]]]
"""By op and backend the dtypes to prove, as "bfloat16"."""


def correct(
    runner: Runner, wanted: Wanted
) -> tuple[dict[str, dict[str, Entry] | NoWorker], set[str]]:
    """By op and dtype which backends are right; several workers at once, since they mostly
    compile. NoWorker in place of an op's results where its workers did not start. Then the ops
    whose workers ran out of memory."""

    def job(op: str, by: str, dtypes: list[str]) -> list[tuple[dict, dict]]:
        return list(runner.run(op, [{"dtype": d, "backend": by} for d in dtypes]))

    right: dict[str, dict[str, Entry]] = {op: {} for op in wanted}
    lost: dict[str, NoWorker] = {}
    short: set[str] = set()
    count = max(1, min(os.cpu_count() or 1, runner.workers))
    with ThreadPoolExecutor(count) as pool:
        try:
            jobs = [
                (op, pool.submit(job, op, by, dtypes))
                for op, backends in wanted.items()
                for by, dtypes in backends.items()
            ]
            for op, made in jobs:
                try:
                    results = made.result()
                except NoWorker as error:
                    lost[op] = error
                    continue
                for item, result in results:
                    fresh: Entry = {"errors": {}, "seconds": {}}
                    entry = right[op].setdefault(item["dtype"], fresh)
                    entry["errors"][item["backend"]] = result["error"]
                    if result.get("memory"):
                        short.add(op)
        except BaseException:
            runner.stop()
            raise
    return right | lost, short


def time(runner: Runner, op: str, entries: dict[str, Entry]) -> bool:
    """Adds the seconds of every proved backend and of torch's own form, at each width. Returns
    whether memory ran out.

    float16 moves as many bytes as bfloat16 and takes its times. A backend that fails here, at a
    size where it was not run before, is not proved either.
    """
    short = False
    rival, kind = tables.rival(op), runner.device.type
    alike = {d: "bfloat16" if d == "float16" and "bfloat16" in entries else d for d in entries}
    names = {
        dtype: sorted(
            set().union(*(tables.proved(entries[d]) for d in entries if alike[d] == dtype))
        )
        for dtype in set(alike.values())
    }
    items = [
        {"dtype": dtype, "width": width, "backends": [*by, rival]}
        for dtype, by in sorted(names.items()) if by for width in tables.widths(op, kind)
    ]  # fmt: skip
    while items:
        again = []
        for item, result in runner.run(op, items):
            short |= bool(result.get("memory"))
            like = [entries[d] for d in entries if alike[d] == item["dtype"]]
            if "seconds" in result:
                for entry in like:
                    kept = {*tables.proved(entry), rival}
                    entry["seconds"][str(item["width"])] = {
                        by: s for by, s in result["seconds"].items() if by in kept
                    }
                continue
            # Where torch's own form fails, the others have nothing to be compared with.
            left = [by for by in item["backends"] if by != result["backend"]]
            if result["backend"] != rival:
                for entry in like:
                    entry["errors"][result["backend"]] = result["error"]
            if len(left) > 1 or (left and left != [rival]):
                again.append(item | {"backends": left})
        items = again
    for entry in entries.values():
        for seconds in entry["seconds"].values():
            for by in set(seconds) - tables.proved(entry) - {rival}:
                del seconds[by]
    return short


def prove(
    table: Table,
    wanted: Wanted,
    runner: Runner,
    *,
    timed: bool = True,
    told: Callable[[str], None] = lambda op: None,
) -> None:
    """Proves and times ``wanted`` and writes each op's result into the table when it is complete.
    The caller holds the table's lock. Where memory ran out, the result is for this process alone,
    because it depends on what else had taken memory.

    timed: False leaves the times out; then the order of the backends decides.
    told: called with each op that is finished.
    """
    found, short = correct(runner, wanted)
    for op, entries in found.items():
        try:
            if isinstance(entries, NoWorker):
                raise entries
            if timed and time(runner, op, entries):
                short.add(op)
        except NoWorker as error:
            tables.log.warning("%s", error)
            failed = {by: str(error) for by in wanted[op]}
            dtypes = {d for names in wanted[op].values() for d in names}
            table.lost[op] = {d: {"errors": dict(failed), "seconds": {}} for d in dtypes}
        else:
            if op in short:
                tables.log.warning(
                    "deepfast: memory ran out while %s was proved: what was found holds for this "
                    "process, and the next one proves it again; `deepfast prove` does so while the "
                    "device is free", op,
                )  # fmt: skip
                table.lost[op] = entries
            else:
                table.lost.pop(op, None)
                table.ops[op] = table.ops.get(op, {}) | entries
                tables.write(table)
        told(op)
