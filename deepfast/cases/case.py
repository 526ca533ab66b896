"""A call of an op: its operands, the same in plain PyTorch, and what it moves and multiplies."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference import dropout as reference

Device = torch.device | str


@dataclass
class Stored:
    """An operand in the storage dtype."""

    x: Tensor
    apart: int = 0
    """Elements between the end of a row and the next one."""
    offset: int = 0
    """Elements before the first row."""

    def make(self, storage: torch.dtype, dtype: torch.dtype, device: Device) -> Tensor:
        """Rounded to ``storage``, in ``dtype``; what lies between the rows is NaN."""
        *lead, dim = self.x.shape
        stride = dim + self.apart
        length = self.offset + math.prod(lead) * stride
        flat = torch.full((length,), torch.nan, dtype=dtype, device=device)
        made = flat[self.offset :].view(*lead, stride)[..., :dim]
        return made.copy_(self.x.to(storage))


@dataclass
class Computed:
    """A parameter or statistic, in fp32 (float64 with float64)."""

    x: Tensor

    def make(self, _storage: torch.dtype, dtype: torch.dtype, device: Device) -> Tensor:
        return self.x.to(compute_dtype(dtype)).to(device, copy=True)


class Rows(NamedTuple):
    """The shape (..., D) of a state, and how its rows lie in memory."""

    lead: tuple[int, ...]
    dim: int
    apart: int = 0
    offset: int = 0

    @property
    def tokens(self) -> int:
        """T: the number of rows."""
        return math.prod(self.lead)

    def random(self) -> Stored:
        return Stored(torch.randn(*self.lead, self.dim), self.apart, self.offset)


def gains(*shape: int) -> Computed:
    return Computed(1 + 0.3 * torch.randn(shape))


def values(*shape: int) -> Computed:
    return Computed(torch.randn(shape))


def linear(outputs: int, inputs: int) -> Stored:
    """A weight that keeps the size of what it is applied to."""
    return Stored(torch.randn(outputs, inputs) / inputs**0.5)


class Moved(NamedTuple):
    """The traffic that one direction of an op needs, reads and writes together."""

    values: int = 0
    """Elements in the storage dtype."""
    statistics: int = 0
    """Elements in fp32."""

    def nbytes(self, dtype: torch.dtype) -> int:
        return self.values * dtype.itemsize + 4 * self.statistics


def on_devices(*tensors: Tensor) -> Callable[[Device], tuple[Tensor, ...]]:
    """device -> the tensors there, copied once: a copy from the host in a call would be timed, and
    ends the capture of a CUDA graph."""
    return functools.cache(lambda device: tuple(x.to(device) for x in tensors))


Dropout = Callable[[Tensor, float, int], Tensor]
"""(x, p, seed) -> x with elements dropped, and the others scaled."""


def torch_dropout(x: Tensor, p: float, _seed: int) -> Tensor:
    """torch's own dropout, for times."""
    return F.dropout(x, p)


def masked(x: Tensor, p: float, seed: int) -> Tensor:
    """The mask that deepfast draws for the seed, for results."""
    flat = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return reference.dropout(flat, p, seed).view(x.shape)


@dataclass(frozen=True)
class Case:
    """A call of an op."""

    name: str
    op: str
    """The op of `deepfast.backend.OPS` whose kernels run."""
    operands: dict[str, Stored | Computed]
    """Those that get a gradient, by name."""
    run: Callable
    """Takes the operands and ``backend`` by name; returns a tensor or a tuple."""
    plain: Callable | None = None
    """The same numbers in torch's own ops, from a `Dropout` and the operands by name; None where
    there is no such form."""
    how: str = ""
    """The ops of ``plain``, for a reader."""
    moved: tuple[Moved, Moved] = (Moved(), Moved())
    """Forward and backward, at least."""
    flops: tuple[int, int] = (0, 0)
    """The FLOPs of matrix products, forward and backward, as torch counts them."""

    def leaves(
        self, storage: torch.dtype, dtype: torch.dtype, device: Device = "cpu"
    ) -> dict[str, Tensor]:
        """The operands, rounded to ``storage``, in ``dtype``, each a leaf that wants a gradient."""
        return {
            name: given.make(storage, dtype, device).detach().requires_grad_()
            for name, given in self.operands.items()
        }

    def of_one_dtype(self, dtype: torch.dtype, device: Device = "cpu") -> dict[str, Tensor]:
        """The operands for times: parameters too in ``dtype``, which torch's own ops are fastest
        with."""
        made = self.leaves(dtype, dtype, device)
        return {name: x.detach().to(dtype).requires_grad_() for name, x in made.items()}


def tuple_of(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def differentiate(
    form: Callable, leaves: dict[str, Tensor], storage: torch.dtype
) -> dict[str, Tensor]:
    """Results of ``form(**leaves)``, the operands after it, and the operands' gradients of the
    results' sum under fixed weights, which are rounded to ``storage``."""
    outputs = tuple_of(form(**leaves))
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(o.shape, generator=generator).to(storage).to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    # A kernel must not write to them.
    results |= {f"operand {name}": x.detach() for name, x in leaves.items()}
    return results | {f"d {name}": g for name, g in zip(leaves, grads, strict=True)}


@dataclass(frozen=True)
class Sizes:
    """Tokens, and numbers of channels: odd, a multiple of 16 bytes, and neither."""

    tokens: int
    odd: int
    even: int
    misfit: int
    many: int = 35
    """Sources, more than the 32 that some kernels take at once."""

    def rows(self, dim: int, apart: int = 0, offset: int = 0, tokens: int | None = None) -> Rows:
        return Rows((self.tokens if tokens is None else tokens,), dim, apart, offset)

    def four(self) -> Iterator[tuple[str, Rows]]:
        """The rows, with a name, that every op over rows is called with."""
        yield "odd width, rows apart", self.rows(self.odd, 3, 1)
        yield "aligned", self.rows(self.even)
        yield "rows off 16 bytes", self.rows(self.misfit, offset=1)
        yield "no token", self.rows(self.even, tokens=0)


class Typical(NamedTuple):
    """The name and the sizes of a typical call."""

    name: str
    rows: Rows
    """As many as are timed, or fewer."""
    gpu: bool
    few: bool
    """Whether the tokens are fewer than are timed."""


class Calls(NamedTuple):
    """The calls that the kernels of an op must pass: at odd sizes, and a typical one."""

    listed: Callable[[Sizes], Iterator[Case]]
    typical: Callable[[Typical], Case]
