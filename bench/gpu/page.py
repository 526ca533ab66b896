"""The results of `bench.gpu` as a page of Markdown."""


def _cell(value) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _table(head: list[str], rows: list[list]) -> list[str]:
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines] + [""]


def _tests(groups: dict | None) -> list[str]:
    if groups is None:
        return ["Tests: not run.", ""]
    rows = [
        [name, g["status"], g["passed"], len(g["failed"]), len(g["skipped"])]
        for name, g in groups.items()
    ]
    lines = ["## Tests", ""]
    lines += _table(["group", "status", "passed", "failed", "skipped"], rows)
    for g in groups.values():
        for outcome in ("failed", "skipped"):
            for line in g[outcome]:
                last = (line["text"].strip().splitlines() or [""])[-1]
                lines.append(f"- {outcome}: `{line['test']}`: {last[:300]}")
    return [*lines, ""]


def _row(row: dict) -> list:
    rate, fraction, peak = (row[k] for k in ("gb_per_second", "fraction_of_copy", "peak_bytes"))
    return [
        row["what"],
        row["variant"],
        f"{row['median_seconds'] * 1e6:.1f}",
        None if rate is None else f"{rate:.0f}",
        None if fraction is None else f"{fraction:.3f}",
        None if peak is None else f"{peak / 2**20:.0f}",
        row["note"],
    ]


def _section(name: str, section: dict) -> list[str]:
    lines = [f"## {name}", "", f"{section['status']}, {section.get('seconds', 0)} s."]
    if "copy_gb_per_second" in section:
        lines[-1] += f" A copy moves {section['copy_gb_per_second']:.0f} GB/s."
    if section.get("tests_failed"):
        lines += ["", f"**Tests of these kernels failed:** {', '.join(section['tests_failed'])}"]
    lines += [f"Note: {note}" for note in section.get("notes", [])] + [""]
    head = ["what", "variant", "µs", "GB/s", "of a copy", "peak MiB", "timed"]
    lines += _table(head, [_row(row) for row in section.get("rows", [])])
    for error in section.get("errors", []):
        lines += [f"Raised in {error['what']}:", "", "```", error["error"].strip(), "```", ""]
    return lines


def targets(data: dict) -> list[str]:
    rows = []
    for section in data["sections"].values():
        mark = " (its tests failed)" if section.get("tests_failed") else ""
        for t in section.get("targets", []):
            reached = "not measured" if t["value"] is None else t["value"]
            rows.append([t["what"], t["target"], reached, ("yes" if t["met"] else "no") + mark])
    return _table(["target", "wanted", "reached", "met"], rows)


def summary(data: dict) -> str:
    """The short table at the end of the command's output."""
    return "\n".join([*_tests(data["tests"]), *targets(data)])


def page(data: dict) -> str:
    facts = data["machine"]
    lines = [f"# {facts['device']}, {data['date']}", ""]
    if data["dry_run"]:
        lines += ["A dry run on the CPU at toy sizes: its numbers mean nothing.", ""]
    if not data["complete"]:
        lines += ["**Not complete:** the run was still going or was stopped when this was written.",
                  ""]  # fmt: skip
    lines += [f"`{data['command']}`, {data['seconds']} s. Medians; variants of a case took turns,",
              "L2 was emptied before each run. Bytes are those that an algorithm has to move.",
              ""]  # fmt: skip
    clocks = {"clocks before": data.get("clocks_before"), "clocks after": data.get("clocks_after")}
    known = {k: v for k, v in (facts | clocks).items() if v is not None}
    lines += _table(["", ""], [[k, v] for k, v in known.items()])
    if data.get("build_error"):
        lines += ["Building deepfast._C failed:", "", "```", data["build_error"], "```", ""]
    if data.get("sanitizer"):
        lines += ["## compute-sanitizer", ""]
        lines += [f"- {tool}: {said}" for tool, said in data["sanitizer"].items()] + [""]
    lines += ["## Targets", "", *targets(data), *_tests(data["tests"])]
    for name, section in data["sections"].items():
        lines += _section(name, section)
    return "\n".join(lines) + "\n"
