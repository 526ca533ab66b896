"""Times ops against plain PyTorch, in turns, forward without autograd and with backward:
`deepfast bench`."""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from deepfast import backend
from deepfast.cases import ops, sentences
from deepfast.cases.case import Case, Computed, Moved, Rows, torch_dropout, tuple_of
from deepfast.clock import clock_of
from deepfast.depth.schedule import depth_pattern
from deepfast.measure.clock import COPY, copy_variant, interleave, ratio
from deepfast.measure.forms import ATTENTION_FORMS, FORMS, Deepfast
from deepfast.measure.traffic import engine_moved
from deepfast.nn import DLCL, AttentionResiduals

PASSES = ("forward", "forward and backward")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all cases."""

    tokens: int = 1024
    """T."""
    dim: int = 512
    """D."""
    sources: int = 24
    """Layers that `depth_mix` and the like read."""
    layers: int = 12
    """Layers of the stacks whose connection is timed."""
    vocabulary: int = 8192
    """Words of the loss."""
    dropout: float = 0.1
    """Where an op has dropout."""
    dtype: torch.dtype = torch.float32
    """The dtype of all operands."""
    device: str = "cpu"
    """The device of all operands."""

    @property
    def rows(self) -> Rows:
        return Rows((self.tokens,), self.dim)


def _sentences(s: Sizes) -> list[int]:
    """Lengths of a half to one and a half of their mean, 80 words."""
    count = max(1, s.tokens // 80)
    lengths = torch.linspace(s.tokens / count / 2, s.tokens / count * 3 / 2, count).int().tolist()
    return [*lengths[:-1], s.tokens - sum(lengths[:-1])]


@torch.library.custom_op("deepfast_bench::layer", mutates_args=())
def _layer(x: torch.Tensor) -> torch.Tensor:
    """A layer that copies its input. A compiler cannot look inside, and so cannot fuse what stands
    between two layers with what stands between the next two: with real layers it could not."""
    return x.clone()


_layer.register_fake(torch.empty_like)
_layer.register_autograd(lambda ctx, grad: _layer(grad))


def _stack(connect: Callable, rows: int, y: torch.Tensor) -> torch.Tensor:
    """The connection of a whole stack; its layers only copy."""
    y = connect(y)
    for _ in range(rows - 1):
        y = connect(_layer(y))
    return y


class _Stack(torch.nn.Module):
    def __init__(self, connection: DLCL | AttentionResiduals):
        super().__init__()
        self.connection = connection

    def forward(self, y):
        return _stack(Deepfast(self.connection), self.connection.rows, y)


class _StandIn:
    """A record with the names of a module, for forms under a compiler, which cannot trace
    functional_call."""

    def __init__(self, values: dict):
        for name, value in values.items():
            setattr(self, name, value)


def connection(
    s: Sizes, module: DLCL | AttentionResiduals, forms: dict[str, Callable], plain: str
) -> Case:
    """The connection of a whole stack whose layers only copy, against another form of it."""
    # Equal weights, as at the start, would hide a mix-up of layers.
    given = {
        name: Computed(p.detach() + 0.1 * torch.randn_like(p))
        for name, p in module.named_parameters()
    }

    def run(y, **parameters):
        stack = _Stack(module.to(y.device))
        named = {f"connection.{name}": p for name, p in parameters.items()}
        return functional_call(stack, named, (y,))

    settings = {name: value for name, value in vars(module).items() if name[0] != "_"}

    def run_plain(_, y, **parameters):
        return _stack(forms[plain](_StandIn(settings | parameters)), module.rows, y)

    op = "boundary" if isinstance(module, DLCL) else "attention_boundary"
    # Of both directions together.
    pattern, kind = depth_pattern(s.layers + 1, None, 1, 1), torch.device(s.device).type
    moved = engine_moved(pattern, device_type=kind) * s.tokens * s.dim
    return Case(
        name="connection", op=op, operands={"y": s.rows.random()} | given,
        run=run, plain=run_plain,
        how=f"{s.layers} layers: a {plain}", moved=(Moved(), Moved(moved)),
    )  # fmt: skip


CASES: dict[str, Callable[[Sizes], Case]] = {
    "layer_norm": lambda s: ops.layer_norm("", s.rows, residual=False),
    "rms_norm": lambda s: ops.rms_norm("", s.rows, residual=False),
    "add_layer_norm": lambda s: ops.layer_norm("", s.rows, p=s.dropout),
    "add_rms_norm": lambda s: ops.rms_norm("", s.rows, p=s.dropout),
    "activation": lambda s: ops.activation("", Rows((s.tokens,), 4 * s.dim), p=s.dropout),
    "norm_linear": lambda s: ops.norm_linear("", s.rows, 3 * s.dim, residual=False),
    "add_norm_linear": lambda s: ops.norm_linear("", s.rows, 3 * s.dim, p=s.dropout),
    "feed_forward": lambda s: ops.feed_forward(
        "", s.rows, 4 * s.dim, "relu", p=s.dropout, residual=False
    ),
    "attention": lambda s: sentences.attention(
        "", _sentences(s), None, sentences.Heads(max(1, s.dim // 64), s.dim // max(1, s.dim // 64))
    ),
    "depth_mix": lambda s: ops.depth_mix("", s.rows, s.sources),
    "depth_attention": lambda s: ops.depth_attention(
        "", s.rows, s.sources, None, gain=False, lse=False
    ),
    "attention_residual": lambda s: ops.attention_residual("", s.rows, s.sources),
    "linear_cross_entropy": lambda s: sentences.linear_cross_entropy("", s.rows, s.vocabulary),
    "peephole_lstm": lambda s: sentences.peephole_lstm(
        "", min(32, s.tokens), max(1, s.tokens // min(32, s.tokens)), s.dim // 2
    ),
    "DLCL": lambda s: connection(s, DLCL(s.layers, s.dim), FORMS, "loop of adds"),
    "AttentionResiduals": lambda s: connection(
        s, AttentionResiduals(s.layers, s.dim), ATTENTION_FORMS, "list"
    ),
}
"""The public ops at sizes of a model, and the connections of a whole stack whose layers only copy.
"""


def measure(op: str, sizes: Sizes, rounds: int, compiled: bool = False) -> Iterator[dict]:
    """The rows of an op, see `measure_case`."""
    torch.manual_seed(1)
    case = CASES[op](sizes)
    return measure_case(
        op, case, sizes, rounds, {"compiled": under_compiler(case)} if compiled else {}
    )


def under_compiler(case: Case, **options) -> Callable:
    """torch's form of a case under `torch.compile`, compiled by its first call."""
    # torch's cache does not know ATEN_CPU_CAPABILITY and returns code for other vectors.
    config: Any = importlib.import_module("torch._inductor.config")
    config.force_disable_caches = True
    torch.compiler.reset()
    form = partial(case.plain, torch_dropout)
    return torch.compile(form, fullgraph=True, dynamic=False, **options)


