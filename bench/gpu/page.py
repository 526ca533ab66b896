"""The results of `bench.gpu` as a page of Markdown, and in short for the terminal."""

import re
from collections import Counter

from bench.gpu.results import Run


def _table(head: list[str], rows: list[list]) -> list[str]:
    def cell(value) -> str:
        return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")

    lines = [head, ["---"] * len(head), *rows] if rows else []
    return ["| " + " | ".join(map(cell, line)) + " |" for line in lines] + [""] * bool(rows)


def _reason(item: dict) -> str:
    """The last line of what pytest said; of a skipped item the reason alone."""
    text = (item["text"].strip().splitlines() or [""])[-1][:300]
    found = re.search(r"Skipped: (.*?)['\"]?\)?$", text)
    return found[1] if found else text


def _items(run: Run) -> list[str]:
    """For each stage how many items passed, and what failed or was skipped."""
    last = {(x["stage"], x["item"]): x for x in run.lines("item")}
    lines = []
    for stage in dict.fromkeys(stage for stage, _ in last):
        found = {item: x for (of, item), x in last.items() if of == stage}
        counts = Counter(x["outcome"] for x in found.values())
        said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        lines += [f"## {stage}", "", f"{len(found)} items: {said}.", ""]
        skipped = Counter(_reason(x) for x in found.values() if x["outcome"] == "skipped")
        lines += [f"- {number} skipped: {reason}" for reason, number in skipped.items()]
        lines += [f"- failed: `{item}`: {_reason(x)}" for item, x in found.items()
                  if x["outcome"] == "failed"]  # fmt: skip
        lines += [""]
    return lines


def _row(row: dict) -> list:
    rate, fraction, peak = (row[k] for k in ("gb_per_second", "fraction_of_copy", "peak_bytes"))
    return [
        row["what"],
        row["variant"],
        f"{row['median_seconds'] * 1e6:.1f}",
        None if rate is None else f"{rate:.0f}",
        None if fraction is None else f"{fraction:.3f}",
        None if peak is None else f"{peak / 2**20:.0f}",
        len(row["seconds"]),
        row["note"],
    ]


def _sections(run: Run) -> list[str]:
    rows = {(x["section"], x["what"], x["variant"]): x for x in run.lines("row")}
    copies = {x["section"]: x["gb_per_second"] for x in run.lines("copy")}
    notes = dict.fromkeys((x["section"], x["note"]) for x in run.lines("note"))
    lines = []
    head = ["what", "variant", "µs", "GB/s", "of a copy", "peak MiB", "runs", "timed"]
    for name in dict.fromkeys(section for section, *_ in rows):
        lines += [f"## {name}", ""]
        if name in copies:
            lines += [f"A copy moves {copies[name]:.0f} GB/s."]
        lines += [f"Note: {note}" for section, note in notes if section == name] + [""]
        found = [x for (section, *_), x in rows.items() if section == name and x["seconds"]]
        lines += _table(head, [_row(x) for x in found])
    return lines


def _curves(run: Run) -> list[str]:
    """The losses at ten steps of every training."""
    last = {x["what"]: x["losses"] for x in run.lines("curve")}
    rows = [
        [what, *(f"{losses[i * (len(losses) - 1) // 9]:.4f}" for i in range(10))]
        for what, losses in last.items()
    ]
    return ["## Curves", "", *_table(["loss after", *(f"{i}/9" for i in range(10))], rows)]


def _targets(run: Run) -> list[str]:
    """Those of a dry run mean nothing."""
    if run.dry:
        return []
    last = {x["what"]: x for x in run.lines("target")}
    rows = [
        [what, x["target"], "not measured" if x["value"] is None else x["value"],
         "yes" if x["met"] else "no"]
        for what, x in last.items()
    ]  # fmt: skip
    return ["## Targets", "", *_table(["target", "wanted", "reached", "met"], rows)]


def selfcheck(found: dict) -> list[str]:
    """What `deepfast selfcheck` found."""
    return ["## deepfast selfcheck", "", f"{found['status']}, {found['seconds']} s", "", "```",
            *found["lines"], found["said"].strip(), "```", ""]  # fmt: skip


def summary(run: Run) -> str:
    """The short tables at the end of the command's output."""
    return "\n".join([*_items(run), *_targets(run)])


def page(run: Run) -> str:
    """The page of the kernel sources of a run."""
    runs = run.lines("run")
    facts = runs[-1]["machine"]
    lines = [f"# {facts['device']}, kernel sources {run.sources}", ""]
    if run.dry:
        lines += ["A dry run on the CPU at toy sizes: its numbers mean nothing.", ""]
    if others := run.others():
        lines += ["The file also holds results of other kernel sources, not on this page: "
                  f"{', '.join(others)}.", ""]  # fmt: skip
    lines += ["`make gpu`. Medians; variants of a case took turns, L2 was emptied before each run.",
              "Bytes are those that an algorithm has to move.", ""]  # fmt: skip
    told = [[x["date"], x["stage"], x["status"], x["seconds"], x["clocks"]] for x in runs]
    lines += _table(["run", "stage", "status", "seconds", "clocks"], told)
    lines += _table(["", ""], [[k, v] for k, v in facts.items() if v is not None])
    for found in run.lines("selfcheck")[-1:]:
        lines += selfcheck(found)
    lines += [*_targets(run), *_items(run), *_sections(run), *_curves(run)]
    for found in run.lines("kernels"):
        lines += [f"## {found['name']}", ""]
        lines += _table(list(found["rows"][0]), [list(x.values()) for x in found["rows"]])
    return "\n".join(lines) + "\n"
