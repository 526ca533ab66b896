"""The output of a run: lines for people, JSON lines and TensorBoard for programs, its result."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepfast.files import write_atomically
from deepfast.machine import environment
from deepfast.memory.units import format_bytes
from deepfast.mt.training.errors import TrainingError

METRICS, RESULT = "metrics.jsonl", "result.json"
LAST_EVENTS = ("average", "test")
"""Events that a finished run logs at its last step."""
MACHINE = ("date", "cpu", "system", "torch", "deepfast", "commit")
"""What a result says of the machine."""


@dataclass(kw_only=True)
class TrainResult:
    """How a run ended."""

    output: Path
    """The folder of checkpoints and metrics."""
    step: int
    """Optimizer steps done."""
    stopped: str
    """"max_steps", "max_minutes", "patience", or one of `SIGNALS`."""
    seconds: float
    """Wall time, including the time before resuming."""
    parameters: int
    """All of the model, with frozen ones."""
    checkpoint: Path | None
    """The newest checkpoint, from which a run resumes."""
    best: Path | None
    """The checkpoint with the lowest dev NLL of all validations in this folder."""
    best_nll: float | None
    """Its dev NLL, nats per target token."""
    average: Path | None = None
    """The average of the last checkpoints, to translate with; no run can resume from it."""
    average_nll: float | None = None
    """Its dev NLL, nats per target token."""
    test_bleu: float | None = None
    """BLEU of the test part, 0 to 100; with several languages their mean."""
    peak_bytes: int | None = None
    """The highest resident memory of the process; on a GPU that of torch's allocator."""
    bleu_signature: str | None = None
    """sacrebleu's signature of `test_bleu`."""
    sentences: str | None = None
    """`sentence_counts` of the translated test part; None with several languages, whose mean BLEU
    no sums of sentences give."""

    @property
    def for_translation(self) -> Path:
        """The average or the best checkpoint: the one with the lower dev NLL."""
        if self.average is not None and (
            self.best is None or (self.average_nll is not None and self.average_nll < self.best_nll)
        ):
            return self.average
        return self.best or self.checkpoint

    def summary(self) -> dict[str, Any]:
        """The numbers of this result, and its speed: the median seconds of a step, and the most
        target tokens a second, which other work on the machine disturbed least."""
        rows = [row for row in read_metrics(self.output) if row["event"] == "train"]
        steps = [
            (later["seconds"] - row["seconds"]) / (later["step"] - row["step"])
            for row, later in itertools.pairwise(rows)
        ]
        speeds = [row["target_tokens_per_second"] for row in rows]
        plain = {key: value for key, value in vars(self).items() if not isinstance(value, Path)}
        return plain | {
            "step_seconds": statistics.median(steps) if steps else None,
            "target_tokens_per_second": max(speeds, default=None),
        }


def write_result(folder: Path, found: dict[str, Any]) -> None:
    """Writes how a command has ended, and on which machine, into its output folder: a line for each
    key of `TrainResult.summary`, or ``diverged`` with the reason."""
    machine = {key: value for key, value in environment().items() if key in MACHINE}
    text = json.dumps(found | {"machine": machine}, indent=1)
    write_atomically(folder / RESULT, f"{text}\n".encode())


FORMATS = {
    "predicted_bytes": lambda size: f"{format_bytes(size)} predicted",
    "measured_bytes": lambda size: f"{format_bytes(size)} measured",
    "policies": "{}".format,
    "loss": "loss {:.4f}".format,
    "nll": "nll {:.4f} nats".format,
    "ppl": "ppl {:.2f}".format,
    "accuracy": "accuracy {:.1%}".format,
    "bleu": "BLEU {:.2f}".format,
    "lr": "lr {:.2e}".format,
    "grad_norm": "grad {:.2f}".format,
    "target_tokens_per_second": "{:,.0f} target tok/s".format,
    "source_tokens_per_second": "{:,.0f} source tok/s".format,
    "memory_bytes": format_bytes,
}
"""How a line for people shows a value, by its key."""


