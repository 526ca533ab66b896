"""Fits a run into a memory budget: a plan, then a trial step on the largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from deepfast import backend as backends
from deepfast.connections import CONNECTIONS
from deepfast.memory.plan import Plan, plan
from deepfast.memory.table import advise, describe, lines
from deepfast.memory.units import format_bytes
from deepfast.mt.models import Transformer, TranslationModel
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.parallel import is_sharded, micro_batches_at_once
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.trainer import Trainer
from deepfast.policies import MIXING

TRIES = 3
"""How many plans are tried. Each budget is smaller by the error of the previous plan."""


def fit_memory(trainer: Trainer, say: Callable[[str], None]) -> dict[str, Any]:
    """Plans by the recipe's ``recompute`` or ``memory_budget``, and sets the policies on the model.

    Then it tries a step on the largest micro-batch. Where that takes more memory than the budget,
    it plans again. Parameters and the model's config do not change.

    Returns:
        A row of metrics: predicted and measured bytes, and the policies in words.

    Raises:
        TrainingError: no step fits; the message says what would fit.
    """
    named = trainer.recipe.recompute is not None
    planned = plan_run(trainer.recipe, trainer)
    # With a policy by name the only limit is the device's memory.
    limit = math.inf if named else planned.budget
    for line in lines(planned):
        say(line)
    if not planned.fits:
        raise TrainingError(
            f"memory_budget: expected a step within {format_bytes(planned.budget)}, got one of "
            f"{format_bytes(planned.peak)} for data.max_tokens={trainer.recipe.data.max_tokens}: "
            f"{planned.advice}"
        )
    tries = 1 if named else TRIES
    for attempt in range(1, tries + 1):
        measured = _trial(trainer, planned)
        policies = describe(planned.recompute, planned.decoder_recompute)
        if measured == math.inf:
            limit = min(limit, torch.cuda.get_device_properties(trainer.device).total_memory)
        if measured <= limit:
            return {
                "step": trainer.step,
                "predicted_bytes": planned.peak,
                "measured_bytes": int(measured),
                "policies": policies,
            }
        got = "more than the GPU has" if measured == math.inf else format_bytes(measured)
        wrong = (
            f"memory_budget: expected a step within {format_bytes(limit)}, got {got} with "
            f"recompute policies {policies}: "
        )
        # A plan for a budget that is smaller by the error of this plan.
        error = 1.1 if measured == math.inf else max(measured / planned.peak, 1.0)
        other = plan_run(
            replace(trainer.recipe, recompute=None, memory_budget=None), trainer, int(limit / error)
        )
        if not other.fits:
            # Not the budget that the planner advises: its predictions were wrong here.
            raise TrainingError(wrong + advise(other.what_fits, budget=False))
        instead = describe(other.recompute, other.decoder_recompute)
        if attempt == tries:
            raise TrainingError(f"{wrong}recompute policies {instead} would fit")
        say(f"a trial with recompute policies {policies} took {got}; {instead} instead")
        planned = other
    raise AssertionError("the last attempt returns or raises")


def set_policy(model: TranslationModel, policy: str) -> None:
    """Sets one policy for all layers. A side without a depth connection gets "layer" instead of
    "layer+input"."""
    transformer = cast(Transformer, model)
    for stack in (transformer.encoder, transformer.decoder):
        mixes = stack.connection.depth is not None or policy != "layer+input"
        stack.set_recompute(policy if mixes else "layer")


def _trial(trainer: Trainer, planned: Plan) -> float:
    """Bytes of a step under a plan's policies, on the rank that needs the most."""
    model = cast(Transformer, trainer.model)
    model.encoder.set_recompute(planned.recompute)
    model.decoder.set_recompute(planned.decoder_recompute)
    # The largest of all ranks, so that all of them stop or none does.
    return max(trainer.ranks.rows(trainer.measure()))[0]


def plan_run(recipe: Recipe, trainer: Trainer, budget: int | None = None) -> Plan:
    """The plan for a recipe's model, ``data.max_tokens``, and ``recompute`` or ``memory_budget``.

    Args:
        budget: bytes that replace the recipe's budget.
    """
    config, decoder = trainer.model.config, recipe.recompute
    if decoder == "layer+input" and config.decoder_connection not in MIXING:
        # As in `set_policy`.
        decoder = "layer"
    limit = recipe.memory_budget if budget is None else budget
    scalar = config.dlcl.get("weight_type", "scalar") == "scalar"
    tokens, accumulate = _of_one_rank(recipe, trainer)
    # As far as it is known before the first step.
    dtype = getattr(torch, recipe.train.precision)
    attention = backends.chosen("attention", None, trainer.device, dtype)
    return plan(
        budget=limit,
        num_layers=config.encoder_layers,
        dim=config.dim,
        tokens=tokens,
        num_heads=config.num_heads,
        ffn_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
        decoder_layers=config.decoder_layers,
        connection=CONNECTIONS[config.encoder_connection].planned,
        decoder_connection=CONNECTIONS[config.decoder_connection].planned,
        reads=config.attnres_reads,
        norm=config.norm,
        norm_type=config.norm_type,
        weight_type=None if scalar else "vector",
        dtype=recipe.train.precision,
        device=trainer.device.type,
        activation=config.activation,
        dropout=config.dropout > 0,
        accumulate=accumulate,
        ranks=trainer.ranks.size,
        parallel="fsdp" if is_sharded(trainer.loss) else "ddp",
        reshard=recipe.parallel.reshard,
        length=min(recipe.data.max_length, recipe.data.max_tokens, 128),
        padding=attention in backends.SDPA,
        recompute=recipe.recompute,
        decoder_recompute=decoder,
    )


def _of_one_rank(recipe: Recipe, trainer: Trainer) -> tuple[int, int]:
    """Tokens of the micro-batches of a rank, and how many it has in a step."""
    count, size = recipe.optim.accumulate, trainer.ranks.size
    together = 1 if trainer.model.draws else micro_batches_at_once(count, size)
    tokens = -(-recipe.data.max_tokens * together // size)
    # A sentence is not divided.
    return max(tokens, min(recipe.data.max_length, recipe.data.max_tokens)), count // together
