"""Runs as lines of a Markdown table, and the page of a sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Result

COLUMNS = (
    "parameters", "dev NLL", "BLEU", "target tokens/s", "peak of a step", "process", "runs",
    "diverged",
)  # fmt: skip

WORSE = 1.5
"""A run has diverged if its last dev NLL is more than this many times its best."""


def diverged(run: Result) -> bool:
    """A loss that is not finite, or a dev NLL that ends far above its best."""
    if "diverged" in run:
        return True
    # JSON has no NaN: a loss that is not finite is null in the metrics.
    losses = [math.nan if nll is None else nll for _, nll in run["curve"]]
    return bool(losses) and not losses[-1] <= WORSE * min(losses)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def known(runs: Sequence[Result], name: str) -> list[Any]:
    """The values of those runs that have one."""
    return [run[name] for run in runs if run.get(name) is not None]


def cells(runs: Sequence[Result]) -> list[str]:
    """The cells of `COLUMNS` for the runs of one line, none of which failed."""
    count = known(runs, "parameters")
    peaks = [known(runs, name) for name in ("live_bytes", "process_bytes")]
    return [
        f"{count[0] / 1e6:.2f}M" if count else "-",
        spread(known(runs, "nll"), 3),
        spread(known(runs, "bleu"), 1),
        spread(known(runs, "target_tokens_per_second"), 0),
        *(f"{max(peak) / 2**20:.0f} MiB" if peak else "-" for peak in peaks),
        str(len(runs)),
        f"{sum(map(diverged, runs))} of {len(runs)}" if runs else "-",
    ]


def failures(name: str, runs: Iterable[Result]) -> list[str]:
    """The runs of one line that failed or diverged, as items of a Markdown list."""
    return [
        f"- {name}, seed {run['seed']}: {run.get('failed') or 'diverged, ' + run['diverged']}\n"
        for run in runs
        if "failed" in run or "diverged" in run
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(results: Mapping[Point, Sequence[Result]], command: str, machine: str) -> str:
    """The whole file: a line for every point, and what failed."""
    rows, notes = [], []
    for point, runs in results.items():
        failed = [run for run in runs if "failed" in run]
        values = [value.replace("|", "\\|") for value in point.values]
        count = f"{len(failed)} of {len(runs)}" if failed else "-"
        rows.append([*values, *cells([run for run in runs if "failed" not in run]), count])
        notes += failures(point.name, runs)
    if notes:
        notes.insert(0, "\n")
    keys = next(iter(results)).keys
    lines = table([*(f"`{key}`" for key in keys), *COLUMNS, "failed"], rows)
    return f"""\
# {" and ".join(keys)}

`{command}` on {machine}.

Mean and standard deviation over the seeds. *dev NLL*, nats per target token: the better of the best
checkpoint and the average; *BLEU*: cased, 13a, of the test part by that checkpoint, beam 4; *target
tokens/s*: of the fastest line of a run's log; *peak of a step*: live tensors with parameters and
Adam, *process*: its highest resident memory, on a GPU that of torch's allocator; *diverged*: a loss
that is not finite, or a last dev NLL of more than {WORSE} times the best.

{lines}
![BLEU and dev NLL](sweep.svg)
{"".join(notes)}"""
