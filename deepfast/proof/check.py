"""Holds a call of an op to float64, and times it.

A case runs forward and backward, in a lower dtype by the backend and by the reference, and in
float64 by the reference, all on one device. `fault` compares them by the rule of
`deepfast.reference.accuracy`. Fresh memory is NaN while the backend runs, and two more runs must
give the same bits.
"""

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepfast import backend
from deepfast.dtypes import compute_dtype
from deepfast.reference import accuracy


@dataclass
class Stored:
    """An operand in the storage dtype."""

    x: Tensor
    apart: int = 0
    """Elements between the end of a row and the next one."""
    offset: int = 0
    """Elements before the first row."""

    def make(self, storage: torch.dtype, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Rounded to ``storage``, in ``dtype``; what lies between the rows is NaN."""
        *lead, dim = self.x.shape
        stride = dim + self.apart
        flat = torch.full(
            (self.offset + math.prod(lead) * stride,), torch.nan, dtype=dtype, device=device
        )
        made = flat[self.offset :].view(*lead, stride)[..., :dim]
        return made.copy_(self.x.to(storage))


@dataclass
class Computed:
    """A parameter or statistic, in fp32 (float64 beside float64)."""

    x: Tensor

    def make(self, _storage: torch.dtype, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.x.to(compute_dtype(dtype)).to(device, copy=True)


@dataclass
class Case:
    """A call of an op."""

    name: str
    inputs: dict[str, Stored | Computed]
    """The operands that get a gradient, by name."""
    function: Callable
    """Takes the operands and ``backend`` by name; returns a tensor or a tuple."""


def leaves(case: Case, storage: torch.dtype, dtype: torch.dtype, device) -> dict[str, Tensor]:
    return {
        name: given.make(storage, dtype, device).detach().requires_grad_()
        for name, given in case.inputs.items()
    }


def differentiate(
    case: Case, by: str, storage: torch.dtype, dtype: torch.dtype, device
) -> dict[str, Tensor]:
    """Results of the call by backend ``by``, the operands after it, and the operands' gradients of
    the results' sum under fixed weights. Operands are rounded to ``storage`` and computed in
    ``dtype``."""
    made = leaves(case, storage, dtype, device)
    outputs = case.function(**made, backend=by)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        torch.randn(o.shape, generator=generator).to(storage).to(o.dtype).to(device)
        for o in outputs
    ]  # fmt: skip
    grads = torch.autograd.grad(outputs, list(made.values()), cotangents)
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    # A kernel must not write to them.
    results |= {f"operand {n}": p.detach() for n, p in made.items()}
    return results | {f"d {n}": g for n, g in zip(made, grads, strict=True)}


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


def fault(case: Case, op: str, by: str, dtype: torch.dtype, device, runs: int = 3) -> str | None:
    """What is wrong with backend ``by`` in this case; None where nothing is."""
    with backend.record() as seen, poisoned():
        got = differentiate(case, by, dtype, dtype, device)
    if {name for of, name in seen if of == op} != {by}:
        return f"{case.name}: expected {by} to run, got {seen}"
    plain = differentiate(case, "reference", dtype, dtype, device)
    exact = differentiate(case, "reference", dtype, torch.float64, device)
    for name, value in got.items():
        found = accuracy.fault(value, plain[name], exact[name], dtype)
        if found is not None:
            return f"{case.name}: {name}: {found}"
    for _ in range(runs - 1):
        with poisoned():
            again = differentiate(case, by, dtype, dtype, device)
        for name, value in got.items():
            if not torch.equal(value, again[name]):
                return f"{case.name}: {name}: another run gave other bits"
    return None


def seconds(case: Case, names: list[str], dtype: torch.dtype, device, begin, rounds: int) -> dict:
    """Median seconds of a forward and backward pass by each backend; they take turns.

    begin: called with a backend's name before its first run.
    """
    device = torch.device(device)
    made = leaves(case, dtype, dtype, device)

    def run(by: str) -> None:
        outputs = case.function(**made, backend=by)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ones = [torch.ones_like(o) for o in outputs]
        torch.autograd.grad(outputs, list(made.values()), ones)

    def timed(by: str) -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            run(by)
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run(by)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    for by in names:
        begin(by)
        timed(by)
    times = [[timed(by) for by in names] for _ in range(rounds)]
    return dict(zip(names, map(statistics.median, zip(*times, strict=True)), strict=True))
