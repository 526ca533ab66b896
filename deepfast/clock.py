"""Two clocks, one for a CPU and one for a GPU. Variants take turns, so that what else a machine
does strikes all of them alike."""

import time
from collections.abc import Callable, Mapping

import torch

Clock = Callable[[Callable[[], object]], float]
"""Seconds of one run."""


def on_cpu(run: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run, until it returns."""
    start = now()
    run()
    return now() - start


def on_gpu(run: Callable[[], object]) -> float:
    """Seconds of one run on the current stream, between two events. What the run returns stays
    alive until the GPU has finished."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    kept = run()
    last.record()
    last.synchronize()
    del kept
    return first.elapsed_time(last) / 1e3


def clock_of(device: torch.device | str) -> Clock:
    """The clock for work on ``device``."""
    return on_gpu if torch.device(device).type == "cuda" else on_cpu


def captured(
    run: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> Callable[[], None]:
    """The replay of a CUDA graph of a run, which leaves out what Python costs. The run has run
    before, so that its kernels are compiled.

    Raises:
        Exception: what the capture raises.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()
    del kept
    return graph.replay


def take_turns(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Clock = on_cpu,
) -> dict[str, list[float]]:
    """Seconds of every variant in each round, after ``warmup`` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        for name, run in variants.items():
            elapsed = clock(run)
            if number >= warmup:
                seconds[name].append(elapsed)
    return seconds
