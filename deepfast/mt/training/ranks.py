"""The ranks of a run under torchrun: how they meet, what they tell each other, and who failed.

A process alone is one rank of one, and none of its calls waits for anything.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.errors import NotFiniteError, OtherRankError, TrainingError

Value = TypeVar("Value")

BEAT_EVERY, SILENT_AFTER = 0.5, 4.0
"""Seconds between two signs of life, and seconds after which a rank counts as silent."""
MEET_WITHIN = timedelta(minutes=5)
"""How long a rank waits for the others at the start."""
LONG = timedelta(hours=1)
"""How long ranks wait for each other while checkpoints are written and text is translated. A rank
that ends is noticed at once."""
RUNS = itertools.count()
"""Numbers of the runs of this process."""


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often torchrun has started the ranks again; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if launched() else 0


class Ranks:
    """This process among those of the run."""

    def __init__(
        self, rank: int = 0, size: int = 1, store: dist.Store | None = None, timeout: float = 45.0
    ):
        self.rank, self.size, self.store, self.timeout = rank, size, store, timeout
        self.alone = store is None
        """Whether torchrun did not start this process."""
        self.signal: StopSignal | None = None
        """Notes signals from the start of the run to its end; None for a process alone."""
        self.slow: Any = None
        """The process group for calls that may take long."""
        self.saved: Path | None = None
        """The run's newest checkpoint."""
        self._asked = 0
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="signs of life", daemon=True)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int = 0) -> None:
        """Gives each of several ranks random numbers of its own, from the run's seed and a step."""
        if self.size > 1:
            # A string seeds by SHA-512, the same in every process and Python version.
            numbers = random.Random(f"deepfast rank {seed} {step} {self.rank} {self.size}")
            torch.manual_seed(numbers.getrandbits(63))
            random.seed(numbers.getrandbits(63))

    def rows(self, *values: float) -> list[list[float]]:
        """The numbers that every rank gives, in order of the ranks."""
        if self.alone:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def objects(self, mine: Value) -> list[Value]:
        """The object that every rank gives, in order of the ranks; waits long."""
        if self.alone:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.slow)
        return found

    def by_first(self, work: Callable[[], Value]) -> Value:
        """What ``work`` returns on the first rank, for all ranks. The others wait as long as the
        first one gives signs of life, because a vocabulary or a checkpoint may take long.

        Raises:
            OtherRankError: another rank has failed in the meantime.
            DistNetworkError: the first rank has given no sign of life for the timeout.
        """
        if self.alone:
            return work()
        key, self._asked = f"first/{self._asked}", self._asked + 1
        if self.first:
            result = work()
            # The type of torch's stub leaves bytes out, which a store takes and gives back.
            self.store.set(key, pickle.dumps(result))  # type: ignore[arg-type]
            return result
        beats, silent, pause = -1, 0.0, 0.01
        # Not `store.wait`, which prints two warnings at each timeout.
        while not self.store.check([key]):
            if self.store.check(["failure"]):
                raise OtherRankError(self.store.get("failure").decode())
            # torchrun ends the ranks that are left with the signal that a scheduler sends, too.
            if self.signal.name and self._silent():
                raise dist.DistNetworkError("a rank does not answer")
            before, beats = beats, self._beats(0)
            # Not by the clock: a machine or a job that is suspended stops all ranks together.
            silent = silent + pause if beats == before else 0.0
            if silent > max(self.timeout, SILENT_AFTER):
                raise dist.DistNetworkError("the first rank gives no sign of life")
            pause = min(1.5 * pause, BEAT_EVERY)
            time.sleep(pause)
        result = pickle.loads(self.store.get(key))
        # The last rank that reads removes what was said.
        if self.store.add(f"{key}/read", 1) == self.size - 1:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")
        return result

    def blame(self, error: BaseException) -> BaseException:
        """The error with which this rank ends.

        The first rank that fails says why, and by whom. All others end with an `OtherRankError`,
        which is not printed.
        """
        if isinstance(error, OtherRankError):
            return error
        text = f"rank {self.rank}: {_sentence(error)}"
        last = f"; last checkpoint: {self.saved}" if self.saved else ""
        try:
            if _connection_lost(error) and (silent := self._silent()):
                text = (
                    f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}: no "
                    "answer, killed or stopped from outside (the machine's log says whether it ran "
                    "out of memory)"
                )
            if self.store.add("failures", 1) > 1:
                return OtherRankError(text)
            self.store.set("failure", text + last)
        except dist.DistError:
            # The store went down with torchrun: there is nobody to agree with.
            if _connection_lost(error):
                text = f"rank {self.rank}: torchrun does not answer, killed from outside"
        return TrainingError(text + last)

    def start(self) -> None:
        """Gives signs of life from now on, also while this rank computes or waits for others."""
        self._beating.start()

    def _beat(self) -> None:
        with contextlib.suppress(dist.DistError):
            while not self._left.wait(BEAT_EVERY):
                self.store.add(f"beats/{self.rank}", 1)

    def _beats(self, rank: int) -> int:
        return self.store.add(f"beats/{rank}", 0)

    def _silent(self) -> list[int]:
        """The ranks that have not left and give no sign of life; none if a failed rank has
        reported its error itself."""
        before = {r: self._beats(r) for r in range(self.size) if r != self.rank}
        deadline = time.monotonic() + SILENT_AFTER
        while not self.store.check(["failure"]):
            still = [r for r, beats in before.items() if self._beats(r) == beats]
            silent = [r for r in still if not self.store.check([f"left/{r}"])]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.1)
        return []

    def leave(self) -> None:
        """Ends the signs of life. A thread that is left inside the store at exit aborts Python."""
        self._left.set()
        self._beating.join(SILENT_AFTER)
        with contextlib.suppress(dist.DistError):
            self.store.set(f"left/{self.rank}", "")


