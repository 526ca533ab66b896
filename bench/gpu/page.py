"""The results of `bench.gpu` as a page of Markdown, and in short for the terminal."""

from deepfast.proof.show import lines as proof_lines
from deepfast.proof.table import Table


def _cell(value) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _table(head: list[str], rows: list[list]) -> list[str]:
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines] + [""]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _launches(record: dict) -> list[str]:
    lines = []
    for by, found in record.get("launches", {}).items():
        failed = {name: run for name, run in found.items() if run["outcome"] != "ok"}
        lines.append(f"- {by}: {len(found) - len(failed)} of {len(found)} launches ran.")
        lines += [
            f"- {by}, `{name}` {run['outcome']}: {_last_line(run['text'])}"
            for name, run in failed.items()
        ]
    return ["## Each launch once", "", *lines, ""] if lines else []


def proof(record: dict) -> list[str]:
    """What `deepfast prove` found."""
    found = record.get("proof")
    if not found:
        return []
    said = [found["said"].strip()] if found["said"] else []
    table = found["table"] or {"key": {}, "ops": {}}
    told = proof_lines(Table(table["key"], table["ops"]))
    return ["## deepfast prove", "", f"{found['status']}, {found['seconds']} s", "", "```",
            *told, *said, "```", ""]  # fmt: skip


def _tests(record: dict) -> list[str]:
    files = record.get("tests", {})
    if not files:
        return ["Tests: not run.", ""]
    rows = [
        [name, f["collected"], f["passed"], len(f["failed"]), len(f["skipped"]), f["seconds"]]
        for name, f in sorted(files.items())
    ]
    head = ["file", "tests", "passed", "failed", "skipped", "seconds"]
    lines = ["## Tests", "", *_table(head, rows)]
    for f in files.values():
        for outcome in ("failed", "skipped"):
            for line in f[outcome]:
                lines.append(f"- {outcome}: `{line['test']}`: {_last_line(line['text'])}")
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
        len(row["seconds"]),
        row["note"],
    ]


def _section(name: str, section: dict) -> list[str]:
    lines = [f"## {name}", "", f"{section['status']}, {section.get('seconds', 0)} s."]
    if "copy_gb_per_second" in section:
        lines[-1] += f" A copy moves {section['copy_gb_per_second']:.0f} GB/s."
    lines += [f"Note: {note}" for note in section.get("notes", [])] + [""]
    head = ["what", "variant", "µs", "GB/s", "of a copy", "peak MiB", "runs", "timed"]
    lines += _table(head, [_row(row) for row in section.get("rows", [])])
    for error in section.get("errors", []):
        lines += [f"Raised in {error['what']}:", "", "```", error["error"].strip(), "```", ""]
    return lines


def told(name: str, section: dict) -> str:
    """A section's rows, notes and errors as text."""
    lines, what = [f"{name}: {section['status']}, {section['seconds']} s"], None
    for row in section.get("rows", []):
        if row["what"] != what:
            what = row["what"]
            lines.append(f"  {what}")
        _, variant, seconds, rate, fraction, *_ = _row(row)
        speed = f"{rate:>7} GB/s {fraction} of a copy" if rate else ""
        lines.append(f"    {variant:34} {seconds:>10} us {speed}")
    lines += [f"  note: {note}" for note in section.get("notes", [])]
    lines += [f"  ERROR {e['what']}\n{e['error'][-1500:]}" for e in section.get("errors", [])]
    return "\n".join(lines)


def _targets(record: dict) -> list[str]:
    rows = []
    for section in record.get("sections", {}).values():
        for t in section.get("targets", []):
            reached = "not measured" if t["value"] is None else t["value"]
            rows.append([t["what"], t["target"], reached, "yes" if t["met"] else "no"])
    return _table(["target", "wanted", "reached", "met"], rows)


def _profile(record: dict) -> list[str]:
    lines = []
    for name, found in record.get("profile", {}).items():
        if "note" in found:
            lines += [f"- {found['note']}", ""]
            continue
        status = f"exit status {found.get('exit', 'unknown: it was stopped')}"
        lines += [f"- {name}: {found['launches']} launches, {status}", ""]
        if found.get("output"):
            lines += ["```", found["output"].strip(), "```", ""]
        if rows := found.get("kernels"):
            lines += _table(list(rows[0]), [list(row.values()) for row in rows])
    return ["## compute-sanitizer and ncu", "", *lines] if lines else []


def summary(record: dict) -> str:
    """The short tables at the end of the command's output."""
    return "\n".join([*_launches(record), *_tests(record), *_targets(record)])


def page(data: dict, digest: str) -> str:
    """The page of the kernel sources ``digest``."""
    record = data["sources"][digest]
    last = record["runs"][-1]
    lines = [f"# {data['device']}, kernel sources {digest}", ""]
    if last["dry_run"]:
        lines += ["A dry run on the CPU at toy sizes: its numbers mean nothing.", ""]
    others = [name for name in data["sources"] if name != digest]
    if others:
        lines += ["The JSON file also holds results of other kernel sources, which are not on this "
                  f"page: {', '.join(others)}.", ""]  # fmt: skip
    lines += ["`make gpu`. Medians; variants of a case took turns, L2 was emptied before each run.",
              "Bytes are those that an algorithm has to move.", ""]  # fmt: skip
    runs = [
        [run["date"], ", ".join(f"{name}: {s['status']}" for name, s in run["stages"].items()),
         run.get("seconds"), *(run.get("clocks", {}).get(when) for when in ("before", "after"))]
        for run in record["runs"]
    ]  # fmt: skip
    lines += _table(["run", "stages", "seconds", "clocks before", "clocks after"], runs)
    facts = last["machine"].items()
    lines += _table(["", ""], [[k, v] for k, v in facts if v is not None])
    if (last.get("build") or {}).get("error"):
        lines += ["Building the ops failed:", "", "```", last["build"]["error"], "```", ""]
    lines += [*_launches(record), *proof(record), "## Targets", "", *_targets(record)]
    lines += _tests(record)
    for name, section in record.get("sections", {}).items():
        lines += _section(name, section)
    return "\n".join([*lines, *_profile(record)]) + "\n"
