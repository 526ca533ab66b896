"""Memory policies on an encoder alone: predicted peaks, measured peaks, and times."""

import statistics
import time

import torch

from deepfast.measure import clock
from deepfast.measure.machine import free_bytes
from deepfast.measure.plain import DROPOUT
from deepfast.measure.rows import (
    DOES_NOT_FIT,
    MEASURED,
    NOT_MEASURED,
    Row,
    refusal,
)
from deepfast.measure.settings import Deadline, Settings
from deepfast.measure.sweep import GIB, Say
from deepfast.memory import (
    POLICIES,
    LiveBytes,
    Plan,
    plan,
)
from deepfast.nn import Packing, TransformerEncoder

PARAMETERS = "parameters"
"""Category of a plan's table."""


class PolicyCase:
    """One depth: an encoder with dropout, an input and a gradient of its result."""

    def __init__(self, settings: Settings, depth: int):
        torch.manual_seed(settings.seed)
        sizes = predicted(settings, depth, POLICIES[0]).sizes
        self.encoder = TransformerEncoder(
            depth, sizes.width, sizes.heads, sizes.ffn, dropout=DROPOUT
        )
        self.packing = Packing(settings.memory_batch, settings.length)
        self.x = torch.randn(sizes.tokens, sizes.width, requires_grad=True)
        self.gradient = torch.ones(sizes.tokens, sizes.width)

    def step(self, policy: str) -> None:
        """Forward and backward with every layer under ``policy``."""
        self.encoder.set_memory(policy)
        # The first state belongs to the step, as an embedding's result would.
        y = self.encoder.forward_packed(self.x * 1, self.packing)
        y.backward(self.gradient)

    def forget_gradients(self) -> None:
        self.encoder.zero_grad(set_to_none=True)
        self.x.grad = None

    def run(self, policy: str) -> None:
        self.step(policy)
        self.forget_gradients()


def predicted(settings: Settings, depth: int, policy: str) -> Plan:
    """What `deepfast.memory.plan` says of a `PolicyCase`, nothing of it measured."""
    return plan(
        budget="1TiB", layers=depth, width=settings.memory_dim, tokens=settings.memory_tokens,
        vocabulary=0, decoder_layers=0, dtype="float32", optimizer="none", device="cpu",
        length=settings.length, policies=policy,
    )  # fmt: skip


def peaks(settings: Settings, deadline: Deadline, say: Say) -> list[Row]:
    """One counted step of every policy at every depth, parameters aside; shallow ones first."""
    rows: list[Row] = []
    known: dict[str, Row] = {}
    if deadline.left > 0:
        # Threads and kernels start outside the first number.
        PolicyCase(settings, 1).run(POLICIES[0])
    for depth in settings.depths:
        case = None
        for policy in POLICIES:
            row = Row(variant=policy, depth=depth, tokens=settings.memory_tokens)
            rows.append(row)
            found = predicted(settings, depth, policy)
            row.predicted_peak_bytes = found.peak - found.table[PARAMETERS]
            if not _refused(row, settings, deadline, known.get(policy)):
                case = case or PolicyCase(settings, depth)
                _count(row, case)
                known[policy] = row
            say(f"{depth:>4} layers  {policy:24} {_told(row)}")
    return rows


def _count(row: Row, case: PolicyCase) -> None:
    with LiveBytes() as live:
        start = time.perf_counter()
        case.step(row.variant)
        row.first_seconds = time.perf_counter() - start
    row.peak_bytes = live.peak
    case.forget_gradients()


def _told(row: Row) -> str:
    if row.status != MEASURED:
        return f"{row.status}: {row.note}"
    return f"{row.peak_bytes / GIB:6.3f} GiB, predicted {row.predicted_peak_bytes / GIB:.3f}"


def _refused(row: Row, settings: Settings, deadline: Deadline, known: Row | None) -> bool:
    limit = settings.memory_bytes
    allowed = free_bytes() - GIB if limit is None else limit
    if row.predicted_peak_bytes > allowed:
        row.status = DOES_NOT_FIT
        row.note = (
            f"needs {row.predicted_peak_bytes / GIB:.2g} GiB, {max(allowed, 0) / GIB:.2g} GiB "
            "are free"
        )
        return True
    guess = None if known is None else known.first_seconds * row.depth / known.depth
    if deadline.left <= 0 or (guess is not None and guess > deadline.left):
        row.status, row.note = NOT_MEASURED, refusal(guess, deadline.left)
        return True
    return False


def times(settings: Settings, deadline: Deadline, rows: list[Row], say: Say) -> dict:
    """Every policy's time at one depth, in turns; the depth is the settings', or the deepest below
    it that fits the time. ``rows`` are those of `peaks`, which say how long a step takes.

    Returns the depth (None where nothing was timed, and a note why) and a row for each policy: its
    seconds, their median, the median of the rounds' ratios to keep, and the planner's ratio.
    """
    depth = _timed_depth(settings, deadline, rows)
    if depth is None:
        left = f"{max(deadline.left, 0):.2g} s of the time budget were left"
        return {"depth": None, "note": f"{left}, too few for one round", "rows": []}
    case = PolicyCase(settings, depth)
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    # A round of its own first: new parameters and buffers are touched for the first time there.
    rounds, cost = 1 + settings.rounds, 0.0
    for number in range(rounds):
        if number > 1 and cost > deadline.left:
            break
        turns = {policy: lambda policy=policy: case.run(policy) for policy in POLICIES}
        timings = clock.interleave(turns, repeats=1, warmup=0)
        cost = sum(timing.median for timing in timings.values())
        if number > 0:
            for policy, timing in timings.items():
                seconds[policy] += timing.seconds
    found = [_timed(settings, depth, policy, seconds) for policy in POLICIES]
    for row in found:
        say(f"{depth:>4} layers  {row['policy']:24} {row['relative']:.2f} of keep's time")
    return {"depth": depth, "note": None, "rows": found}


def _timed_depth(settings: Settings, deadline: Deadline, rows: list[Row]) -> int | None:
    """The deepest one with time for a warm-up and a round, all of its policies measured."""
    for depth in sorted(settings.depths, reverse=True):
        if depth > settings.policy_depth and depth != min(settings.depths):
            continue
        first = [row.first_seconds for row in rows if row.depth == depth]
        if first and None not in first and 2 * sum(first) <= deadline.left:
            return depth
    return None


def _timed(settings: Settings, depth: int, policy: str, seconds: dict[str, list[float]]) -> dict:
    ratios = [own / keep for own, keep in zip(seconds[policy], seconds[POLICIES[0]], strict=True)]
    return {
        "policy": policy,
        "seconds": seconds[policy],
        "median_seconds": statistics.median(seconds[policy]),
        "relative": statistics.median(ratios),
        "predicted_relative": predicted(settings, depth, policy).time,
    }
