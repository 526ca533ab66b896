"""A loss, a gradient or weights that are not finite: where it went wrong, and on which rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.mt.training.errors import NotFiniteError, OtherRankError, TrainingError
from deepfast.mt.training.parallel import local

Trainer = Any
"""deepfast.mt.training.trainer.Trainer, which imports this module."""


def not_finite_loss(
    trainer: Trainer, name: str, own: float, again: Callable[[], Any]
) -> TrainingError:
    """The error of a loss that is NaN or infinite on some rank; all ranks call it.

    Args:
        name: of the loss, in words.
        own: this rank's.
        again: runs forward on this rank's micro-batches, one after the other.
    """
    # Without a graph a micro-batch leaves nothing in memory.
    with torch.no_grad(), _bad_modules(trainer.model) as found:
        again()
    if math.isfinite(own):
        return OtherRankError(f"{name} of another rank is not finite")
    where = f"the output of {found[0]}" if found else "the loss, every module's output is finite"
    return NotFiniteError(f"{name} is {own}; the first value that is not finite is {where}")


def not_finite_gradient(trainer: Trainer, again: Callable[[], Any]) -> TrainingError:
    """The error of a gradient that is NaN or infinite while the loss is finite; all ranks call it.

    Args:
        again: runs forward and backward on this rank's micro-batches, one after the other.
    """
    # Backward runs from the model's end to its beginning, so it reached the last of them first.
    bad = [name for name, p in trainer.model.named_parameters() if not _finite(p.grad)]
    where = bad[-1] if bad else "all parameters, its norm,"
    # These gradients are means over the ranks. What went wrong on one rank shows inside its graph.
    trainer.optimizer.zero_grad(set_to_none=True)
    with _bad_modules(trainer.model, gradients=True) as found:
        again()
    guilty = any(row[0] for row in trainer.ranks.rows(bool(found)))
    where = f"the output of {found[0]}" if found else where
    # Where no rank finds it, the sum over the ranks went wrong.
    kind = NotFiniteError if found or not guilty else OtherRankError
    return kind(f"step {trainer.step + 1}: the gradient of {where} is not finite")


def check_weights(trainer: Trainer) -> None:
    """Refuses weights that the last step has made NaN or infinite; all ranks call it.

    The loss of the next step would show it, but they may be validated or saved before it.

    Raises:
        NotFiniteError: a parameter is not finite.
        OtherRankError: it is one of another rank's share.
    """
    bad = [name for name, p in trainer.model.named_parameters() if not _finite(local(p))]
    if any(found for (found,) in trainer.ranks.rows(bool(bad))):
        name = bad[0] if bad else None
        text = f"step {trainer.step}: the parameter {name} is not finite after the update"
        raise NotFiniteError(text) if name else OtherRankError(text)


def _finite(value: Any) -> bool:
    """Whether a tensor, or each in a tuple or list, has no NaN and no infinity; True for others."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(map(_finite, value)) if isinstance(value, (tuple, list)) else True


@contextlib.contextmanager
def _bad_modules(model: nn.Module, *, gradients: bool = False) -> Iterator[list[str]]:
    """Collects the names of the modules whose outputs inside the block are not finite, or the
    gradients of these outputs, in the order in which they are computed."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def check(value: Any) -> None:
            if not _finite(value):
                found.append(name)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not gradients:
                check(output)
            elif isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(check)

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            watched = watch(f"{name or 'the model'} ({type(module).__name__})")
            hooks.enter_context(module.register_forward_hook(watched))
        yield found
