"""Runs as lines of a Markdown table, and the page of a sweep."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.sweep.grid import SYSTEM, Pilots, Point
from deepfast.mt.sweep.runs import Result, some

LEARNED = ("dev NLL", "difference", "BLEU", "difference", "runs", "diverged", "failed")
COST = ("parameters", "target tokens/s", "peak of a step", "process")
WORSE = 1.5
"""A run has diverged if its last dev NLL is more than this many times its best."""
RESAMPLES = 1000
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5% quantiles of Student's t for 1, 2, .. degrees of freedom."""

MEANING = """\
*dev NLL*, nats per target token: the better of the best checkpoint and the average; *BLEU*: cased,
13a, of the test part by that checkpoint, beam 4;"""
SENTENCES = f"""
*sentences*: what 95% of {RESAMPLES:,} resamples of the test sentences give for these same runs
(paired bootstrap).
"""

Results = Mapping[Point, Sequence[Result]]


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


def differences(runs: Sequence[Result], base: Sequence[Result], name: str) -> list[float]:
    """The value of each run less that of the baseline's run with the same seed."""
    of_base = {run["seed"]: run[name] for run in base if run.get(name) is not None}
    return [
        run[name] - of_base[run["seed"]]
        for run in runs
        if run.get(name) is not None and run["seed"] in of_base
    ]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = statistics.mean(values), _quantile(len(values)) * statistics.stdev(values)
    half /= len(values) ** 0.5
    return mean - half, mean + half


def _quantile(seeds: int) -> float:
    """How many standard errors the interval over so many seeds reaches to each side; for more than
    11 seeds a little too many."""
    return T_QUANTILES[min(seeds - 1, len(T_QUANTILES)) - 1]


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


def sentence_interval(runs: Sequence[Result], base: Sequence[Result]) -> tuple[float, float] | None:
    """What 95% of the resampled test sentences give for the difference of the mean BLEU of the same
    seeds (paired bootstrap, Koehn 2004); None without two such runs."""
    found = [
        {run["seed"]: run["sentences"] for run in own if run.get("sentences")}
        for own in (runs, base)
    ]
    seeds = found[0].keys() & found[1].keys()
    each = [resampled(own[seed]) for own in found for seed in sorted(seeds)]
    if not seeds:
        return None
    ours, theirs = torch.stack(each).unflatten(0, (2, -1)).mean(1)
    low, high = (ours - theirs).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def _range(bounds: tuple[float, float] | None, digits: int) -> str:
    return "" if bounds is None else f" ({bounds[0]:+.{digits}f} to {bounds[1]:+.{digits}f})"


def _difference(values: Sequence[float], digits: int) -> str:
    """The mean, its interval, and whether that holds 0."""
    if not values:
        return "-"
    bounds = interval(values)
    inside = bounds is not None and bounds[0] <= 0 <= bounds[1]
    text = f"{statistics.mean(values):+.{digits}f}{_range(bounds, digits)}"
    return text + ", inside the noise" * inside


def learned(runs: Sequence[Result], base: Sequence[Result]) -> list[str]:
    """The cells of `LEARNED` for the runs of one line; ``base`` is the line to compare with."""
    ended = [run for run in runs if "failed" not in run]
    failed = len(runs) - len(ended)
    nll = bleu = "baseline"
    if runs is not base:
        nll = _difference(differences(ended, base, "nll"), 3)
        bleu = _difference(differences(ended, base, "bleu"), 1)
        sentences = _range(sentence_interval(ended, base), 1)
        bleu += f"; sentences{sentences}" if sentences else ""
    return [
        spread(known(ended, "nll"), 3),
        nll,
        spread(known(ended, "bleu"), 1),
        bleu,
        str(len(ended)),
        f"{sum(map(diverged, ended))} of {len(ended)}" if ended else "-",
        f"{failed} of {len(runs)}" if failed else "-",
    ]


