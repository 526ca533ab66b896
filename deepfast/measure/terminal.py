"""The report's main table in the terminal."""

from deepfast.measure import memory_chapter, results
from deepfast.mt.data.errors import require


def show(report: dict) -> None:
    """Prints headlines and the table of the sweep."""
    require("rich", "the report")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings = report["settings"]
    table = Table(
        title=f"Forward and backward of a pre-norm encoder, {settings['tokens']} tokens, "
        f"D={settings['dim']}, float32",
        box=box.SIMPLE,
    )
    table.add_column("layers", justify="right")
    table.add_column("connection", no_wrap=True)
    for name in ("step", "runs", "tokens/s", "peak", "traffic"):
        table.add_column(name, justify="right", no_wrap=name != "runs")
    rows = results.ordered(report["sweep"]["rows"] + report["compiled"]["rows"])
    missing = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["depth"] != row["depth"]:
            table.add_section()
        style = "bold green" if row["variant"] == "deepfast" else None
        cells = [str(row["depth"]), row["variant"]]
        if row["median_seconds"] is None:
            cells += ["–"] * 5
            missing.append(f"{row['depth']} layers, {row['variant']}: {row['status']}"
                           f"{', ' + row['note'] if row['note'] else ''}")  # fmt: skip
        else:
            cells += [
                results.seconds(row["median_seconds"]), str(max(len(row["seconds"]), 1)),
                f"{row['tokens_per_second']:,.0f}", results.size(row["peak_bytes"]),
                results.traffic(row["traffic_bytes"]),
            ]  # fmt: skip
        table.add_row(*cells, style=style)
    console.print(table)
    for line in missing:
        console.print(line, style="dim", highlight=False)
    for card in results.headlines(report):
        console.print(f"[bold]{card['value']:>7}[/]  {card['label']}  [dim]({card['detail']})[/]",
                      highlight=False)  # fmt: skip
    _memory(console, report["memory"])
    training = report["training"]
    if training["status"] == "measured":
        scores = training["scores"]
        console.print(
            f"[bold]{scores['bleu']:7.2f}[/]  BLEU on {scores['sentences']} unseen phrases, "
            f"beam {training['beam']}  [dim]({scores['bleu_signature']})[/]", highlight=False,
        )  # fmt: skip
    else:
        console.print(f"         training: {training['status']}")


def _memory(console, memory: dict) -> None:
    """How well memory is predicted, what policies cost, and the deepest models."""
    if memory["status"] != "measured":
        console.print(f"         memory: {memory['status']}")
        return
    for field, what in (("peaks", "policies"), ("held", "closed forms of small models")):
        agree = memory_chapter.spread(memory[field])
        told = "not measured"
        if agree:
            told = f"{agree['low']:.3f} to {agree['high']:.3f} over {agree['count']} steps"
        console.print(f"         predicted over measured memory, {what}: {told}", highlight=False)
    times = memory["times"]
    if times["depth"] is None:
        console.print(f"         time of policies: not measured, {times['note']}", highlight=False)
    for row in times["rows"]:
        console.print(
            f"[bold]{row['relative']:6.2f}×[/]  the time of keep, policy {row['policy']}, peak "
            f"{results.size(row['peak_bytes'])}, {times['depth']} layers", highlight=False,
        )  # fmt: skip
    budgets = [budget["name"] for budget in memory["deepest"]["budgets"]]
    for form, layers in memory["deepest"]["layers"].items():
        counts = ", ".join(f"{b} {n:,}" for b, n in zip(budgets, layers, strict=True))
        console.print(f"         most layers, predicted: {form}: {counts}", highlight=False)
