"""One call of a launcher, or of an op, by a backend on the GPU and in float64 on the CPU.

A call is described once, by operands in fp32 on the CPU and the kind of each. It then runs on that
backend, on the reference in the same dtype on the same device, and on the reference in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast import backend
from deepfast.depth.state import empty_slots
from deepfast.launches import LAUNCHES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _compute(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Stored:
    """An operand in the storage dtype."""

    x: Tensor
    apart: int = 0
    """Elements between the end of a row and the next one."""
    slots: bool = False
    """(N, T, D), laid out as the engine does."""

    def make(self, storage, dtype, device):
        x = self.x.to(storage).to(dtype).to(device)
        if self.slots:
            return empty_slots(len(x), x[0]).copy_(x)
        if self.apart:
            wide = x.new_empty(*x.shape[:-1], x.shape[-1] + self.apart)
            return wide[..., : x.shape[-1]].copy_(x)
        return x


@dataclass
class Computed:
    """A parameter or statistic, in fp32 (float64 beside float64)."""

    x: Tensor

    def make(self, _storage, dtype, device):
        return self.x.to(_compute(dtype)).to(device, copy=True)


@dataclass
class Result:
    """An operand that the launch writes; NaN before it."""

    shape: tuple[int, ...]
    stored: bool = True
    slots: bool = False

    def make(self, _storage, dtype, device):
        kind = dtype if self.stored else _compute(dtype)
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


def differentiate(function, inputs, by, storage, dtype, device) -> dict[str, Tensor]:
    """Results of ``function(*inputs, backend=by)`` and gradients of their sum under fixed weights.

    inputs: by name, `Stored` and `Computed`.
    """
    made = {
        name: a.make(storage, dtype, device).detach().requires_grad_()
        for name, a in inputs.items()
    }  # fmt: skip
    outputs = function(**made, backend=by)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        torch.randn(o.shape, generator=generator).to(storage).to(o.dtype).to(device)
        for o in outputs
    ]  # fmt: skip
    grads = torch.autograd.grad(outputs, list(made.values()), cotangents)
    results = {f"output {i}": o.detach().cpu() for i, o in enumerate(outputs)}
    return results | {f"d {n}": g.cpu() for n, g in zip(made, grads, strict=True)}


def assert_op_alike(tolerances, by, op, function, inputs, dtype, device) -> None:
    """The op, forward and backward, is as near to float64 as the table allows."""
    with backend.record() as seen:
        got = differentiate(function, inputs, by, dtype, dtype, device)
    assert set(seen) == {(op, by)}
    plain = differentiate(function, inputs, "reference", dtype, dtype, device)
    exact = differentiate(function, inputs, "reference", dtype, torch.float64, "cpu")
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def assert_repeatable(by, function, inputs, dtype, device, repeats=20) -> None:
    """Every run gives the same bits: no result depends on the order in which programs ran."""
    first = differentiate(function, inputs, by, dtype, dtype, device)
    for _ in range(repeats):
        again = differentiate(function, inputs, by, dtype, dtype, device)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name
