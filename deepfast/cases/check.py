"""Compares a call of an op with float64, and times it.

A case runs forward and backward, in a lower dtype by the backend and by the reference, and in
float64 by the reference, all on one device. `fault` compares them by the rule of
`deepfast.reference.accuracy`. Fresh memory is NaN while the backend runs, and two more runs must
give the same bits.
"""

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepfast import backend
from deepfast.cases.case import Case, Device, differentiate, tuple_of
from deepfast.clock import captured, clock_of, take_turns
from deepfast.reference import accuracy


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, so that a result that is never written is found."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    # torch fills memory in its deterministic mode alone.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        settings.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1], warn_only=warn_only)


def fault(case: Case, by: str, dtype: torch.dtype, device: Device, runs: int = 3) -> str | None:
    """The error of backend ``by`` in this case; None where it has none."""

    def by_reference(kind: torch.dtype) -> dict:
        form = partial(case.run, backend="reference")
        return differentiate(form, case.leaves(dtype, kind, device), dtype)

    def by_backend() -> dict:
        with poisoned():
            form = partial(case.run, backend=by)
            return differentiate(form, case.leaves(dtype, dtype, device), dtype)

    with backend.record() as seen:
        got = by_backend()
    if {name for of, name in seen if of == case.op} != {by}:
        return f"{case.name}: expected {by} to run, got {seen}"
    # A result in float64 has the bound of fp32, in float64's units.
    plain = by_reference(accuracy.plain_dtype(dtype))
    exact = by_reference(torch.float64)
    if error := accuracy.first_fault(got, plain, exact, dtype):
        return f"{case.name}: {error}"
    for _ in range(runs - 1):
        again = by_backend()
        for name, value in got.items():
            if not torch.equal(value, again[name]):
                return f"{case.name}: {name}: another run gave other bits"
    return None


MOST_SETS = 16
"""Sets of operands of one timed run."""


Begin = Callable[[str], None]
"""Is called with a backend's name, or that of another variant, before its first run."""


def seconds(
    case: Case, names: list[str], dtype: torch.dtype, device: Device, begin: Begin, rounds: int
) -> dict[str, float]:
    """Median seconds of a forward and backward pass by each backend; they take turns.

    On a GPU a run is a CUDA graph of passes over several sets of operands, which do not fit L2
    together: neither Python nor the cache decides.
    """
    made = [case.leaves(dtype, dtype, device)]
    if torch.device(device).type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        held = sum(x.numel() * x.element_size() for x in made[0].values())
        count = min(MOST_SETS, 1 + 4 * cache // max(1, held))
        made += [case.leaves(dtype, dtype, device) for _ in range(count - 1)]

    def run(by: str) -> list:
        grads = []
        for leaves in made:
            outputs = tuple_of(case.run(**leaves, backend=by))
            ones = list(map(torch.ones_like, outputs))
            grads.append(torch.autograd.grad(outputs, list(leaves.values()), ones))
        return grads

    times = in_turns({by: partial(run, by) for by in names}, device, begin, rounds)
    return {by: each / len(made) for by, each in times.items()}


def in_turns(
    variants: dict[str, Callable[[], object]], device: Device, begin: Begin, rounds: int
) -> dict[str, float]:
    """Median seconds of variants that take turns, on a GPU of the CUDA graph of each; where one
    cannot be captured, all run eager."""
    on_gpu = torch.device(device).type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None
    if stream is not None:
        # It made the operands.
        stream.wait_stream(torch.cuda.current_stream(device))
    # Backward runs on the stream of its forward, and the default stream cannot be captured.
    with torch.cuda.stream(stream):
        for name, run in variants.items():
            begin(name)
            run()
        if stream is not None:
            try:
                variants = {name: captured(run, stream) for name, run in variants.items()}
            except RuntimeError:
                torch.cuda.synchronize()
        times = take_turns(variants, rounds=rounds, warmup=int(on_gpu), clock=clock_of(device))
    return {name: statistics.median(each) for name, each in times.items()}
