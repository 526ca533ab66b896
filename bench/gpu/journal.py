"""What a process of `make gpu` has done, one JSON object a line, written at once.

The parent process reads the file while the process runs. If the process crashes or hangs, the
parent starts it again, and it goes on after the item that it was at. An item is a launch, a test or
a section of benchmarks. A file holds ``{"begin": item}``, then ``{"end": item, "outcome": "ok",
"failed" or "skipped", ...}``, and after the last item ``{"finished": true}``.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

VARIABLE = "DEEPFAST_JOURNAL"
"""The environment variable that names the file."""

BROKEN = 3
"""The exit status of a process whose device answers with an error."""


def line(event: dict) -> str:
    return json.dumps(event) + "\n"


def read(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """The objects after byte ``start``, and where they end; an incomplete last line waits."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]
    return [e for e in map(_object, text.splitlines()) if e is not None], start + len(text)


def _object(text: bytes) -> dict | None:
    """None for what a killed process left of a line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


class Journal:
    """The file that the environment names. Where it names none, lines are printed."""

    def __init__(self):
        name = os.environ.get(VARIABLE)
        self.path = Path(name) if name else None
        events = read(self.path)[0] if name else []
        self.done = {event["end"] for event in events if "end" in event}
        """Items of an earlier process with this file."""

    def write(self, **event: object) -> None:
        if self.path is None:
            print(line(event), end="", flush=True)
            return
        with self.path.open("a") as file:
            file.write(line(event))

    def run(self, items: Iterable[str], work: Callable[[str], object]) -> bool:
        """Calls ``work`` for each item that is not done; returns whether none raised."""
        fine = True
        for item in items:
            if item in self.done:
                continue
            self.write(begin=item)
            start, outcome, text = time.perf_counter(), "ok", ""
            try:
                work(item)
            except Exception:
                fine, outcome, text = False, "failed", traceback.format_exc(limit=-8)
            seconds = round(time.perf_counter() - start, 2)
            self.write(end=item, outcome=outcome, seconds=seconds, text=text)
            if outcome != "ok":
                leave_broken_device()
        self.write(finished=True)
        return fine


def leave_broken_device() -> None:
    """Ends the process if its device answers with an error: every later launch would fail too."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(BROKEN)
