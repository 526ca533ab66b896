"""The table of what is proved, as text."""

from collections.abc import Iterable, Iterator

from deepfast.proof.table import Entry, Table, fastest


def summary(entry: Entry) -> str:
    """Which backends are proved, or why not, in one line."""
    return ", ".join(
        f"{by} {'is proved' if error is None else f'failed ({error})'}"
        for by, error in sorted(entry["errors"].items())
    )


def lines(table: Table, ops: Iterable[str] | None = None) -> Iterator[str]:
    """A line for each op and dtype, and one below it for each width at which it was timed."""
    for op in table.ops | table.lost if ops is None else ops:
        for dtype, entry in (table.ops.get(op) or table.lost.get(op, {})).items():
            yield f"{op} {dtype}: {summary(entry)}"
            for width, seconds in entry["seconds"].items():
                times = ", ".join(f"{by} {s * 1e6:.0f} us" for by, s in seconds.items())
                yield f"    width {width}: {fastest(entry, int(width))} serves; {times}"
