"""The runs of every row as one Markdown table."""

from bench.systems.rows import BASE, Row
from deepfast.mt.sweep.table import COLUMNS, WORSE, cells, spread, table


def steps_to(run: dict, level: float) -> int | None:
    """The step of the first validation whose dev NLL is at most ``level`` nats."""
    return next(
        (step for step, nll in run.get("curve", ()) if nll is not None and nll <= level), None
    )


def _cells(row: Row, runs: list[dict], level: float) -> list[str]:
    """One line of the table."""
    reached = [steps_to(run, level) for run in runs]
    steps = [s for s in reached if s is not None]
    to_level = spread(steps, 0) + (f" ({len(steps)} of {len(runs)})" if None in reached else "")
    parameters, *rest = cells(runs)
    return [row.title, row.source, runs[0]["model"], parameters, to_level, *rest]


def page(
    results: dict[Row, list[dict]], level: float, command: str, machine: str, picture: str
) -> str:
    """The whole file; ``picture`` is the name of the one beside it."""
    parameters, *rest = COLUMNS
    columns = ["system", "paper", "model", parameters, f"steps to {level:.1f}", *rest]
    lines = table(columns, [_cells(row, runs, level) for row, runs in results.items()])
    seen = {run["target_tokens"] for runs in results.values() for run in runs}
    tokens = " or ".join(f"{count:,}" for count in sorted(seen))
    changes = "".join(
        f"- {row.title}: `{' '.join(row.overrides) or 'as the recipe'}`"
        + (f" of `{row.recipe}`" if row.recipe != BASE else "")
        + (", two thirds of the layers for half of the steps, then all\n" if row.grows else "\n")
        for row in results
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

{lines}
![BLEU and dev NLL]({picture})

What each row changes of the recipe `phrases-systems`, or of its own, of which the model and the
rates are taken:

{changes}"""
