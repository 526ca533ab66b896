"""The page of a sweep: a Markdown table of its runs, and what its numbers mean."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast.files import require
from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.sweep.grid import SYSTEM, Pilots, Point, best
from deepfast.mt.sweep.runs import Result, some

COLUMNS = (
    "dev NLL", "difference", "BLEU", "difference", "sentences", "runs", "parameters",
    "target tokens/s", "memory",
)  # fmt: skip
WORSE = 1.5
"""A run has diverged if its last dev NLL is more than this many times its best."""
RESAMPLES = 1000

Results = Mapping[Point, Sequence[Result]]
Bounds = tuple[float, float] | None


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


def by_seed(runs: Sequence[Result], name: str) -> dict[int, Any]:
    """Seed -> the value, of those runs that have one."""
    return {run["seed"]: run[name] for run in runs if run.get(name) is not None}


def known(runs: Sequence[Result], name: str) -> list[Any]:
    """The values of those runs that have one."""
    return list(by_seed(runs, name).values())


def differences(runs: Sequence[Result], base: Sequence[Result], name: str) -> list[float]:
    """The value of each run less that of the baseline's run with the same seed."""
    theirs = by_seed(base, name)
    return [x - theirs[seed] for seed, x in by_seed(runs, name).items() if seed in theirs]


def interval(values: Sequence[float]) -> Bounds:
    """The 95% interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    stats = require("scipy.stats", "the intervals of a sweep")
    error = statistics.stdev(values) / len(values) ** 0.5
    mean, half = statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean - half, mean + half


@functools.cache
def resampled(counts: str) -> Tensor:
    """BLEU of `RESAMPLES` draws of a run's test sentences, with replacement, (R,). Runs with as
    many sentences have the same draws."""
    table = counts_of(counts).double()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(len(table), (RESAMPLES, len(table)), generator=generator)
    times = torch.zeros_like(drawn, dtype=torch.float64)
    sums = times.scatter_add_(1, drawn, torch.ones_like(times)) @ table
    return torch.tensor([bleu_of_counts(row) for row in sums.long()])


def sentence_interval(runs: Sequence[Result], base: Sequence[Result]) -> Bounds:
    """What 95% of the resampled test sentences give for the difference of the mean BLEU of the same
    seeds (paired bootstrap, Koehn 2004); None without two such runs."""
    ours, theirs = by_seed(runs, "sentences"), by_seed(base, "sentences")
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    less = torch.stack([resampled(ours[seed]) - resampled(theirs[seed]) for seed in seeds]).mean(0)
    low, high = less.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def _range(bounds: Bounds, digits: int) -> str:
    return "-" if bounds is None else f"{bounds[0]:+.{digits}f} to {bounds[1]:+.{digits}f}"


def _difference(values: Sequence[float], digits: int) -> str:
    """The mean, its interval, and whether that holds 0."""
    if not values:
        return "-"
    mean, bounds = f"{statistics.mean(values):+.{digits}f}", interval(values)
    if bounds is None:
        return mean
    inside = bounds[0] <= 0 <= bounds[1]
    return f"{mean} ({_range(bounds, digits)})" + ", inside the noise" * inside


def cells(runs: Sequence[Result], base: Sequence[Result]) -> list[str]:
    """The cells of `COLUMNS` for the runs of one line; ``base`` is the line to compare with."""
    ended = [run for run in runs if "failed" not in run]
    other = ["baseline", "baseline", ""]
    if runs is not base:
        other = [
            _difference(differences(ended, base, "nll"), 3),
            _difference(differences(ended, base, "test_bleu"), 1),
            _range(sentence_interval(ended, base), 1),
        ]
    wrong = {"diverged": sum(map(diverged, ended)), "failed": len(runs) - len(ended)}
    count, memory = known(ended, "parameters"), known(ended, "peak_bytes")
    return [
        spread(known(ended, "nll"), 3),
        other[0],
        spread(known(ended, "test_bleu"), 1),
        *other[1:],
        ", ".join([str(len(runs)), *(f"{many} {word}" for word, many in wrong.items() if many)]),
        f"{count[0] / 1e6:.2f}M" if count else "-",
        spread(known(ended, "target_tokens_per_second"), 0),
        f"{max(memory) / 2**20:.0f} MiB" if memory else "-",
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _pilot_table(pilots: Pilots, found: Mapping[Point, Mapping[Point, Result]]) -> str:
    """The dev NLL of every pilot, those that were chosen in bold."""
    rows, values = [], [""]
    for point, tried in found.items():
        values = [pilot.values[-1] for pilot in point.pilots] or values
        texts = {pilot: spread(known([run], "nll"), 3) for pilot, run in tried.items()}
        if (chosen := best(tried)) is not None:
            texts[chosen] = f"**{texts[chosen]}**"
        if texts:
            rows.append([point.name, *(texts.get(pilot, "-") for pilot in point.pilots)])
    return f"""
