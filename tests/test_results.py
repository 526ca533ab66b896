"""Every number with a key on a page is that of bench/results/results.csv."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import record

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "bench/results/README.md")]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deepfast").rglob("*.yaml"))]
NUMBER = r"(?P<value>-?\d[\d.,]*)(?: (?P<spread>(?:to|±) \d[\d.]*))?"
RESULTS = record.read()
PROCESSORS = {processor for _, processor in RESULTS} | {"Intel, AMX", "AMD Zen 5"}


def shown(number: str, spread: str | None, row: record.Result) -> str | None:
    """What is wrong with a number on a page; None if nothing is."""
    number = number.replace(",", "")
    digits = len(number.partition(".")[2])
    if f"{row.value:.{digits}f}" != number or (spread or "") != row.spread:
        return f"{row.key} is {row.value:g} {row.spread}, the page has {number} {spread or ''}"
    return None


def find(key: str, processor: str | None, results: dict) -> record.Result | str:
    """A row, or why there is none. Without a processor the key must have one row alone."""
    rows = [row for (k, p), row in results.items() if k == key and processor in (None, p)]
    return rows[0] if len(rows) == 1 else f"{key}: {len(rows)} rows for {processor}"


def in_text(text: str, results: dict):
    """``1.06<!-- key -->`` and ``1.06<!-- key, AMD Zen 4 -->``; in recipes ``1.06 [key]``."""
    for found in re.finditer(NUMBER + r"x?(?:<!-- ([\w, ]+?) -->| \[(\w+)\])", text):
        key, _, processor = (found[3] or found[4]).partition(", ")
        row = find(key, processor or None, results)
        yield key, row if isinstance(row, str) else shown(found["value"], found["spread"], row)


def in_tables(text: str, results: dict):
    """A row of a table ends with its keys: one for each number of its cells, - for one that has
    none; or one key for the columns of several processors, whose cells have dates."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not line.startswith("|"):
            header = []
        header = header or cells
        keys = re.search(r"\| <!-- ([\w -]+) -->$", line)
        if not keys:
            continue
        if PROCESSORS.intersection(header):
            yield from in_columns(keys[1], dict(zip(header, cells, strict=True)), results)
            continue
        numbers = [cell for cell in cells[1:] if re.match(NUMBER, cell)]
        names = keys[1].split()
        if len(names) != len(numbers):
            yield keys[1], f"{len(names)} keys for {len(numbers)} numbers: {line}"
            continue
        for key, cell in zip(names, numbers, strict=True):
            if key == "-":
                continue
            row, number = find(key, None, results), re.match(NUMBER, cell)
            yield key, row if isinstance(row, str) else shown(*number.group(1, 2), row)


def in_columns(key: str, cells: dict[str, str], results: dict):
    for processor in PROCESSORS & cells.keys():
        row, cell = results.get((key, processor)), cells[processor]
        if row is None:
            yield key, f"{key} has no result on {processor}: {cell}" if cell else None
            continue
        number = re.fullmatch(NUMBER + r" \((.*)\)", cell)
        if not number or number[3] != row.date:
            yield key, f"{key} on {processor}, {row.date}: the page has {cell!r}"
        else:
            yield key, shown(*number.group(1, 2), row)


def checked(text: str, results: dict = RESULTS) -> list[tuple[str, str | None]]:
    return [*in_text(text, results), *in_tables(text, results)]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_each_number_is_that_of_the_file(path):
    assert [wrong for _, wrong in checked(path.read_text()) if wrong] == []


def test_each_change_of_the_file_is_seen():
    """Every key on a page: another value fails."""
    pages = [path.read_text() for path in PAGES]
    keys = {key for text in pages for key, _ in checked(text)}
    assert len(keys) >= 30
    for name, row in RESULTS.items():
        if row.key in keys:
            changed = RESULTS | {name: replace(row, value=row.value * 1.5 + 1)}
            assert any(wrong for text in pages if row.key in text
                       for _, wrong in checked(text, changed)), name  # fmt: skip


def test_a_page_that_differs_is_seen():
    row = next(iter(RESULTS.values()))
    results = {("a", "AMD Zen 4"): replace(row, value=1.26, spread="to 1.3", date="2026-11-24")}
    head = "| what | AMD Zen 4 |\n|---|---|\n"
    for text, good in (
        ("1.26 to 1.3x<!-- a -->", True), ("1.3 to 1.3<!-- a -->", True), ("1.26<!-- a -->", False),
        ("1.2 to 1.3<!-- a -->", False), ("1.26 to 1.3<!-- a, AMD Zen 5 -->", False),
        ("1.26 to 1.3<!-- b -->", False), ("| one | 1.26 to 1.3 | <!-- a -->", True),
        ("| one | 1.26 to 1.3 | 2 | <!-- a -->", False), ("| b | 1.27 | <!-- a -->", False),
        (head + "| one | 1.26 to 1.3 (2026-11-24) | <!-- a -->", True),
        (head + "| one | 1.26 to 1.3 (2026-11-23) | <!-- a -->", False),
        (head + "| one | | <!-- a -->", False), (head + "| one | 1.26 | <!-- b -->", False),
    ):  # fmt: skip
        found = checked(text, results)
        assert found, text
        assert all(wrong is None for _, wrong in found) == good, text


def test_the_file():
    """Each row says where its number is from, and no row is lost by reading and writing."""
    for row in RESULTS.values():
        assert all((row.what, row.unit, row.date, row.commit, row.command)), row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.date), row


def test_a_new_number_replaces_the_old_one(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.csv"
    path.write_bytes(record.FILE.read_bytes())
    record.write(record.read(path), path)
    assert path.read_bytes() == record.FILE.read_bytes()
    monkeypatch.setattr(record.read, "__defaults__", (path,))
    monkeypatch.setattr(record.write, "__defaults__", (path,))
    for value in (1.23456, 2.0):
        record.record("new", value, "x", "one, two", "python -m bench.new")
    rows = record.read(path)
    assert len(rows) == len(RESULTS) + 1
    row = rows["new", record.processor()]
    assert (row.value, row.what, row.unit) == (2.0, "one, two", "x")
    assert "1.235 x      new: one, two" in capsys.readouterr().out