@contextlib.contextmanager
def run_ranks(device: torch.device, timeout: float) -> Iterator[Ranks]:
    """The ranks that torchrun started, connected; one rank without torchrun.

    Args:
        device: of this rank. Small numbers always travel through the CPU.
        timeout: seconds after which a rank that does not come to a common call has failed, and a
            first rank without a sign of life.

    Raises:
        OtherRankError: another rank has failed, and has said so.
        TrainingError: this rank fails, or has found which one did.
    """
    if not launched():
        ranks = Ranks()
        try:
            yield ranks
        except NotFiniteError as error:
            last = ranks.saved or "none"
            raise NotFiniteError(f"{error}; last checkpoint: {last}") from error
        return
    limit = timedelta(seconds=timeout)
    store, rank, size = next(dist.rendezvous("env://", timeout=MEET_WITHIN))
    # A process may train several recipes, one after the other. torchrun keeps the store when it
    # starts the ranks again.
    store = dist.PrefixStore(f"deepfast/{restarts()}/{size}/{next(RUNS)}", store)
    ranks = Ranks(rank, size, store, timeout)
    ranks.start()
    with StopSignal(stays=True) as ranks.signal:
        try:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=limit,
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
            ranks.slow = dist.new_group(backend="gloo", timeout=LONG)
            yield ranks
            dist.destroy_process_group()
        except Exception as error:
            blamed = ranks.blame(error)
            # Closes the connections, so that the others notice at once. NCCL would wait for them.
            if dist.is_initialized() and device.type == "cpu":
                dist.destroy_process_group()
            raise blamed from error
        finally:
            ranks.leave()


def _connection_lost(error: BaseException) -> bool:
    """Whether a common call failed, which is another rank's fault."""
    return isinstance(error, dist.DistError) or any(
        name in str(error) for name in ("gloo", "NCCL", "Connection closed by peer")
    )


def _sentence(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if exhausted or "can't allocate memory" in lines[0]:
        return f"out of memory ({lines[0]})"
    ours = (ValueError, OSError, TrainingError)
    return lines[0] if isinstance(error, ours) else f"{type(error).__name__}: {lines[0]}"
