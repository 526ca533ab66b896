"""The runs of every row as one Markdown table."""

import math
import statistics
from collections.abc import Sequence

from bench.systems.rows import BASE, Row

COLUMNS = (
    "system", "paper", "model", "parameters", "steps to {level:.1f}", "dev NLL", "BLEU",
    "target tokens/s", "peak of a step", "process", "runs", "diverged",
)  # fmt: skip

WORSE = 1.5
"""A run has diverged if its last dev NLL is more than this many times its best."""


def diverged(run: dict) -> bool:
    """A loss that is not finite, or a dev NLL that ends far above its best."""
    if "diverged" in run:
        return True
    losses = [nll for _, nll in run["curve"]]
    return not math.isfinite(losses[-1]) or losses[-1] > WORSE * min(losses)


def steps_to(run: dict, level: float) -> int | None:
    """The step of the first validation whose dev NLL is at most ``level`` nats."""
    return next((step for step, nll in run.get("curve", ()) if nll <= level), None)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def cells(row: Row, runs: list[dict], level: float) -> list[str]:
    """One line of the table."""
    done = [run for run in runs if "nll" in run]
    reached = [steps_to(run, level) for run in runs]
    steps = [s for s in reached if s is not None]
    to_level = spread(steps, 0) + (f" ({len(steps)} of {len(runs)})" if None in reached else "")
    count = f"{done[0]['parameters'] / 1e6:.2f}M" if done else "-"
    return [
        row.title,
        row.source,
        runs[0]["model"],
        count,
        to_level,
        spread([run["nll"] for run in done], 3),
        spread([run["bleu"] for run in done], 1),
        spread([run["target_tokens_per_second"] for run in done], 0),
        f"{max(run['live_bytes'] for run in runs) / 2**20:.0f} MiB",
        f"{max(run['process_bytes'] for run in runs) / 2**20:.0f} MiB",
        str(len(runs)),
        f"{sum(map(diverged, runs))} of {len(runs)}",
    ]


def page(results: dict[Row, list[dict]], level: float, command: str, machine: str) -> str:
    """The whole file."""
    rows = [cells(row, runs, level) for row, runs in results.items() if runs]
    columns = [column.format(level=level) for column in COLUMNS]
    lines = [columns, ["---"] * len(columns), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    seen = {run["target_tokens"] for runs in results.values() for run in runs}
    tokens = " or ".join(f"{count:,}" for count in sorted(seen))
    changes = "".join(
        f"- {row.title}: `{' '.join(row.overrides) or 'as the recipe'}`"
        + (f" of `{row.recipe}`" if row.recipe != BASE else "")
        + (", two thirds of the layers for half of the steps, then all\n" if row.grows else "\n")
        for row, runs in results.items()
        if runs
    )
    return f"""\
# The systems, side by side

`{command}` on {machine}.

Every row sees the same sentences, {tokens} target tokens a run; a seed changes parameters, dropout
and the order. Mean and standard deviation over the runs. *steps to {level:.1f}*: the first
validation at which the dev NLL (nats per target token) is that low, and how many runs got there;
*dev NLL*: the better of the best checkpoint and the average; *BLEU*: cased, 13a, of unseen
sentences by that checkpoint, beam 4; *target tokens/s*: of the fastest line of a run's log, in its
last stage; *peak of a step*: live tensors with parameters and Adam, *process*: resident memory;
*diverged*: a loss that is not finite, or a last dev NLL of more than {WORSE} times the best.

The runs are short. They show how early a system begins to translate, at one setting of the rates
for all Transformers. A BLEU near 0 means that a system has not begun; it does not say how it ends.

{table}
What each row changes of the recipe `phrases-systems`, or of its own, of which the model and the
rates are taken:

{changes}"""
