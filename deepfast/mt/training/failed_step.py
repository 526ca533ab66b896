"""A loss, a gradient or weights that are not finite: where it went wrong, and on which rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.mt.training.errors import NotFiniteError, OtherRankError, TrainingError
from deepfast.mt.training.parallel import local

Trainer = Any
"""deepfast.mt.training.trainer.Trainer, which imports this module."""


def not_finite(trainer: Trainer, text: str, loss: float, again: Callable[[], Any]) -> TrainingError:
    """The error of a loss or a gradient that is NaN or infinite on some rank; all ranks call it.

    Args:
        text: the error, without the place.
        loss: this rank's.
        again: runs this rank's micro-batches again, one after the other, so that only one at a time
            is in memory.
    """
    with _bad_modules(trainer.model) as found:
        again()
    mine = bool(found) or not math.isfinite(loss)
    if any(row[0] for row in trainer.ranks.rows(mine)) and not mine:
        return OtherRankError(f"{text} on another rank")
    if not found and math.isfinite(loss):
        bad = [name for name, p in trainer.model.named_parameters() if not _finite(p.grad)]
        # Backward runs from the model's end to its beginning, so it reached the last one first.
        found = [f"the gradient of {name}" for name in bad[-1:]]
    where = found[0] if found else "a sum, every module's output is finite"
    return NotFiniteError(f"{text}; the first value that is not finite is {where}")


def check_weights(trainer: Trainer) -> None:
    """Refuses weights that the last step has made NaN or infinite; all ranks call it.

    The loss of the next step would show it, but they may be validated or saved before it.

    Raises:
        NotFiniteError: a parameter is not finite.
        OtherRankError: it is one of another rank's share.
    """
    bad = [name for name, p in trainer.model.named_parameters() if not _finite(p)]
    if any(found for (found,) in trainer.ranks.rows(bool(bad))):
        name = bad[0] if bad else None
        text = f"step {trainer.step}: the parameter {name} is not finite after the update"
        raise NotFiniteError(text) if name else OtherRankError(text)


def _finite(value: Any) -> bool:
    """Whether a tensor, or each in a tuple or list, has no NaN and no infinity; True for others."""
    if isinstance(value, Tensor):
        value = local(value)
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(map(_finite, value)) if isinstance(value, (tuple, list)) else True


@contextlib.contextmanager
def _bad_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collects what is not finite inside the block, in the order in which it is computed: the
    outputs of modules, and the gradients of these outputs."""
    found: list[str] = []

    def check(place: str, value: Any) -> None:
        if not _finite(value):
            found.append(place)

    def watch(place: str, module: nn.Module, inputs: Any, output: Any) -> None:
        check(place, output)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(check, f"the gradient of {place}"))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            place = f"the output of {name or 'the model'} ({type(module).__name__})"
            hooks.enter_context(module.register_forward_hook(partial(watch, place)))
        yield found
