"""A run inside a budget of memory: the plan, and a trial of the largest micro-batch before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepfast.memory.plan import Plan, plan
from deepfast.memory.policies import POLICIES
from deepfast.memory.table import advise, describe, lines
from deepfast.memory.units import format_bytes
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.trainer import Trainer
from deepfast.nn.connections.connection import PRESETS

TRIES = 3
"""Plans tried out, each for a budget that is short by as much as the one before was wrong."""


def fit_memory(trainer: Trainer, say: Callable[[str], None]) -> dict[str, Any]:
    """Plans by the recipe's key ``memory``, which is not None, sets the policies on the model, and
    tries the largest micro-batch; where that takes more than was predicted, plans again.

    Neither a parameter nor the model's configuration changes.

    Returns:
        A row of metrics: bytes that were predicted and measured, and the policies in words.

    Raises:
        TrainingError: a step does not fit; the message says what would.
    """
    named = trainer.recipe.memory in POLICIES
    planned = plan_run(trainer.recipe, trainer)
    # A policy by name sets no limit but the device's own.
    limit = math.inf if named else planned.budget
    for line in lines(planned):
        say(line)
    if not planned.fits:
        raise TrainingError(
            f"memory: expected a step within {format_bytes(planned.budget)}, got one of "
            f"{format_bytes(planned.peak)} for data.max_tokens={trainer.recipe.data.max_tokens}: "
            f"{planned.advice}"
        )
    tries = 1 if named else TRIES
    for attempt in range(1, tries + 1):
        measured = _trial(trainer, planned)
        policies = describe(planned.policies, planned.decoder_policies)
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
            f"memory: expected a step within {format_bytes(limit)}, got {got} with memory "
            f"policies {policies}: "
        )
        other = _what_fits(trainer, planned, limit, measured)
        if not other.fits:
            # The budget it names is one of predictions, which were wrong here.
            raise TrainingError(wrong + advise(other.what_fits, budget=False))
        instead = describe(other.policies, other.decoder_policies)
        if attempt == tries:
            raise TrainingError(f"{wrong}memory policies {instead} would fit")
        say(f"a trial with memory policies {policies} took {got}; {instead} instead")
        planned = other
    raise AssertionError("the last attempt returns or raises")


def set_policy(model: nn.Module, policy: str) -> None:
    """One policy for all layers; where nothing can be mixed again the nearest takes its place."""
    for stack in (model.encoder, model.decoder):
        mixes = stack.connection.dlcl is not None or policy != "history"
        stack.set_memory(policy if mixes else "states")


def _trial(trainer: Trainer, planned: Plan) -> float:
    """Bytes of a step under a plan's policies, on the rank that needs most."""
    trainer.model.encoder.set_memory(planned.policies)
    trainer.model.decoder.set_memory(planned.decoder_policies)
    return _largest_of_ranks(trainer.measure(), trainer.device)


def plan_run(recipe: Recipe, trainer: Trainer, budget: int | None = None) -> Plan:
    """The plan of a recipe's model and ``data.max_tokens``, under its key ``memory``.

    Args:
        budget: bytes, in place of the recipe's.
    """
    config, named = trainer.model.config, recipe.memory in POLICIES
    decoder = None
    if named:
        # Where nothing can be mixed again the nearest policy takes its place.
        mixes = config.decoder_connection in PRESETS or recipe.memory != "history"
        decoder = recipe.memory if mixes else "states"
    if budget is None and not named:
        budget = recipe.memory
    scalar = config.dlcl.get("weight", "scalar") == "scalar"
    return plan(
        budget=budget,
        layers=config.encoder_layers,
        width=config.dim,
        tokens=recipe.data.max_tokens,
        heads=config.heads,
        ffn=config.ffn_dim,
        vocabulary=config.vocab_size,
        decoder_layers=config.decoder_layers,
        connection=_planned(config.encoder_connection),
        decoder_connection=_planned(config.decoder_connection),
        norm=config.norm,
        weight="scalar" if scalar else "vector",
        dtype=recipe.train.precision,
        device=trainer.device.type,
        activation=config.activation,
        dropout=config.dropout > 0,
        accumulate=recipe.optim.accumulate,
        length=min(recipe.data.max_length, 128),
        padding=True,
        policies=recipe.memory if named else None,
        decoder_policies=decoder,
    )


def _planned(connection: str) -> str:
    """What the planner calls a connection: every DLCL holds the same states, and latent depth what
    the plain residual one does."""
    return "dlcl" if connection in PRESETS else "residual"


def _largest_of_ranks(value: float, device: torch.device) -> float:
    """The same on every rank: all stop together, or none does."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    gpu = torch.distributed.get_backend() == "nccl"
    shared = torch.tensor(value, dtype=torch.float64, device=device if gpu else "cpu")
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return shared.item()


def _what_fits(trainer: Trainer, planned: Plan, limit: float, measured: float) -> Plan:
    """The plan for a budget that is short by as much as this one was wrong."""
    wrong = 1.1 if measured == math.inf else max(measured / planned.peak, 1.0)
    return plan_run(replace(trainer.recipe, memory=None), trainer, int(limit / wrong))
