"""Timing on a GPU: events around each run, L2 emptied before it; variants take turns.

L2 is emptied by reading a large buffer: after a write, the timed run would wait until the lines
of that write are stored. By default the replay of a CUDA graph is timed, which excludes Python's
launches. If one set of operands would fit L2, a run calls its function on several sets. Its results
stay alive to its end, so they are written to memory and do not overwrite each other in the cache.
On a CPU (a dry run) a wall clock replaces the events, and the function itself replaces the graph.
"""

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from bench.gpu.results import Run
from deepfast import backend
from deepfast.clock import captured, clock_of
from deepfast.measure.clock import Row


@dataclass(kw_only=True)
class Variant:
    """One way to do the work."""

    run: Callable[[], object]
    """Runs the calls; what it returns stays alive until the run ends."""
    calls: int = 1
    """Calls in a run; seconds are those of one call."""
    nbytes: int = 0
    """Bytes that one call has to move."""
    graph: bool = True
    """Whether to time the replay of a CUDA graph."""
    graph_only: bool = False
    """Whether a failed capture is an error; else the function is timed without a graph."""


class Clock:
    """Prepares variants and times single runs on one device."""

    def __init__(self, device: str):
        self.cuda, self.clock = device == "cuda", clock_of(device)
        size = 0
        if self.cuda:
            # One stream for everything: autograd runs a backward on its forward's stream, and the
            # legacy stream cannot be captured.
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)
            # Reading this much also takes longer than queueing a graph.
            size = max(1 << 28, 8 * torch.cuda.get_device_properties(0).L2_cache_size)
        self.unrelated = torch.ones(size // 4, device=device)
        self.sum = torch.zeros((), device=device)

    def prepare(self, variant: Variant, row: Row) -> Callable[[], object]:
        """Compiles the variant, fills caches, and captures the graph."""
        row.nbytes = variant.nbytes or None
        row.note = "graph" if variant.graph else "eager"
        for _ in range(3 if self.cuda else 0):
            variant.run()
        row.peak_bytes = self._peak(variant.run)
        if not variant.graph or not self.cuda:
            return variant.run
        try:
            replay = captured(variant.run, self.stream)
        except Exception as error:
            if variant.graph_only:
                raise
            torch.cuda.synchronize()
            row.note = f"eager: capture failed, {type(error).__name__}: {str(error)[:300]}"
            return variant.run
        replay()
        return replay

    def _peak(self, run: Callable[[], object]) -> int | None:
        """Peak bytes of the run's own tensors."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one run, with L2 emptied."""
        torch.sum(self.unrelated, 0, out=self.sum)
        return self.clock(run)


class Bench:
    """The results of a section of benchmarks, written as they come."""

    def __init__(self, run: Run, section: str):
        self.device, self.toy, self.section, self._run = run.device, run.dry, section, run
        self.clock = Clock(self.device)
        self.notes: set[str] = set()
        self.failed: list[str] = []
        self._copy: float | None = None

    def size(self, full, toy):
        """The full size, which fills a GPU, or the toy size, which runs in an instant."""
        return toy if self.toy else full

    def backends(self, op: str) -> list[str]:
        """The backends whose kernels for ``op`` are measured; a note says why one is left out."""
        found = {
            name: backend.why_unable(op, name, self.device, torch.bfloat16)
            for name in ("triton", "cuda")
        }
        for reason in found.values():
            if reason is not None:
                self.note(reason)
        return [name for name, reason in found.items() if reason is None]

    def sets(self, nbytes: int) -> int:
        """How many sets of operands of ``nbytes`` each are together far larger than L2."""
        return self.size(max(1, min(16, (1 << 29) // max(1, nbytes))), 2)

    def attempt(self, work: Callable[..., None], *args) -> None:
        """Runs ``work``; an exception is written and the section goes on."""
        try:
            work(self, *args)
        except Exception:
            self.error(f"{work.__name__}{args}", traceback.format_exc(limit=-8))
        if not self.toy:
            torch.cuda.empty_cache()

    def error(self, what: str, text: str) -> None:
        self.failed.append(f"{what}\n{text}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.add(text)
            self._run.write("note", section=self.section, note=text)

    def copy(self) -> float:
        """GB/s of a bf16 copy of a large tensor, bytes read plus written. Measured once per
        section, as the base of its fractions."""
        if self._copy is None:
            source = torch.randn(self.size(1 << 30, 1 << 12), device=self.device).bfloat16()
            target = torch.empty_like(source)
            run = self.clock.prepare(Variant(run=lambda: target.copy_(source)), Row(variant=""))
            seconds = sorted(self.clock.once(run) for _ in range(self.size(30, 5)))
            self._copy = 2 * source.nbytes / seconds[len(seconds) // 2] / 1e9
            self._run.write("copy", section=self.section, gb_per_second=self._copy)
        return self._copy

    def case(
        self,
        what: str,
        makers: dict[str, Callable[[], Variant]],
        seconds: float = 1.0,
        may_fail: bool = False,
    ) -> dict[str, Row]:
        """Measures the variants in turn for about ``seconds``, and writes a row for each: when it
        has run once, after 1, 2, 4, ... rounds, and at the end. One that raised has none.

        may_fail: whether a variant that raises is a note, and no error.
        """
        self.copy()
        rows: dict[str, Row] = {}
        ready: dict[str, Callable[[], float]] = {}

        def attempt(name: str, work: Callable[[], float]) -> None:
            try:
                rows[name].seconds.append(work())
            except Exception:
                rows.pop(name)
                ready.pop(name, None)
                text = traceback.format_exc(limit=-8)
                if may_fail:
                    self.note(f"{what}: {name}: {text.strip().splitlines()[-1][:300]}")
                else:
                    self.error(f"{what}: {name}", text)
                if self.clock.cuda:
                    torch.cuda.empty_cache()

        def prepared(name: str, make: Callable[[], Variant]) -> float:
            variant = make()
            run = self.clock.prepare(variant, rows[name])
            ready[name] = lambda: self.clock.once(run) / variant.calls
            return ready[name]()

        for name, make in makers.items():
            rows[name] = Row(variant=name, what=what)
            attempt(name, lambda name=name, make=make: prepared(name, make))
            # Before the next one is prepared, which may take minutes to compile.
            self.rows(rows[name] for name in [name] if name in rows)
            if name in rows and rows[name].note.startswith("eager: "):
                self.note(f"{what}: {name}: {rows[name].note}")
        if self.toy:
            # One run has shown that it works.
            return rows
        for row in rows.values():
            # That was a time to report, and not one of the rounds, in which variants take turns.
            row.seconds = []
        least, most = 5, 50
        end = time.perf_counter() + seconds
        for turn in range(most):
            if turn >= least and time.perf_counter() > end:
                break
            for name, once in list(ready.items()):
                attempt(name, once)
            if (turn + 1).bit_count() == 1:
                self.rows(rows.values())
        self.rows(rows.values())
        return rows

    def rows(self, rows: Iterable[Row]) -> None:
        """Writes rows; each replaces the row of its case and variant."""
        for row in rows:
            fraction = {"fraction_of_copy": self.fraction(row)}
            self._run.write("row", section=self.section, **row.as_dict() | fraction)

    def curve(self, what: str, losses: list[float]) -> None:
        """Writes the loss of every step of a training."""
        self._run.write("curve", section=self.section, what=what, losses=losses)

    def target(self, what: str, value: float | None, wanted: float, *, at_most: bool = False):
        """Writes whether a target was reached; the value is None if it was not measured."""
        met = value is not None and (value <= wanted if at_most else value >= wanted)
        value = None if value is None else round(value, 3)
        target = f"at {'most' if at_most else 'least'} {wanted}"
        print(f"  {'ok  ' if met else 'MISS'} {what}: {value} ({target})", flush=True)
        self._run.write(
            "target", section=self.section, what=what, value=value, target=target, met=met
        )

    def fraction(self, row: Row | None) -> float | None:
        """The row's fraction of the copy's bandwidth."""
        return row.gb_per_second / self.copy() if row and row.nbytes else None
