"""A step whose loss, gradient or weights are not finite: where it went wrong first, and on which
rank."""

from __future__ import annotations

import functools
import math
from typing import Any

from deepfast.mt.training.environment import set_random_state
from deepfast.mt.training.errors import NotFiniteError, ToldError, TrainingError
from deepfast.mt.training.nonfinite import (
    first_nonfinite_gradient,
    first_nonfinite_module,
    first_nonfinite_output_gradient,
    first_nonfinite_parameter,
)
from deepfast.mt.training.parallel import is_sharded, syncing
from deepfast.mt.training.shares import Share

Trainer = Any
"""deepfast.mt.training.trainer.Trainer, which imports this module."""


def not_finite(
    trainer: Trainer, losses: list[float], mine: list[Share], target_tokens: int, generators: dict
) -> TrainingError:
    """Runs the step again, with the same dropout, to find where it went wrong, and on which
    rank."""
    step, rank = trainer.step + 1, trainer.ranks.rank
    set_random_state(generators, trainer.device)
    trainer.model.set_step(step)
    if all(map(math.isfinite, losses)):
        return _not_finite_gradient(trainer, mine, target_tokens)
    if math.isfinite(losses[rank]) and not is_sharded(trainer.loss):
        return ToldError(f"step {step}: the loss of another rank is not finite")
    module = None
    for batch, _ in mine:
        # FSDP's ranks must all go on to the end.
        found = first_nonfinite_module(
            trainer.model,
            functools.partial(trainer.batch_loss, batch, 0.0, alone=True),
            stop=not is_sharded(trainer.loss),
        )
        module = module or found
    if math.isfinite(losses[rank]):
        return ToldError(f"step {step}: the loss of another rank is not finite")
    where = f"the output of {module}" if module else "the loss, every module's output is finite"
    return NotFiniteError(
        f"step {step}: the loss is {losses[rank]}; the first value that is not finite is {where}"
    )


def check_weights(trainer: Trainer) -> None:
    """Refuses weights that the last step has made NaN or infinite; all ranks call it.

    The loss of the next step would tell, but they may be validated or saved before it.

    Raises:
        NotFiniteError: a parameter is not finite.
        ToldError: it is one of another rank's share.
    """
    name = first_nonfinite_parameter(trainer.model)
    if any(bad for (bad,) in trainer.ranks.rows(name is not None)):
        text = f"step {trainer.step}: the parameter {name} is not finite after the update"
        raise NotFiniteError(text) if name else ToldError(text)


def _not_finite_gradient(trainer: Trainer, mine: list[Share], target_tokens: int) -> TrainingError:
    """Says where, and on which rank: the gradients so far are means over all ranks."""
    name = first_nonfinite_gradient(trainer.model)
    where = f"of {name}" if name else "norm over all parameters"
    text = f"step {trainer.step + 1}: the gradient {{}} is not finite".format
    if trainer.ranks.size == 1:
        return NotFiniteError(text(where))

    def again() -> None:
        for batch, _ in mine:
            with syncing(trainer.loss, False):
                (trainer.batch_loss(batch, 0.0)[0] / target_tokens).backward()

    trainer.optimizer.zero_grad(set_to_none=True)
    module = first_nonfinite_output_gradient(trainer.model, again)
    guilty = any(row[0] for row in trainer.ranks.rows(module is not None))
    if module:
        return NotFiniteError(text(f"of the output of {module}"))
    # Where no rank finds it, it was the sum over the ranks that went wrong.
    return (ToldError if guilty else NotFiniteError)(text(where))
