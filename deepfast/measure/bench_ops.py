"""Times ops beside plain PyTorch, in turns, forward alone and with backward."""

from collections.abc import Callable

import torch

from deepfast import backend
from deepfast.measure.clock import interleave, ratio
from deepfast.measure.op_forms import CASES, Case, Sizes

PASSES = ("forward", "forward and backward")


def _runs(case: Case, backward: bool, device: str) -> dict[str, Callable[[], object]]:
    """A run of each form."""

    def run(form: Callable) -> None:
        found = form(*case.leaves)
        if backward:
            found = found if isinstance(found, tuple) else (found,)
            outputs = [x for x in found if x.grad_fn is not None]
            torch.autograd.grad(outputs, case.leaves, [torch.ones_like(x) for x in outputs])
        if device != "cpu":
            torch.accelerator.synchronize()

    return {"deepfast": lambda: run(case.ours), "torch": lambda: run(case.plain)}


def measure(op: str, sizes: Sizes, rounds: int) -> list[dict]:
    """A row for each of `PASSES`: seconds are medians; ``ratio`` is torch's time over deepfast's,
    the median of the rounds' ratios."""
    torch.manual_seed(1)
    case = CASES[op](sizes)
    rows = []
    for what in PASSES:
        runs = _runs(case, what != "forward", sizes.device)
        with backend.record() as ran:
            runs["deepfast"]()
        found = interleave(runs, repeats=rounds)
        rows.append({
            "op": op, "pass": what, "torch_form": case.plain_form,
            "backend": "+".join(sorted({by for _, by in ran})),
            "seconds": {name: row.median for name, row in found.items()},
            "ratio": ratio(found["torch"], found["deepfast"]),
        })  # fmt: skip
    return rows
