"""One call of a launcher, or of an op, by a backend on the GPU and in float64 on the CPU.

A call is described once, by operands in fp32 on the CPU and the kind of each. It then runs on that
backend, on the reference in the same dtype on the same device, and on the reference in float64.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepfast import backend
from deepfast.cases.case import Case, Computed, Stored, differentiate
from deepfast.depth.state import empty_slots
from deepfast.launches import LAUNCHES
from deepfast.dtypes import compute_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

__all__ = ["Computed", "Stored"]


class Slots(Stored):
    """(N, T, D) in the storage dtype, laid out as the engine does."""

    def make(self, storage, dtype, device):
        x = self.x.to(storage).to(dtype).to(device)
        return empty_slots(len(x), x[0]).copy_(x)


@dataclass
class Result:
    """An operand that the launch writes; NaN before it."""

    shape: tuple[int, ...]
    stored: bool = True
    slots: bool = False

    def make(self, _storage, dtype, device):
        kind = dtype if self.stored else compute_dtype(dtype)
        if self.slots:
            like = torch.empty(self.shape[1:], dtype=kind, device=device)
            return empty_slots(self.shape[0], like).fill_(torch.nan)
        return torch.full(self.shape, torch.nan, dtype=kind, device=device)


def call(op, name, by, arguments, storage, dtype, device) -> dict[str, Tensor]:
    """The tensors that launcher ``name`` of backend ``by`` writes, on the CPU."""
    _, launch = backend.choose(op, by, torch.device(device).type, dtype)
    made = {
        key: a.make(storage, dtype, device) if hasattr(a, "make")
        else a.to(device) if isinstance(a, Tensor) else a
        for key, a in arguments.items()
    }  # fmt: skip
    getattr(launch, name)(**made)
    written = (o.name for o in LAUNCHES[name].operands if o.writes)
    return {key: made[key].cpu() for key in written if isinstance(made[key], Tensor)}


def assert_alike(tolerances, by, op, name, arguments, dtype, device) -> None:
    """The launcher is as near to float64 as the table allows."""
    got, plain, exact = (
        call(op, name, server, arguments, dtype, kind, where)
        for server, kind, where in (
            (by, dtype, device),
            ("reference", dtype, device),
            ("reference", torch.float64, "cpu"),
        )
    )
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def on_the_cpu(function, inputs, by, storage, dtype, device) -> dict[str, Tensor]:
    """Results of ``function(**inputs, backend=by)`` and gradients, moved to the CPU."""
    leaves = Case(name="", op="", operands=inputs, run=function).leaves(storage, dtype, device)
    found = differentiate(partial(function, backend=by), leaves, storage)
    return {name: value.cpu() for name, value in found.items()}


def assert_op_alike(tolerances, by, op, function, inputs, dtype, device) -> None:
    """The op, forward and backward, is as near to float64 as the table allows."""
    with backend.record() as seen:
        got = on_the_cpu(function, inputs, by, dtype, dtype, device)
    assert set(seen) == {(op, by)}
    plain = on_the_cpu(function, inputs, "reference", dtype, dtype, device)
    exact = on_the_cpu(function, inputs, "reference", dtype, torch.float64, "cpu")
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def assert_repeatable(by, function, inputs, dtype, device, repeats=20) -> None:
    """Every run gives the same bits: no result depends on the order in which programs ran."""
    first = on_the_cpu(function, inputs, by, dtype, dtype, device)
    for _ in range(repeats):
        again = on_the_cpu(function, inputs, by, dtype, dtype, device)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name
