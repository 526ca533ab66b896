"""The results file of a device, to which every run of `make gpu` adds.

    {"device": ..., "sources": {DIGEST: {"runs": [...], "launches": {...}, "tests": {...},
                                         "sections": {...}, "profile": {...}}}}

Results belong to the kernel sources that they were measured with, which DIGEST names: those of
other sources stay in the file, apart, and the page says so.
"""

import json
import os
import shutil
import time
from pathlib import Path

from bench.gpu import page

SAVE_SECONDS = 1.0
"""The least time between two writes of the file, which a run makes after nearly every row."""


def write(path: Path, text: str) -> None:
    """Replaces the file at once: a process that is killed leaves no half-written one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def slug(device: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def merge(old: dict, new: dict) -> dict:
    """A section's results so far with those of another run: a row replaces the row of its case and
    variant, and other rows stay."""

    def joined(name: str, *keys: str) -> list:
        rows = {tuple(row[k] for k in keys): row for row in old.get(name, []) + new.get(name, [])}
        return list(rows.values())

    return old | new | {
        "rows": joined("rows", "what", "variant"),
        "targets": joined("targets", "what"),
        "notes": list(dict.fromkeys(old.get("notes", []) + new.get("notes", []))),
    }  # fmt: skip


class Results:
    """The files ``<device>.json`` and ``<device>.md`` in a folder.

    Args:
        run: what the page says of this run: its date, command and machine.
        copies: a folder that gets a copy of both files at every write, or None.
    """

    def __init__(self, folder: Path, digest: str, run: dict, copies: Path | None = None):
        self.start = self.saved = time.perf_counter()
        self.run, self.digest, self.copies = run | {"stages": {}}, digest, copies
        device = run["machine"]["device"]
        self.paths = folder / f"{slug(device)}.json", folder / f"{slug(device)}.md"
        folder.mkdir(parents=True, exist_ok=True)
        self.data = self._load() or {"device": device, "sources": {}}
        self.record = self.data["sources"].setdefault(digest, {"runs": []})
        self.record["runs"].append(self.run)
        self.changed = True

    def _load(self) -> dict | None:
        path = self.paths[0]
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text())
            if set(data) == {"device", "sources"}:
                return data
            reason = "it has other fields than device and sources"
        except json.JSONDecodeError as error:
            reason = str(error)
        aside = path.with_suffix(".unreadable.json")
        path.rename(aside)
        print(f"{path}: expected the results of this command ({reason}); it is now {aside.name}")
        return None

    def part(self, name: str) -> dict:
        """A part of this digest's results, to be changed in place."""
        self.changed = True
        return self.record.setdefault(name, {})

    def save(self, now: bool = False) -> None:
        """Writes both files if something changed, at most once a second unless ``now``."""
        elapsed = time.perf_counter() - self.saved
        if not now and not (self.changed and elapsed > SAVE_SECONDS):
            return
        self.run["seconds"] = round(time.perf_counter() - self.start, 1)
        write(self.paths[0], json.dumps(self.data, indent=1) + "\n")
        write(self.paths[1], page.page(self.data, self.digest))
        for path in self.paths if self.copies is not None else ():
            shutil.copy(path, self.copies)
        self.saved, self.changed = time.perf_counter(), False