def cost(runs: Sequence[Result]) -> list[str]:
    """The cells of `COST` for the runs of one line."""
    count = known(runs, "parameters")
    peaks = [known(runs, name) for name in ("live_bytes", "process_bytes")]
    return [
        f"{count[0] / 1e6:.2f}M" if count else "-",
        spread(known(runs, "target_tokens_per_second"), 0),
        *(f"{max(peak) / 2**20:.0f} MiB" if peak else "-" for peak in peaks),
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


def _pilot_table(pilots: Pilots, found: Mapping[Point, Results]) -> str:
    """The dev NLL of every pilot, those that were chosen in bold."""
    rows = []
    for point, results in found.items():
        best, cells = pilots.best(results), []
        for pilot, runs in results.items():
            text = spread(known(runs, "nll"), 3)
            cells.append(f"**{text}**" if pilot == best else text)
        if cells:
            rows.append([point.name, *cells])
    return f"""\
`{pilots.key}` by the lowest dev NLL of pilots of {pilots.steps:,} steps, one seed:

{table([SYSTEM, *pilots.values], rows)}
"""


def _noise(seeds: int) -> str:
    """What the intervals can show."""
    if seeds < 2:
        return ""
    freedom = seeds - 1
    reach = f"{_quantile(seeds):.1f}"
    return f"""
The interval behind a difference is a 95% t interval over the seeds. With {seeds} seeds it has
{freedom} degree{"s" * (freedom > 1)} of freedom and reaches {reach} standard errors to each
side: it finds large differences, and one inside the noise may still be real. A seed changes the
parameters, dropout and the order of the batches, for all points alike.
"""


def page(
    results: Results,
    command: str,
    pilots: Pilots | None = None,
    tried: Mapping[Point, Results] | None = None,
) -> str:
    """The whole file: a line for every point, and what failed.

    Args:
        results: the first line is the baseline.
        tried: the results of the pilots of every point.
    """
    first, base = next(iter(results.items()))
    keys = [key if key == SYSTEM else f"`{key}`" for key in first.keys]
    rows, prices, notes = [], [], []
    for point, runs in results.items():
        values = [value.replace("|", "\\|") for value in point.values]
        rows.append([*values, *learned(runs, base)])
        prices.append([*values, *cost([run for run in runs if "failed" not in run])])
        notes += failures(point.name, runs)
    if notes:
        notes.insert(0, "\n")
    ended = [run for runs in results.values() for run in runs if "failed" not in run]
    short = [run for own in (tried or {}).values() for runs in own.values() for run in runs
             if "failed" not in run]  # fmt: skip
    hours = sum(run.get("seconds", 0) for run in ended + short) / 3600
    many = max(len(known(runs, name)) for runs in results.values() for name in ("nll", "bleu"))
    sampled = any(run.get("sentences") for run in ended) and len(results) > 1
    also = f" and {some(len(short), 'pilot')}" if short else ""
    made = [f"{some(len(ended), 'run')}{also}, {hours:.1f} hours together"]
    for what, key in (("", "cpu"), ("torch ", "torch"), ("commit ", "commit")):
        seen = sorted({run[key] for run in ended + short if run.get(key)})
        made += [f"{what}{' and '.join(seen)}"] if seen else []
    return f"""\
# {"Systems" if first.keys == [SYSTEM] else " and ".join(first.keys)}

`{command}`

{", ".join(made)}.

{table([*keys, *LEARNED], rows)}
![dev NLL and BLEU](sweep.svg)

Mean and standard deviation over the seeds. {MEANING} *difference*: to {first.name}, seed by seed;
*diverged*: a loss that is not finite, or a last dev NLL of more than {WORSE} times the best. A run
that learns nothing does not count as diverged.
{_noise(many)}{SENTENCES if sampled else ""}
![dev NLL over steps and time](sweep_curves.svg)

![norm of the gradient of each layer](sweep_gradients.svg)

{_pilot_table(pilots, tried) if pilots and tried else ""}\
{table([*keys, *COST], prices)}
*target tokens/s*: as the run went; other work on the machine slows it. *peak of a
step*: live tensors with parameters and Adam; *process*: its highest resident memory, on a GPU that
of torch's allocator.
{"".join(notes)}"""