class Report:
    """Writes `metrics.jsonl` and TensorBoard events into the run's folder, and prints lines.

    Every line of `metrics.jsonl` is an object with `event` ("memory", "train", "valid", "average",
    "test"), `step` and `seconds` (wall time of the run, with the time before resuming). NLL and
    loss are nats per target token, eos included.

    Of several ranks only the first has a folder for this.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int | None,
        first_step: int = 0,
        tensorboard: bool = True,
        quiet: bool = False,
    ):
        """
        Args:
            first_step: the step to resume after. What an interrupted run logged after it is
                removed, because it will be logged again.
            quiet: print nothing.
        """
        self.path, self.total_steps, self.quiet = None, total_steps, quiet
        self._board = None
        if folder is not None:
            self.path = folder / METRICS
            _cut_after(folder, first_step)
            self._board = _tensorboard(folder, first_step) if tensorboard else None

    def close(self) -> None:
        """Ends the thread that writes TensorBoard events."""
        if self._board is not None:
            self._board.close()

    def say(self, line: str) -> None:
        """One line for people. The results are files, so a run goes on where its standard output
        cannot be written."""
        if not self.quiet:
            with contextlib.suppress(OSError):
                print(line, flush=True)

    def log(self, event: str, row: dict[str, Any], *, seconds: float) -> None:
        """One object for programs, which is then on the disk, and one line for people.

        Raises:
            TrainingError: the file cannot be written.
        """
        row = {"event": event, "seconds": round(seconds, 3), **row}
        # JSON has neither NaN nor infinity, which a perplexity may reach.
        plain = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        if self.path is not None:
            try:
                with open(self.path, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(plain, allow_nan=False) + "\n")
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:
                raise TrainingError(f"{self.path}: cannot be written ({error.strerror})") from error
        if self._board is not None:
            for name, value in _scalars(row):
                self._board.add_scalar(f"{event}{name}", value, row["step"])
            self._board.flush()
        line = describe(row)
        if event == "train" and self.total_steps is not None:
            left = seconds / row["step"] * (self.total_steps - row["step"])
            line += f", {timedelta(seconds=round(left))} left"
        self.say(line)


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What TensorBoard draws of a row, by the end of its name. The norms of layers are a group of
    curves of their own."""
    for key, value in row.items():
        if isinstance(value, (int, float)) and key != "step":
            yield f"/{key}", value
        elif isinstance(value, list) and key.startswith("grad_norm"):
            yield from ((f"_{key}/{n:03}", x) for n, x in enumerate(value, 1) if x is not None)


def describe(row: dict[str, Any]) -> str:
    """A row of metrics as one line with units."""
    parts = [show(row[key]) for key, show in FORMATS.items() if key in row]
    for key, value in row.items():
        if key.startswith("bleu_"):
            parts.append(f"{key.removeprefix('bleu_')} {value:.2f}")
        elif key.endswith("_depth"):
            parts.append(f"{key.replace('_', ' ')} {value:.1f}")
    parts += ["best so far"] if row.get("best") else []
    parts += [f"of {row['of']}"] if "of" in row else []
    parts += [f"{row['seconds']:.0f} s"] if row["event"] == "train" else []
    return f"step {row['step']:>6}  {row['event']} {', '.join(parts)}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run, without those that a killed run has cut short.

    Raises:
        TrainingError: the folder has none.
    """
    path = folder / METRICS
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from error
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _cut_after(folder: Path, step: int) -> None:
    """Removes rows that will be logged again: those after ``step``, and the last ones of a finished
    run."""
    if (folder / METRICS).exists():
        kept = [
            json.dumps(row) + "\n"
            for row in read_metrics(folder)
            if 0 < step >= row["step"] + (row["event"] in LAST_EVENTS)
        ]
        write_atomically(folder / METRICS, "".join(kept).encode())


def _tensorboard(folder: Path, first_step: int) -> Any:
    """The writer of events; None where the package is not installed."""
    # Keeps TensorFlow quiet, which TensorBoard imports where it is installed.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
