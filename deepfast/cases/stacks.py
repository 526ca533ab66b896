"""Makes calls of the depth connections: stacks whose layers do next to nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from deepfast.cases.case import Calls, Case, Computed, Rows, Sizes, gains, values
from deepfast.depth.history import DepthHistory
from deepfast.nn import DLCL, AttentionResiduals, LayerNorm, RMSNorm


class _Stack(torch.nn.Module):
    """Boundaries whose layers add a given tensor to 1/64 of their input, so that the error of one
    boundary is not hidden by the errors of those before it."""

    def __init__(self, connection: torch.nn.Module, dim: int, full: bool, rms: bool):
        super().__init__()
        self.connection, self.full = connection, full
        self.norm = (RMSNorm if rms else LayerNorm)(dim) if full else None

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        history, x, residual = DepthHistory(), None, None
        results = []
        for k, y in enumerate(given):
            branch = y if x is None else y + x / 64
            if self.full:
                options = {"dropout_p": 0.3, "seed": k, "out_norm": self.norm.as_output()}
                residual, x = self.connection(branch, history, residual=residual, **options)
            else:
                x = self.connection(branch, history)
            results.append(x)
        return tuple(results)


def _case(name: str, rows: Rows, kind, full: bool, depth: int, options: dict, given: dict) -> Case:
    """A call of a connection with the parameters ``given``."""
    rms, dim = options.get("norm_type") == "rms", rows.dim
    operands: dict = {f"y{k}": rows.random() for k in range(depth + 1)}
    operands |= {f"connection__{n}": p for n, p in given.items()}
    if full:
        operands["norm__weight"] = gains(dim)
        if not rms:
            operands["norm__bias"] = values(dim)

    def run(*, backend=None, **given: Tensor):
        states = [given.pop(f"y{k}") for k in range(depth + 1)]
        # Without parameters of its own: a copy from the host would end the capture of a CUDA graph.
        with torch.device("meta"):
            stack = _Stack(kind(depth, dim, backend=backend, **options), dim, full, rms)
        parameters = {name.replace("__", "."): p for name, p in given.items()}
        # Strict, because a parameter that is no operand would get no gradient to compare.
        return functional_call(stack, parameters, tuple(states), strict=True)

    return Case(name, kind.pass_kind.op, operands, run)


def boundary(name: str, rows: Rows, *, depth: int = 6, full: bool = False, **options) -> Case:
    """A DLCL of ``depth`` layers; ``full`` with residual, dropout and the next layer's norm."""
    count, dim = depth + 1, rows.dim
    channels = (dim,) if options.get("weight_type") == "vector" else ()
    given = {"weight": Computed(torch.randn(count, count, *channels) / count**0.5)}
    if options.get("norm", "pre") is not None:
        given["norm_weight"] = gains(count, dim)
        if options.get("norm_type") != "rms":
            given["norm_bias"] = values(count, dim)
    return _case(name, rows, DLCL, full, depth, options, given)


def attention_boundary(
    name: str, rows: Rows, *, depth: int = 6, full: bool = False, **options
) -> Case:
    """The same with attention residuals."""
    count = depth + 1
    given = {"query": Computed(torch.randn(count, rows.dim) / rows.dim**0.5)}
    if options.get("score_function") == "relu":
        given["bias"] = values(count, count)
    return _case(name, rows, AttentionResiduals, full, depth, options, given)


def boundary_calls(s: Sizes) -> Iterator[Case]:
    full = {"full": True}
    yield boundary("odd width, residual, dropout, next norm", s.rows(s.odd), **full)
    yield boundary("aligned, residual, dropout, next norm", s.rows(s.even), **full)
    yield boundary("odd width, RMS norms", s.rows(s.odd), norm_type="rms", **full)
    yield boundary("post-norm", s.rows(s.misfit), norm="post")
    few = s.rows(s.odd, tokens=7)
    yield boundary("weight per channel, no norm", few, weight_type="vector", norm=None)
    yield boundary("window", s.rows(s.even, tokens=7), window=3)
    yield boundary("many sources", s.rows(s.misfit, tokens=7), depth=s.many)
    yield boundary("no token", s.rows(s.even, tokens=0), **full)


def attention_boundary_calls(s: Sizes) -> Iterator[Case]:
    make, full = attention_boundary, {"full": True}
    yield make("odd width, residual, dropout, next norm", s.rows(s.odd), **full)
    yield make("aligned, residual, dropout, next norm", s.rows(s.even), **full)
    yield make("relu", s.rows(s.misfit), score_function="relu")
    yield make("blocks", s.rows(s.even, tokens=7), block=2)
    yield make("window", s.rows(s.odd, tokens=7), window=3)
    yield make("many sources", s.rows(s.misfit, tokens=7), depth=s.many)
    yield make("no token", s.rows(s.even, tokens=0), **full)


KERNELS = {
    "boundary": Calls(boundary_calls, lambda t: boundary(t.name, t.rows, depth=8, full=True)),
    "attention_boundary": Calls(
        attention_boundary_calls, lambda t: attention_boundary(t.name, t.rows, depth=8, full=True)
    ),
}
