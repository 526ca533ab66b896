"""The output of a run: lines or a bar for people, JSON lines and TensorBoard for programs, and how
it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deepfast.files import write_atomically
from deepfast.memory.units import format_bytes
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.ranks import Ranks

METRICS, LOGS = "metrics.jsonl", "logs"
LAST_EVENTS = ("average", "test")
"""Events that a finished run logs at its last step."""


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

    @property
    def for_translation(self) -> Path:
        """The average or the best checkpoint: the one with the lower dev NLL."""
        if self.average is not None and (
            self.best is None or (self.average_nll is not None and self.average_nll < self.best_nll)
        ):
            return self.average
        return self.best or self.checkpoint


class Report:
    """Writes `metrics.jsonl` and TensorBoard events into the run's folder, and prints lines.

    Every line of `metrics.jsonl` is an object with `event` ("memory", "train", "valid", "average",
    "test"), `step` and `seconds` (wall time of the run, with the time before resuming). NLL and
    loss are nats per target token, eos included.

    Of several ranks only the first writes this. Each rank writes its lines, with the time of day,
    to `logs/rank-N.log`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int | None,
        first_step: int = 0,
        tensorboard: bool = True,
        quiet: bool = False,
        ranks: Ranks | None = None,
    ):
        """
        Args:
            first_step: the step to resume after. What an interrupted run logged after it is
                removed, because it will be logged again.
            quiet: print nothing.
        """
        ranks = ranks or Ranks()
        quiet, tensorboard = quiet or not ranks.first, tensorboard and ranks.first
        self.quiet, self.path = quiet, folder / METRICS
        self._own = None if ranks.alone else _opened(folder / LOGS / f"rank-{ranks.rank}.log")
        self._stream = None
        if ranks.first:
            lost = _cut_after(self.path, first_step)
            self._stream = _opened(self.path)
        self._board = _tensorboard(folder, first_step) if tensorboard else None
        self._bar = None if quiet or not sys.stdout.isatty() else _bar(total_steps, first_step)
        if ranks.first and lost:
            self.say(f"{self.path}: {lost}")
        if tensorboard and self._board is None:
            self.say("tensorboard is not installed: metrics go to metrics.jsonl alone")

    def say(self, line: str) -> None:
        """One line for people."""
        self.note(line)
        if self.quiet:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, flush=True)
        except OSError as error:
            # A pipe or a terminal was closed, or a disk is full. The results are files.
            self.quiet = True
            if not isinstance(error, BrokenPipeError):
                text = "standard output: cannot be written (%s); training goes on without it"
                logging.getLogger("deepfast").warning(text, error.strerror)

    def note(self, line: str) -> None:
        """One line for this rank's log alone."""
        if self._own is not None:
            with _writing(self._own.name):
                self._own.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
                self._own.flush()

    def check(self) -> None:
        """Ends a run whose folder or metrics are no longer there, before it writes more.

        Raises:
            TrainingError: the file of metrics was removed or replaced.
        """
        if self._stream is not None and not _is_at(self._stream, self.path):
            raise TrainingError(
                f"{self.path}: expected the file that this run writes, got "
                f"{'another one' if self.path.exists() else 'none'}: it or its folder was removed "
                "or replaced during the run"
            )

    def sync(self) -> None:
        """Like `check`, and brings the metrics to the disk, before a checkpoint that follows them.

        Raises:
            TrainingError: see `check`; or the file cannot be written.
        """
        self.check()
        if self._stream is not None:
            with _writing(self.path):
                os.fsync(self._stream.fileno())

    def log(self, event: str, row: dict[str, Any], *, seconds: float) -> None:
        """One object for programs, and one line or an update of the bar for people."""
        row = {"event": event, "seconds": round(seconds, 3)} | row
        # JSON has neither NaN nor infinity, which a perplexity may reach.
        plain = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.check()
        with _writing(self.path):
            if self._stream is not None:
                self._stream.write(json.dumps(plain, allow_nan=False) + "\n")
                self._stream.flush()
            if self._board is not None:
                for name, value in row.items():
                    for end, each in _scalars(name, value):
                        self._board.add_scalar(f"{event}{end}", each, row["step"])
                self._board.flush()
        line = describe(row)
        if event == "train" and self._bar is not None:
            self.note(line)
            self._bar.update(self._bar.task_ids[0], completed=row["step"], line=line)
        else:
            self.say(line)

    def close(self) -> None:
        """Ends the bar and closes the files; may be called more than once."""
        # On a full disk or a closed terminal this fails again and would hide the first error.
        for stream in (self._stream, self._own):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """What TensorBoard draws of a value, by the end of its name. The norms of layers are a group of
    curves of their own."""
    if isinstance(value, list):
        return [
            (f"_{name}/{layer:03}", x) for layer, x in enumerate(value, 1) if isinstance(x, float)
        ]
    return [(f"/{name}", value)] if isinstance(value, (int, float)) and name != "step" else []


