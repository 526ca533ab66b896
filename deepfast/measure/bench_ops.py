"""Times ops against plain PyTorch, in turns, forward without autograd and with backward:
`deepfast bench`."""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepfast import backend
from deepfast.cases import ops, sentences
from deepfast.cases.case import Case, Rows, torch_dropout, tuple_of
from deepfast.clock import clock_of, take_turns
from deepfast.measure.forms import COMPILED
from deepfast.measure.turns import COPY, copy_variant, ratios

PASSES = ("forward", "forward and backward")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all cases."""

    tokens: int = 1024
    """T."""
    dim: int = 512
    """D."""
    sources: int = 24
    """States that `depth_mix` and the like read."""
    vocabulary: int = 8192
    """Words of the loss."""
    dropout: float = 0.0
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
}
"""The public ops at sizes of a model."""


def measure(op: str, sizes: Sizes, rounds: int, compiled: bool = False) -> Iterator[dict]:
    """A row for each of `PASSES`, in which deepfast, torch's form and, if asked for, torch's form
    under `torch.compile` take turns.

    Seconds are medians; ``ratios`` has for each round the time of the fastest other form over
    deepfast's, and ``ratio`` is their median. ``fraction_of_copy`` is the time of a plain copy of
    as many bytes over deepfast's; None where matrix products take the time. ``compile_seconds`` is
    what the first call of the compiled form took; None without it.
    """
    torch.manual_seed(1)
    case = CASES[op](sizes)
    leaves = case.of_one_dtype(sizes.dtype, sizes.device)
    forms: dict[str, Callable] = {"deepfast": case.run}
    if compiled:
        forms[COMPILED] = under_compiler(case)
    forms["torch"] = partial(case.plain, torch_dropout)

    timed = partial(take_turns, rounds=rounds, clock=clock_of(sizes.device))
    for number, what in enumerate(PASSES):
        runs = {form: pass_of(call, leaves, number == 1) for form, call in forms.items()}
        with backend.record() as ran:
            runs["deepfast"]()
        begin = time.perf_counter()
        if compiled:
            runs[COMPILED]()
        seconds = time.perf_counter() - begin
        found = timed(runs)
        nbytes = sum(moved.nbytes(sizes.dtype) for moved in case.moved[: number + 1])
        best = min((found[form] for form in forms if form != "deepfast"), key=statistics.median)
        each = ratios(best, found["deepfast"])
        if nbytes:
            # Not in turns with the forms: the first one after it would find other caches.
            found |= timed({COPY: copy_variant(nbytes // 2, sizes.device)[0]})
        medians = {form: statistics.median(times) for form, times in found.items()}
        yield {
            "op": op,
            "pass": what,
            "torch_form": case.how,
            "backend": "+".join(sorted({by for _, by in ran})),
            "seconds": medians,
            "ratios": each,
            "ratio": statistics.median(each),
            "compile_seconds": seconds if compiled else None,
            "moved_bytes": nbytes or None,
            "fraction_of_copy": medians[COPY] / medians["deepfast"] if nbytes else None,
        }


def pass_of(form: Callable, leaves: dict[str, Tensor], backward: bool) -> Callable[[], object]:
    """Runs a form forward, without autograd, or forward and backward."""
    cotangents: list[Tensor] = []

    def run() -> Sequence[Tensor]:
        # Without autograd, `linear_cross_entropy` computes no gradient in forward.
        with torch.set_grad_enabled(backward):
            found = tuple_of(form(**leaves))
        if not backward:
            return found
        outputs = [x for x in found if x.grad_fn is not None]
        if not cotangents:
            cotangents.extend(map(torch.ones_like, outputs))
        # Not backward: inside a model an operand is no leaf and no gradient is accumulated.
        return torch.autograd.grad(outputs, list(leaves.values()), cotangents)

    return run


def under_compiler(case: Case) -> Callable:
    """torch's form of a case under `torch.compile`, compiled by its first call."""
    # torch's cache does not know ATEN_CPU_CAPABILITY and returns code for other vectors.
    config: Any = importlib.import_module("torch._inductor.config")
    config.force_disable_caches = True
    torch.compiler.reset()
    return torch.compile(partial(case.plain, torch_dropout), fullgraph=True, dynamic=False)
