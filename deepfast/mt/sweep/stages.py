"""The stages of a sweep: the plan, the pilots, and the runs with the values that these chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from deepfast.mt.sweep.grid import Pilots, Point
from deepfast.mt.sweep.plan import plan
from deepfast.mt.sweep.runs import Processes, Result, Run, compare

Results = dict[Point, list[Result]]


class Sweep:
    """The runs of every point.

    Args:
        chosen: all points; the first is the baseline.
        runs: the runs of a point, one for each seed.
        pilots: None: without them.
        trial: the run of a pilot.
        write: writes the results so far, and those of the pilots of every point.
        only: the points whose runs are made; None: all. Of the others the finished runs are known.
    """

    def __init__(
        self,
        chosen: Sequence[Point],
        runs: Callable[[Point], list[Run]],
        pilots: Pilots | None,
        trial: Callable[[Point], Run],
        write: Callable[[Results, dict[Point, Results]], None],
        only: Sequence[Point] | None = None,
    ):
        self.chosen, self.pilots, self._runs, self._write = chosen, pilots, runs, write
        self._only = chosen if only is None else only
        self.trials: dict[Point, dict[Point, Run]] = {
            point: {pilot: trial(pilot) for pilot in pilots.of(point)} if pilots else {}
            for point in chosen
        }
        """The pilots of every point."""
        # Refuses what cannot run, before anything does.
        self._first = {point: runs(point)[0] for point in chosen}

    def runs(self, point: Point, tried: Mapping[Point, Sequence[Result]]) -> list[Run]:
        """The runs of a point with the value that its pilots chose, or the first value where none
        of them has a dev NLL."""
        if self.pilots is None or not any(tried.values()):
            return self._runs(point)
        best = self.pilots.best(tried)
        if best is None:
            best = next(iter(tried))
            print(f"{point.name}: no pilot has a dev NLL, its runs are as {best.name}", flush=True)
        return self._runs(point.choosing(best))

    def left(self, point: Point) -> list[Run]:
        """The runs of a point that have no result, its pilots first."""
        tried = {pilot: run.result() for pilot, run in self.trials[point].items()}
        waiting = [self.trials[point][pilot] for pilot, found in tried.items() if found is None]
        if waiting:
            # The settings of the others are not known yet.
            return [*waiting, *self._runs(point)]
        known = {pilot: [found] for pilot, found in tried.items() if found is not None}
        return [run for run in self.runs(point, known) if run.result() is None]

    def plan(self, processes: Processes, folder: Path) -> str | None:
        """See `deepfast.mt.sweep.plan.plan`."""
        left = {point: self.left(point) for point in self._only}
        return plan(left, self._first, processes, folder)

    def make(self, processes: Processes) -> bool:
        """Makes the pilots and then the runs; returns whether none of them failed. A point with a
        pilot that failed starts no run: the pilot may still win."""
        lines = {
            pilot: self._wanted(point, [run])
            for point, own in self.trials.items()
            for pilot, run in own.items()
        }
        found = compare(lines, processes)
        tried = {
            point: {pilot: list(found[pilot].values()) for pilot in own}
            for point, own in self.trials.items()
        }

        def write(results: Mapping[Point, Mapping[Run, Result]]) -> None:
            self._write({p: list(own.values()) for p, own in results.items() if own}, tried)

        failed = {point for point in self.chosen if _failed(tried[point].values())}
        runs = {
            point: self._wanted(point, self.runs(point, tried[point]), point in failed)
            for point in self.chosen
        }
        results = compare(runs, processes, write)
        return not _failed(own.values() for own in (*found.values(), *results.values()))

    def _wanted(self, point: Point, runs: list[Run], finished: bool = False) -> list[Run]:
        """The runs to make or to show. ``finished``: none is to be made."""
        make = point in self._only and not finished
        return [run for run in runs if make or run.result() is not None]


def _failed(lines: Iterable[Iterable[Result]]) -> bool:
    return any("failed" in run for runs in lines for run in runs)
