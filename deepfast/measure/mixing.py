"""The connection on its own: the mixing of a whole stack whose layers do nothing."""

import time

import torch

from deepfast.measure import clock
from deepfast.measure.encoders import within
from deepfast.measure.forms import PEERS, mixing_alone
from deepfast.measure.machine import free_bytes
from deepfast.measure.rows import (
    DOES_NOT_FIT,
    NOT_MEASURED,
    Row,
    refusal,
)
from deepfast.measure.settings import Deadline, OutOfTime, Settings
from deepfast.measure.sweep import GIB, Say, connection_cost
from deepfast.measure.traffic import states_moved
from deepfast.memory import LiveBytes
from deepfast.nn import DLCL

COPY = "copy"


def mixing(
    settings: Settings, deadline: Deadline, steps: list[Row], say: Say
) -> tuple[list[Row], float | None]:
    """Rows of the mixing alone, forward and backward, and the copy's bytes per second.

    The bytes of a form are those of its schedule, so that its bandwidth compares with the copy's.
    ``steps``, the rows of the sweep, tell beforehand about how long a form will take.
    """
    rows: list[Row] = []
    copies: list[float] = []
    forms = {form for _, some in settings.mixing for form in some}
    # Ours is too small a part of a step to be told from noise there, and never costly.
    costs = {f: None if f == "deepfast" else connection_cost(steps, f) for f in forms}
    for number, (depth, forms) in enumerate(settings.mixing):
        share = Deadline(deadline.left * (0.3 if number + 1 < len(settings.mixing) else 1.0))
        rows += _one_depth(settings, depth, forms, share, costs, copies, say)
    return rows, max(copies, default=None)


def _one_depth(settings, depth, forms, deadline, costs, copies, say) -> list[Row]:
    torch.manual_seed(settings.seed)
    dlcl = DLCL(depth, settings.dim)
    y = torch.randn(settings.tokens, settings.dim, requires_grad=True)
    grad = torch.randn(settings.tokens, settings.dim)

    def run(form: str) -> None:
        try:
            mixing_alone(within(PEERS[form], deadline.check), dlcl, y, grad)
        finally:
            y.grad = None
            dlcl.zero_grad(set_to_none=True)

    rows = {form: Row(variant=form, depth=depth, tokens=settings.tokens) for form in forms}
    for form, row in rows.items():
        row.traffic_bytes = states_moved(form, depth) * settings.state_bytes
        guess = None if costs[form] is None else costs[form] * depth**2
        if not _refused(row, settings, deadline, guess):
            try:
                with LiveBytes() as live:
                    start = time.perf_counter()
                    run(form)
                    row.first_seconds = time.perf_counter() - start
                row.peak_bytes = live.peak
                costs[form] = row.first_seconds / depth**2
            except OutOfTime as error:
                row.status, row.note = NOT_MEASURED, str(error)
        took = f"{row.first_seconds:8.2f} s" if row.first_seconds else f"{row.status}: {row.note}"
        say(f"mixing alone, {depth} layers  {form:24} {took}")
    _rounds(rows, run, settings.rounds, deadline, copies)
    return list(rows.values())


def _refused(row: Row, settings: Settings, deadline: Deadline, guess: float | None) -> bool:
    count = row.depth + 1
    limit = settings.memory_bytes
    allowed = free_bytes() - GIB if limit is None else limit
    if row.variant == "stack and sum":
        # A state, its norm's input and x per layer, and all stacks.
        row.predicted_peak_bytes = (count * (count + 1) // 2 + 4 * count) * settings.state_bytes
        if row.predicted_peak_bytes > allowed:
            row.status = DOES_NOT_FIT
            row.note = (
                f"needs {row.predicted_peak_bytes / GIB:.2g} GiB, "
                f"{max(allowed, 0) / GIB:.2g} GiB are free"
            )
            return True
    if deadline.left <= 0 or (guess is not None and guess > deadline.left):
        row.status = NOT_MEASURED
        row.note = refusal(guess, deadline.left)
        return True
    return False


def _rounds(rows: dict[str, Row], run, rounds: int, deadline: Deadline, copies) -> None:
    copy, nbytes = clock.copy_variant()
    for _ in range(rounds):
        variants = {COPY: copy}
        left = deadline.left
        for form in sorted(rows, key=lambda f: rows[f].median or float("inf")):
            cost = rows[form].median
            if cost is not None and cost < left / 2:
                variants[form] = lambda form=form: run(form)
                left -= cost
        try:
            timings = clock.interleave(variants, repeats=1, warmup=0)
        except OutOfTime:
            return
        for name, timing in timings.items():
            if name == COPY:
                copies.append(nbytes / timing.median)
            else:
                rows[name].seconds += timing.seconds