`{pilots.key}` by the lowest dev NLL of pilots of {pilots.steps:,} steps, one seed:

{table([SYSTEM, *values], rows)}"""


def _machines(runs: Sequence[Result]) -> str:
    """Where the runs were made and how long they took together."""
    made = [f"{sum(run.get('seconds', 0) for run in runs) / 3600:.1f} hours together"]
    for what, key in (("", "cpu"), ("torch ", "torch"), ("commit ", "commit")):
        seen = sorted({run["machine"][key] for run in runs if run["machine"].get(key)})
        made += [f"{what}{' and '.join(seen)}"] if seen else []
    return ", ".join(made)


def page(
    results: Results,
    command: str,
    pilots: Pilots | None = None,
    tried: Mapping[Point, Mapping[Point, Result]] | None = None,
) -> str:
    """The whole file: a line for every point, and what failed.

    Args:
        results: the first line is the baseline.
        tried: the results of the pilots of every point.
    """
    first, base = next(iter(results.items()))
    keys = [key if key == SYSTEM else f"`{key}`" for key in first.keys]
    rows, notes = [], []
    for point, runs in results.items():
        rows.append([*(value.replace("|", "\\|") for value in point.values), *cells(runs, base)])
        for run in runs:
            for why in ("failed", "diverged"):
                if why in run:
                    notes.append(f"- {point.name}, seed {run['seed']}: {why}, {run[why]}\n")
    if notes:
        notes.insert(0, "\n")
    ended = [run for runs in results.values() for run in runs if "failed" not in run]
    short = [run for own in (tried or {}).values() for run in own.values() if "failed" not in run]
    also = f" and {some(len(short), 'pilot')}" if short else ""
    signatures = sorted({f"`{text}`" for text in known(ended, "bleu_signature")}) or ["none"]
    return f"""\
# {"Systems" if first.keys == [SYSTEM] else " and ".join(first.keys)}

`{command}`

{some(len(ended), "run")}{also}, {_machines(ended + short)}.

{table([*keys, *COLUMNS], rows)}
![dev NLL and BLEU](sweep.svg)

Mean and standard deviation over the seeds. A seed changes the parameters, dropout and the order of
the batches, for all points alike. *dev NLL*: nats per target token, the better of the best
checkpoint and the average. *BLEU*: of the test part by that checkpoint, translated as the recipe
says; {" and ".join(signatures)}. *difference*: to {first.name}, seed by seed, with its 95% t
interval over the seeds; with few seeds one inside the noise may still be real. *sentences*: what
95% of {RESAMPLES:,} resamples of the test sentences give for the difference of BLEU of these same
runs (paired bootstrap). *diverged*: a loss that is not finite, or a last dev NLL of more than
{WORSE} times the best; a run that learns nothing does not count as diverged. *target tokens/s*: as
the run went; other work on the machine slows it. *memory*: the highest of a process, on a GPU that
of torch's allocator.

![dev NLL over steps and time](sweep_curves.svg)
{_pilot_table(pilots, tried) if pilots and tried else ""}\
{"".join(notes)}"""
