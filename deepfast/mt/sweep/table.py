"""The page of a sweep: a Markdown table of its runs, and what its numbers mean."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepfast.files import require
from deepfast.mt.search.score import bleu_of_counts, counts_of
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Result

COLUMNS = ("system", "dev NLL", "difference", "BLEU", "difference", "sentences", "runs",
           "parameters")  # fmt: skip
RESAMPLES = 1000

Bounds = tuple[float, float] | None


def by_seed(runs: Sequence[Result], name: str) -> dict[int, Any]:
    """Seed -> the value, of those runs that have one."""
    return {run["seed"]: run[name] for run in runs if run.get(name) is not None}


def known(runs: Sequence[Result], name: str) -> list[Any]:
    """The values of those runs that have one."""
    return list(by_seed(runs, name).values())


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def differences(runs: Sequence[Result], base: Sequence[Result], name: str) -> list[float]:
    """The value of each run less that of the baseline's run with the same seed."""
    theirs = by_seed(base, name)
    return [x - theirs[seed] for seed, x in by_seed(runs, name).items() if seed in theirs]


def interval(values: Sequence[float]) -> Bounds:
    """The 95% interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    stats = require("scipy.stats", "the intervals of a sweep")
    mean, half = statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1))
    half *= statistics.stdev(values) / len(values) ** 0.5
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
    """The mean and its interval."""
    if not values:
        return "-"
    mean, bounds = f"{statistics.mean(values):+.{digits}f}", interval(values)
    return mean if bounds is None else f"{mean} ({_range(bounds, digits)})"


def cells(runs: Sequence[Result], base: Sequence[Result]) -> list[str]:
    """The cells of a line behind its name; ``base`` is the line to compare with."""
    nll, bleu, sentences = "baseline", "baseline", ""
    if runs is not base:
        nll = _difference(differences(runs, base, "nll"), 3)
        bleu = _difference(differences(runs, base, "test_bleu"), 1)
        sentences = _range(sentence_interval(runs, base), 1)
    wrong = {word: sum(word in run for run in runs) for word in ("diverged", "failed")}
    count = known(runs, "parameters")
    return [
        spread(known(runs, "nll"), 3),
        nll,
        spread(known(runs, "test_bleu"), 1),
        bleu,
        sentences,
        ", ".join([str(len(runs)), *(f"{many} {word}" for word, many in wrong.items() if many)]),
        f"{count[0] / 1e6:.2f}M" if count else "-",
    ]


def page(
    results: Mapping[Point, Sequence[Result]],
    pilots: Mapping[Point, Sequence[Result]],
    command: str,
) -> str:
    """The whole file: a line for every point, what its pilots found, and what failed.

    Args:
        results: the first line is the baseline.
        pilots: the results of the pilots of every point.
    """
    first, base = next(iter(results.items()))
    lines, notes = [COLUMNS, ["---"] * len(COLUMNS)], []
    for point, runs in results.items():
        lines.append([point.name.replace("|", "\\|"), *cells(runs, base)])
        tried = {pilot.overrides[-1]: pilots[pilot] for pilot in point.pilots if pilot in pilots}
        found = [f"{value} {spread(known(own, 'nll'), 3)}" for value, own in tried.items()]
        if found:
            notes.append(f"- {point.name}: dev NLL of pilots: {', '.join(found)}\n")
        named = [(point.name, run) for run in runs]
        named += [(f"{point.name}, {value}", run) for value, own in tried.items() for run in own]
        for name, run in named:
            for why in ("failed", "diverged"):
                if why in run:
                    notes.append(f"- {name}, seed {run['seed']}: {why}, {run[why]}\n")
    every = [run for runs in results.values() for run in runs]
    made = []
    for name in ("cpu", "torch", "commit"):
        seen = {run["machine"][name] for run in every if "machine" in run} - {None}
        made += [f"{name} {' and '.join(sorted(seen))}"] if seen else []
    signatures = sorted({f"`{text}`" for text in known(every, "bleu_signature")}) or ["none"]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"""\
# Systems

`{command}`

Runs: {len(every)}. {"; ".join(made)}.

{rows}
![dev NLL and BLEU](sweep.svg)

Mean and standard deviation over the seeds. A seed changes the parameters, dropout and the order of
the batches, for all systems alike. *dev NLL*: nats per target token, the better of the best
checkpoint and the average. *BLEU*: of the test part by that checkpoint, translated as the recipe
says; {" and ".join(signatures)}. *difference*: to {first.name}, seed by seed, with its 95% t
interval over the seeds. *sentences*: what 95% of {RESAMPLES:,} resamples of the test sentences give
for the difference of BLEU of these same runs (paired bootstrap). A difference whose interval holds
0 is inside the noise; with few seeds it may still be real. *diverged*: a loss was not finite.

{"".join(notes)}"""
