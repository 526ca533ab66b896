"""A step whose loss, gradient or weights are not finite: where it went wrong first, and on which
rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.mt.training.environment import set_random_state
from deepfast.mt.training.errors import NotFiniteError, OtherRankError, TrainingError
from deepfast.mt.training.parallel import Share, is_sharded, local, syncing

Trainer = Any
"""deepfast.mt.training.trainer.Trainer, which imports this module."""


def not_finite(
    trainer: Trainer, losses: list[float], mine: list[Share], target_tokens: int, generators: dict
) -> TrainingError:
    """Runs the step again, with the same dropout, to find where it went wrong, and on which
    rank."""
    step, own = trainer.step + 1, losses[trainer.ranks.rank]
    set_random_state(generators, trainer.device)
    trainer.model.set_step(step)
    if all(map(math.isfinite, losses)):
        return _not_finite_gradient(trainer, mine, target_tokens)
    module = None
    # FSDP's ranks must all run the step.
    if not math.isfinite(own) or is_sharded(trainer.loss):
        module = _first_bad(
            trainer.model,
            lambda: [trainer.batch_loss(batch, 0.0, alone=True) for batch, _ in mine],
        )
    if math.isfinite(own):
        return OtherRankError(f"step {step}: the loss of another rank is not finite")
    where = f"the output of {module}" if module else "the loss, every module's output is finite"
    return NotFiniteError(
        f"step {step}: the loss is {own}; the first value that is not finite is {where}"
    )


def _not_finite_gradient(trainer: Trainer, mine: list[Share], target_tokens: int) -> TrainingError:
    """Says where, and on which rank: the gradients so far are means over all ranks."""
    # Backward runs from the model's end to its beginning, so it reached the last of them first.
    bad = [name for name, p in trainer.model.named_parameters() if not _finite(p.grad)]
    where = f"of {bad[-1]}" if bad else "norm over all parameters"
    text = f"step {trainer.step + 1}: the gradient {{}} is not finite".format
    if trainer.ranks.size == 1:
        return NotFiniteError(text(where))

    def again() -> None:
        for batch, _ in mine:
            with syncing(trainer.loss, False):
                (trainer.batch_loss(batch, 0.0)[0] / target_tokens).backward()

    trainer.optimizer.zero_grad(set_to_none=True)
    module = _first_bad(trainer.model, again, gradients=True)
    guilty = any(row[0] for row in trainer.ranks.rows(module is not None))
    if module:
        return NotFiniteError(text(f"of the output of {module}"))
    # Where no rank finds it, it was the sum over the ranks that went wrong.
    return (OtherRankError if guilty else NotFiniteError)(text(where))


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


def _first_bad(model: nn.Module, run: Callable[[], Any], *, gradients: bool = False) -> str | None:
    """Calls ``run``, which calls ``model``, and names the module whose output, or the gradient of
    it, is the first that is not finite; None if there is none."""
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

    hooks = [
        module.register_forward_hook(watch(f"{name or 'the model'} ({type(module).__name__})"))
        for name, module in model.named_modules()
        if name or not gradients
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
