"""Encoders of several depths, each variant in turn: time, memory, traffic."""

import math
import time
from collections.abc import Callable

import torch

from deepfast.measure import clock
from deepfast.measure.encoders import (
    REFERENCE,
    RESIDUAL,
    VARIANTS,
    Case,
)
from deepfast.measure.machine import ResidentPeak, free_bytes
from deepfast.measure.rows import (
    DOES_NOT_FIT,
    NOT_MEASURED,
    Row,
    refusal,
)
from deepfast.measure.settings import Deadline, OutOfTime, Settings
from deepfast.measure.traffic import states_moved
from deepfast.memory import LiveBytes

Say = Callable[[str], None]

# Share of the sweep's time that a depth gets beyond its layers, in layers.
EXTRA_LAYERS = 10

# A run that takes so many times what it should is stopped: the machine is busy with other things.
PATIENCE = 2.0

GIB = 1 << 30


def sweep(settings: Settings, deadline: Deadline, say: Say) -> list[Row]:
    """All variants at all depths, one depth after the other, variants in turn."""
    rows: list[Row] = []
    # Threads, allocator and matrix kernels start outside the first number.
    warm = Case(settings, 1, Deadline(math.inf))
    for variant in VARIANTS if deadline.left > 0 else ():
        warm.step(variant)
    del warm
    for depth in settings.depths:
        weights = [d + EXTRA_LAYERS for d in settings.depths if d >= depth]
        share = deadline.left * weights[0] / sum(weights)
        rows += _Depth(settings, depth, Deadline(share), rows, say).measure()
    return rows