def measure_case(
    name: str, case: Case, sizes: Sizes, rounds: int, others: Mapping[str, Callable]
) -> Iterator[dict]:
    """A row for each of `PASSES`, in which deepfast, torch's form and ``others`` take turns.

    Seconds are medians; ``ratio`` is the time of the fastest other form over deepfast's, the median
    of the rounds' ratios. ``fraction_of_copy`` is the time of a plain copy of as many bytes over
    deepfast's; None where matrix products take the time. ``compile_seconds`` has what the first
    calls of ``others`` took; None if there are none.
    """
    leaves = case.of_one_dtype(sizes.dtype, sizes.device)
    forms: dict[str, Callable] = {"deepfast": case.run, **others}
    forms["torch"] = partial(case.plain, torch_dropout)

    def run(form: Callable, backward: bool, cotangents: list):
        # Without autograd, `linear_cross_entropy` computes no gradient in forward.
        with torch.set_grad_enabled(backward):
            found = tuple_of(form(**leaves))
        if not backward:
            return found
        outputs = [x for x in found if x.grad_fn is not None]
        if not cotangents:
            cotangents += map(torch.ones_like, outputs)
        return torch.autograd.grad(outputs, list(leaves.values()), cotangents)

    for number, what in enumerate(PASSES):
        runs = {form: partial(run, call, number == 1, []) for form, call in forms.items()}
        with backend.record() as ran:
            runs["deepfast"]()
        begin = time.perf_counter()
        for form in others:
            runs[form]()
        seconds = time.perf_counter() - begin
        timed = partial(interleave, repeats=rounds, clock=clock_of(sizes.device))
        found, fraction = timed(runs), None
        nbytes = sum(moved.nbytes(sizes.dtype) for moved in case.moved[: number + 1])
        best = min((found[form] for form in forms if form != "deepfast"), key=lambda r: r.median)
        if nbytes:
            # Not in turns with the forms: the first one after it would find other caches.
            found |= timed({COPY: copy_variant(nbytes // 2, sizes.device)[0]})
            fraction = found[COPY].median / found["deepfast"].median
        yield {
            "op": name,
            "pass": what,
            "torch_form": case.how,
            "backend": "+".join(sorted({by for _, by in ran})),
            "seconds": {form: row.median for form, row in found.items()},
            "ratio": ratio(best, found["deepfast"]),
            "compile_seconds": seconds if others else None,
            "moved_bytes": nbytes or None,
            "fraction_of_copy": fraction,
        }
