"""The results of a device: a file to which every process of every run appends lines of JSON.

Each line names the kernel sources that it belongs to, and its ``kind``: the "run" of a command, an
"item" (a launch, a test or a section, with its outcome), the "row", "target", "note", "copy" or
"curve" of a section, a "selfcheck", or the "kernels" that ncu measured. The last line about
something holds.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "DEEPFAST_GPU_RUN"
"""The environment variable in which the processes of a run find it, as JSON."""


@dataclass(frozen=True)
class Run:
    """Where the results of a run go."""

    path: str
    sources: str
    """A digest of the kernel sources."""
    dry: bool
    """Whether it is a dry run, on a CPU at toy sizes."""
    limit: float
    """Seconds of one item, compiling included."""

    @classmethod
    def current(cls) -> "Run":
        return cls(**json.loads(os.environ[VARIABLE]))

    def variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(vars(self))}

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def write(self, kind: str, **fields: object) -> None:
        """Adds a line at once; lines of several processes do not mix."""
        line = json.dumps({"sources": self.sources, "kind": kind, **fields}) + "\n"
        with Path(self.path).open("ab+", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                # A process that was killed may have left half a line.
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())

    def lines(self, kind: str) -> list[dict]:
        """What is known so far of these sources. What a killed process left of a line counts
        as nothing."""
        found = (_object(line) for line in _bytes(self.path).splitlines())
        return [x for x in found if x.get("kind") == kind and x["sources"] == self.sources]

    def done(self, stage: str) -> list[str]:
        """The items of a stage that passed, or have a reason to be skipped."""
        last = {x["item"]: x["outcome"] for x in self.lines("item") if x["stage"] == stage}
        return [item for item, outcome in last.items() if outcome in ("passed", "skipped")]

    def others(self) -> list[str]:
        """The other kernel sources that the file has results of."""
        found = (_object(line).get("sources") for line in _bytes(self.path).splitlines())
        return [name for name in dict.fromkeys(found) if name not in (None, self.sources)]


def _bytes(path: str) -> bytes:
    return Path(path).read_bytes() if Path(path).exists() else b""


def _object(line: bytes) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}