class _Depth:
    """One depth of the sweep."""

    def __init__(self, settings: Settings, depth: int, deadline: Deadline, earlier: list[Row], say):
        self.settings, self.depth, self.deadline, self.say = settings, depth, deadline, say
        self.earlier = {(row.depth, row.variant): row for row in earlier}
        self.case = Case(settings, depth, deadline)
        self.rows: dict[str, Row] = {}

    def measure(self) -> list[Row]:
        self._first_runs()
        self._timed_rounds()
        return [self.rows[v] for v in VARIANTS]

    # ---- one run each, with memory counted ----------------------------------------------------

    def _first_runs(self) -> None:
        for variant in VARIANTS:
            row = self.rows[variant] = Row(
                variant=variant, depth=self.depth, tokens=self.settings.tokens
            )
            moved = states_moved(variant, self.depth)
            row.traffic_bytes = None if moved is None else moved * self.settings.state_bytes
            if self._refused(row):
                self.say(f"{self.depth:>4} layers  {variant:24} {row.status}: {row.note}")
                continue
            try:
                self._counted_run(row)
            except OutOfTime as error:
                row.status, row.note, row.peak_bytes = NOT_MEASURED, str(error), None
                self.case.forget_gradients()
                self.say(f"{self.depth:>4} layers  {variant:24} {row.status}: {row.note}")
                continue
            if variant == RESIDUAL:
                self._adam(row)
            row.adam_seconds = self.rows[RESIDUAL].adam_seconds
            self.case.forget_gradients()
            self.say(
                f"{self.depth:>4} layers  {variant:24} {row.first_seconds:8.2f} s  "
                f"{row.peak_bytes / GIB:6.2f} GiB"
            )

    def _counted_run(self, row: Row) -> None:
        self.case.deadline = self._limit(self._predicted_seconds(row.variant))
        # The counting mode slows down each op a little: this run is a warm-up for the timed ones.
        with ResidentPeak() as resident, LiveBytes() as live:
            start = time.perf_counter()
            loss = self.case.step(row.variant)
            row.first_seconds = time.perf_counter() - start
        row.peak_bytes, row.resident_bytes = live.peak, resident.nbytes
        row.loss = loss.item()

    def _adam(self, row: Row) -> None:
        """Costs the same in every variant, so it is measured once."""
        before = [p.detach().clone() for p in self.case.encoder.parameters()]
        optimizer = torch.optim.Adam(self.case.encoder.parameters(), fused=True)
        optimizer.step()
        start = time.perf_counter()
        optimizer.step()
        row.adam_seconds = time.perf_counter() - start
        with torch.no_grad():
            for parameter, old in zip(self.case.encoder.parameters(), before, strict=True):
                parameter.copy_(old)

    # ---- what may run --------------------------------------------------------------------------

    def _refused(self, row: Row) -> bool:
        needed = self._predicted_bytes(row.variant)
        limit = self.settings.memory_bytes
        allowed = free_bytes() - GIB if limit is None else limit
        row.predicted_peak_bytes = needed
        if needed is not None and needed > allowed:
            row.status = DOES_NOT_FIT
            row.note = f"needs {needed / GIB:.2g} GiB, {max(allowed, 0) / GIB:.2g} GiB are free"
            return True
        seconds, left = self._predicted_seconds(row.variant), self.deadline.left
        if left <= 0 or (seconds is not None and seconds > left):
            row.status = NOT_MEASURED
            row.note = refusal(seconds, left)
            return True
        return False

    def _predicted_bytes(self, variant: str) -> int | None:
        """Stack and sum: what the layers keep, and all stacks of the step: N (N + 1) / 2 states."""
        if variant != REFERENCE:
            return None
        rows = self.depth + 1
        layers = self.rows[RESIDUAL].peak_bytes or 0
        # In each row y, LN(y) and x beside it; in backward the last stack's gradient and product.
        return layers + (rows * (rows + 1) // 2 + 5 * rows) * self.settings.state_bytes

    def _predicted_seconds(self, variant: str) -> float | None:
        """From the depth before: the layers' part grows in proportion, the connection's with its
        square."""
        before = [d for d in self.settings.depths if d < self.depth]
        plain = self.rows.get(RESIDUAL)
        for depth in reversed(before):
            known, base = self.earlier[depth, variant], self.earlier[depth, RESIDUAL]
            if known.median is None or base.median is None:
                continue
            scale = self.depth / depth
            layers = base.median * scale
            if plain is not None and plain.median is not None:
                layers = plain.median
            if variant in (RESIDUAL, "deepfast"):
                return known.median * scale
            return layers + max(0.0, known.median - base.median) * scale**2
        return None

    def _limit(self, seconds: float | None) -> Deadline:
        left = self.deadline.left
        return Deadline(left if seconds is None else min(left, PATIENCE * seconds + 1))

    # ---- timed rounds --------------------------------------------------------------------------

    def _timed_rounds(self) -> None:
        """Rounds in which every variant that is still affordable takes its turn."""
        for number in range(self.settings.rounds):
            admitted = self._affordable(self.settings.rounds - number)
            if not admitted:
                return
            try:
                timings = clock.interleave(
                    {v: lambda v=v: self._run(v) for v in admitted}, repeats=1, warmup=0
                )
            except OutOfTime:
                self.case.forget_gradients()
                return
            for variant, timing in timings.items():
                self.rows[variant].seconds += timing.seconds

    def _affordable(self, rounds: int) -> list[str]:
        """Ours and the plain stack, both or none, before any other form gets another run."""
        costs = {v: 1.1 * row.median for v, row in self.rows.items() if row.median is not None}
        left, admitted = self.deadline.left, []
        pair = [v for v in (RESIDUAL, "deepfast") if v in costs]
        together = sum(costs.pop(v) for v in pair)
        if together <= left:
            admitted += pair
            left -= together * rounds
        for variant in sorted(costs, key=costs.get):
            if costs[variant] <= left:
                admitted.append(variant)
                left -= costs[variant]
        return sorted(admitted, key=VARIANTS.index)

    def _run(self, variant: str) -> None:
        self.case.deadline = self._limit(self.rows[variant].median)
        self.case.step(variant)
        self.case.forget_gradients()


def connection_cost(rows: list[Row], variant: str) -> float | None:
    """Seconds of the connection alone per square of the depth, from the deepest step measured."""
    steps = {(row.depth, row.variant): row.median for row in rows}
    for depth in sorted({row.depth for row in rows}, reverse=True):
        step, plain = steps.get((depth, variant)), steps.get((depth, RESIDUAL))
        if step is not None and plain is not None:
            return max(0.0, step - plain) / depth**2
    return None
