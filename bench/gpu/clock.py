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

from deepfast import backend
from deepfast.measure.clock import timed
from deepfast.measure.rows import Row, claim


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
    """Runs variants in turn on one device."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
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

    def measure(
        self,
        makers: dict[str, Callable[[], Variant]],
        *,
        seconds: float,
        rounds: tuple[int, int] = (5, 50),
        report: Callable[[dict[str, Row]], object] = lambda rows: None,
    ) -> tuple[dict[str, Row], dict[str, str]]:
        """Rounds over all variants until ``seconds`` have passed, from least to most rounds.

        Args:
            report: called with the rows that have a time yet: when a variant has run once, after
                1, 2, 4, ... rounds, and at the end.

        Returns:
            A row for each variant, whose note says what was timed; and the traceback of each
            variant that raised, which has no row.
        """
        rows = {name: Row(variant=name) for name in makers}
        ready: dict[str, tuple[Callable[[], object], int]] = {}
        errors: dict[str, str] = {}

        def fail(name: str) -> None:
            errors[name] = traceback.format_exc(limit=-8)
            rows.pop(name)
            ready.pop(name, None)
            if self.cuda:
                torch.cuda.empty_cache()

        def timed_so_far() -> dict[str, Row]:
            return {name: row for name, row in rows.items() if row.seconds}

        for name, make in makers.items():
            try:
                ready[name] = self._prepare(make(), rows[name])
                # A time to report; it is not one of the rounds, in which variants take turns.
                rows[name].seconds = [self._once(ready[name][0]) / ready[name][1]]
            except Exception:
                fail(name)
            report(timed_so_far())
        for row in rows.values():
            row.seconds = []
        end = time.perf_counter() + seconds
        for turn in range(rounds[1]):
            if turn.bit_count() == 1:
                report(timed_so_far())
            if turn >= rounds[0] and time.perf_counter() > end:
                break
            for name, (run, calls) in list(ready.items()):
                try:
                    rows[name].seconds.append(self._once(run) / calls)
                except Exception:
                    fail(name)
        report(rows)
        return rows, errors

    def _prepare(self, variant: Variant, row: Row) -> tuple[Callable[[], object], int]:
        """Compiles the variant, fills caches, and captures the graph."""
        row.nbytes = variant.nbytes or None
        row.note = "graph" if variant.graph else "eager"
        for _ in range(3 if self.cuda else 0):
            variant.run()
        row.peak_bytes = self._peak(variant.run)
        if not variant.graph or not self.cuda:
            return variant.run, variant.calls
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                kept = variant.run()
        except Exception as error:
            if variant.graph_only:
                raise
            torch.cuda.synchronize()
            row.note = f"eager: capture failed, {type(error).__name__}: {str(error)[:300]}"
            return variant.run, variant.calls
        del kept
        graph.replay()
        return graph.replay, variant.calls

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

    def _once(self, run: Callable[[], object]) -> float:
        torch.sum(self.unrelated, 0, out=self.sum)
        if not self.cuda:
            return timed(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kept = run()
        end.record()
        torch.cuda.synchronize()
        del kept
        return start.elapsed_time(end) / 1e3


class Bench:
    """The results of a section of benchmarks, saved as they come."""

    def __init__(self, device: str, save: Callable[[dict], None]):
        self.device, self.toy, self.save = device, device == "cpu", save
        self.clock = Clock(device)
        self.record: dict = {"rows": [], "targets": [], "errors": [], "notes": []}

    def size(self, full, toy):
        """The full size, which fills a GPU, or the toy size, which runs in an instant."""
        return toy if self.toy else full

    def backends(self, op: str) -> list[str]:
        """The backends whose kernels for ``op`` are measured; a note says why one is left out."""
        found = []
        for name in ("triton", "cuda"):
            reason = backend.refusal(op, name, self.device, torch.bfloat16)
            if reason is None:
                found.append(name)
            elif reason not in self.record["notes"]:
                self.note(reason)
        return found

    def sets(self, nbytes: int) -> int:
        """How many sets of operands of ``nbytes`` each are together far larger than L2."""
        return self.size(max(1, min(16, (1 << 29) // max(1, nbytes))), 2)

    def attempt(self, work: Callable[..., None], *args) -> None:
        """Runs ``work``; an exception is recorded and the section goes on."""
        try:
            work(self, *args)
        except Exception:
            self.error(f"{work.__name__}{args}", traceback.format_exc())
        if not self.toy:
            torch.cuda.empty_cache()

    def error(self, what: str, text: str) -> None:
        self.record["errors"].append({"what": what, "error": text})
        self.save(self.record)

    def note(self, text: str) -> None:
        self.record["notes"].append(text)
        self.save(self.record)

    def copy(self) -> float:
        """GB/s of a bf16 copy of a large tensor, bytes read plus written. Measured once per
        section, as the base of its fractions."""
        if "copy_gb_per_second" not in self.record:
            source = torch.randn(self.size(1 << 30, 1 << 12), device=self.device).bfloat16()
            target = torch.empty_like(source)
            nbytes = 2 * source.numel() * source.element_size()
            copy = Variant(run=lambda: target.copy_(source), nbytes=nbytes)
            rows, errors = self.clock.measure({"copy": lambda: copy}, seconds=1.0, rounds=(5, 30))
            if errors:
                raise RuntimeError(f"the copy failed: {errors['copy']}")
            self.record["copy_gb_per_second"] = rows["copy"].gb_per_second
            self.save(self.record)
        return self.record["copy_gb_per_second"]

    def case(
        self,
        what: str,
        makers: dict[str, Callable[[], Variant]],
        seconds: float = 1.0,
        may_fail: bool = False,
    ) -> dict[str, Row]:
        """Measures the variants in turn and records a row for each; one that raised has none.

        may_fail: whether a variant that raises is a note, and no error.
        """
        self.copy()

        def report(rows: dict[str, Row]) -> None:
            for row in rows.values():
                row.what = what
            self.rows(rows.values())

        limits = self.size((5, 50), (1, 1))
        rows, errors = self.clock.measure(
            makers, seconds=self.size(seconds, 0), rounds=limits, report=report
        )
        for name, text in errors.items():
            # It may have run before it failed.
            self.record["rows"] = [
                row for row in self.record["rows"] if (row["what"], row["variant"]) != (what, name)
            ]
            if may_fail:
                self.note(f"{what}: {name}: {text.strip().splitlines()[-1][:300]}")
            else:
                self.error(f"{what}: {name}", text)
        for name, row in rows.items():
            if row.note.startswith("eager: "):
                self.note(f"{what}: {name}: {row.note}")
        return rows

    def rows(self, rows: Iterable[Row]) -> None:
        """Records rows; each replaces the row of its case and variant."""
        known = {(row["what"], row["variant"]): row for row in self.record["rows"]}
        for row in rows:
            plain = row.as_dict() | {"fraction_of_copy": self.fraction(row)}
            known[row.what, row.variant] = plain
        self.record["rows"] = list(known.values())
        self.save(self.record)

    def target(self, what: str, value: float | None, wanted: float, *, at_most: bool = False):
        """Records whether a target was reached; the value is None if it was not measured."""
        self.record["targets"].append(claim(what, value, wanted, at_most=at_most))
        self.save(self.record)

    def fraction(self, row: Row | None) -> float | None:
        """The row's fraction of the copy's bandwidth."""
        return row.gb_per_second / self.copy() if row and row.nbytes else None