def _opened(path: Path) -> TextIO:
    """A file to add lines to; its folder is made."""
    with _writing(path):
        path.parent.mkdir(exist_ok=True)
        return open(path, "a", encoding="utf-8")


@contextlib.contextmanager
def _writing(path: object) -> Iterator[None]:
    """Turns an error of the system into a sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error


def _is_at(stream: TextIO, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def describe(row: dict[str, Any]) -> str:
    """A row of metrics as one line with units."""
    head = f"step {row['step']:>6}"
    if row["event"] == "memory":
        predicted, measured = (format_bytes(row[f"{k}_bytes"]) for k in ("predicted", "measured"))
        return f"{head}  memory {predicted} predicted, {measured} measured, {row['policies']}"
    if row["event"] != "train":
        parts = []
        if "nll" in row:
            parts.append(f"nll {row['nll']:.4f} nats, ppl {row['ppl']:.2f}")
            parts.append(f"accuracy {row['accuracy']:.1%}")
        if "bleu" in row:
            each = [f"{k.removeprefix('bleu_')} {row[k]:.2f}" for k in row if k.startswith("bleu_")]
            parts.append(f"BLEU {row['bleu']:.2f}" + (f" ({', '.join(each)})" if each else ""))
        if row.get("best"):
            parts.append("best so far")
        if "of" in row:
            parts.append(f"of {row['of']}")
        return f"{head}  {row['event']} {', '.join(parts)}"
    accuracy = f"accuracy {row['accuracy']:.1%}  " if "accuracy" in row else ""
    depths = [f"{key.replace('_', ' ')} {row[key]:.1f}  " for key in row if key.endswith("_depth")]
    return (
        f"{head}  loss {row['loss']:.4f}  nll {row['nll']:.4f} nats  ppl {row['ppl']:.2f}  "
        f"{accuracy}{''.join(depths)}"
        f"lr {row['lr']:.2e}  grad {row['grad_norm']:.2f}  "
        f"{row['target_tokens_per_second']:,.0f} target tok/s  "
        f"{row['source_tokens_per_second']:,.0f} source tok/s  "
        f"{row['memory_bytes'] / 2**20:,.0f} MiB  {row['seconds']:.0f} s"
    )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run.

    Raises:
        TrainingError: the folder has none.
    """
    path = folder / METRICS
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path}: expected lines of metrics, got other bytes") from error
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> dict[str, Any] | None:
    """A line of metrics; None for one cut short when the run was killed."""
    try:
        row = json.loads(line)
        return row if {"event", "step"} <= row.keys() else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _cut_after(path: Path, step: int) -> str | None:
    """Removes rows that will be logged again: those after `step`, and the last ones of a finished
    run. Returns what is missing before them, in words."""
    if not path.exists():
        # A run that resumes in a new folder has none.
        again = step and any(path.parent.glob("step-*"))
        return f"the file was removed, and the rows of steps 1 to {step} with it" if again else None
    kept, damaged = [], 0
    # A line that a crash has damaged may hold any bytes; no JSON comes of it.
    lines = path.read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None or not isinstance(row["step"], int):
            # The last line may be one that a killed run has begun.
            damaged += number < len(lines)
            continue
        if 0 < step >= row["step"] + (row["event"] in LAST_EVENTS):
            kept.append(line + "\n")
    write_atomically(path, "".join(kept).encode())
    return f"{damaged} damaged lines were removed" if damaged else None


def _tensorboard(folder: Path, first_step: int):
    # Keeps TensorFlow quiet, which TensorBoard imports where it is installed.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)


def _bar(total_steps: int | None, first_step: int):
    """A progress bar on the terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn("{task.fields[line]}")
    )
    bar.add_task("", total=total_steps, completed=first_step, line="")
    bar.start()
    return bar
