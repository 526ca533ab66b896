"""The rows of a GPU, a file of JSON lines, and how one is measured."""

import contextlib
import faulthandler
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from deepfast.clock import captured, on_cpu
from deepfast.selfcheck.store import digest

BF16 = torch.bfloat16
ITEM_SECONDS = 180
"""The limit of a row; compiling included."""
COPY = ("a copy of 2 GiB", "torch")

Item = tuple[str, str, Callable[[], dict]]
"""What is measured, in which form, and a function that returns the fields of the row. The first
form is what the table divides the others by."""


def stored(path: Path) -> Iterator[dict]:
    """The rows of a file, without what a process that was killed has left of a line."""
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


class Rows:
    """The rows of a file. Each line has the kernel sources that it was measured with; the last one
    with a key (stage, what, form) counts.

    Args:
        since: when the command began. It measures again what failed before.
        again: whether it measures all again.
        dry: whether it runs on a CPU at toy sizes.
    """

    def __init__(self, path: Path, since: float = 0.0, again: bool = False, dry: bool = False):
        self.path, self.since, self.again, self.dry = path, since, again, dry
        self.device = "cpu" if dry else "cuda"

    def add(self, *key: str, **fields: object) -> None:
        """Writes a row at once; lines of several processes do not mix."""
        row = {"key": key, "sources": digest(), "time": time.time(), **fields}
        with self.path.open("ab", buffering=0) as file:
            # A process that was killed may have left half a line before it.
            file.write(b"\n" + json.dumps(row).encode() + b"\n")

    def read(self) -> dict[tuple[str, ...], dict]:
        """The rows of these kernel sources, by key."""
        rows = stored(self.path) if self.path.exists() else ()
        return {tuple(row["key"]): row for row in rows if row["sources"] == digest()}

    def lacks(self, *key: str) -> bool:
        """Whether this row has to be measured."""
        row = self.read().get(key)
        if row is None:
            return True
        return row["time"] < self.since and (self.again or "error" in row)

    def measure(self, stage: str, items: Iterable[Item]) -> None:
        """Adds the rows that are missing. An item that fails, ends the process or hangs leaves a
        row with its error."""
        for what, form, run in items:
            if not self.lacks(stage, what, form):
                continue
            print(f"{what}, {form}", flush=True)
            self.add(stage, what, form, error="its process ended before it was done")
            if not self.dry:
                faulthandler.dump_traceback_later(ITEM_SECONDS, exit=True)
            try:
                fields = run()
            except torch.OutOfMemoryError:
                fields = {"note": "out of memory"}
            except Exception as error:
                fields = {"error": f"{type(error).__name__}: {error}"[:2000]}
            faulthandler.cancel_dump_traceback_later()
            self.add(stage, what, form, **fields)
            # A step refers to itself; its memory would count as the next one's.
            gc.collect()
            if not self.dry:
                # After a fault of the device every call fails, so this ends the process.
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def size(self, full, toy):
        """The full size, which fills a GPU, or the toy size, which runs in an instant."""
        return toy if self.dry else full

    def compiled(self, function: Callable) -> Callable:
        """`torch.compile`; in a dry run a graph is traced and no code generated."""
        # After eight variants of a function torch would run the next one eager.
        torch.compiler.reset()
        return torch.compile(function, dynamic=False, backend=self.size("inductor", "aot_eager"))

    def timed(self, run: Callable[[], object], nbytes: int = 0, graph: bool = True) -> dict:
        """Median seconds of a run, with L2 emptied before it. The replay of a CUDA graph is timed
        where one can be captured: it leaves out Python's launches.

        nbytes: what the run has to move.
        """
        moved: dict = {"nbytes": nbytes} if nbytes else {}
        if self.dry:
            return {"seconds": on_cpu(run)} | moved
        from triton.testing import do_bench

        torch.cuda.reset_peak_memory_stats()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Backward runs on the stream of its forward, and the default stream cannot be captured.
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            moved |= {"peak_bytes": torch.cuda.max_memory_allocated()}
            if graph:
                try:
                    run = captured(run, stream)
                except Exception as error:
                    torch.cuda.synchronize()
                    moved["note"] = f"no CUDA graph: {type(error).__name__}: {str(error)[:200]}"
            low, median, high = do_bench(run, rep=400, quantiles=[0.2, 0.5, 0.8])
        return {"seconds": median / 1e3, "low": low / 1e3, "high": high / 1e3} | moved

    def copy(self) -> Item:
        """The copy with whose bandwidth the rows of a stage are compared."""

        def run() -> dict:
            source = torch.ones(self.size(1 << 30, 1 << 12), device=self.device, dtype=BF16)
            target = torch.empty_like(source)
            # In a CUDA graph a copy engine makes it, which takes half as long again.
            return self.timed(lambda: target.copy_(source), 2 * source.nbytes, graph=False)

        return *COPY, run


def table(rows: dict[tuple[str, ...], dict]) -> str:
    """The rows as text."""
    lines, first = [], dict[tuple[str, str], float | None]()
    for (stage, what, form), row in rows.items():
        value = row.get("seconds", row.get("loss"))
        if value is None and not {"note", "error"} & row.keys():
            continue
        if (stage, what) not in first:
            lines.append(f"\n{stage}: {what}")
        base = first.setdefault((stage, what), value)
        cells = [f"  {form:32}"]
        if value is not None:
            cells.append(f"{value * 1e3:11.4f} ms" if "seconds" in row else f"loss {value:.4f}")
            cells.append(f"{value / base:6.3f} of the first" if base else "")
        if "nbytes" in row:
            rate = row["nbytes"] / row["seconds"]
            copy = rows.get((stage, *COPY), {})
            cells.append(f"{rate / 1e9:.0f} GB/s")
            if "seconds" in copy:
                cells.append(f"{rate * copy['seconds'] / copy['nbytes']:.2f} of a copy")
        cells.append(f"{row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else "")
        cells += [row.get("note", ""), f"ERROR {row['error']}" if "error" in row else ""]
        lines.append("  ".join(filter(None, cells)))
    return "\n".join(lines)
