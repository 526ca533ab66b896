"""Fits a run into a memory budget: a plan, then a trial step on the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from deepfast import backend as backends
from deepfast.connections import CONNECTIONS
from deepfast.memory.plan import Plan, plan
from deepfast.memory.table import describe, lines
from deepfast.memory.units import format_bytes, parse_bytes
from deepfast.mt.models import Transformer, TranslationModel
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.parallel import is_sharded, micro_batches_at_once
from deepfast.mt.training.trainer import Trainer


def fit_memory(trainer: Trainer, say: Callable[[str], None]) -> dict[str, Any]:
    """Plans by the recipe's ``memory_budget``, sets the policies on the model, and tries a step on
    the largest micro-batch. Parameters and the model's config do not change.

    Returns:
        A row of metrics: predicted and measured bytes, and the policies in words.

    Raises:
        TrainingError: no plan fits, or the step takes more than the budget.
    """
    limit, tokens = parse_bytes(trainer.recipe.memory_budget), trainer.recipe.data.max_tokens
    if trainer.device.type == "cuda":
        limit = min(limit, torch.cuda.get_device_properties(trainer.device).total_memory)
    expected = f"memory_budget: expected a step within {format_bytes(limit)}, got one of"
    planned = plan_run(trainer, limit)
    for line in lines(planned):
        say(line)
    if not planned.fits:
        got = f"{format_bytes(planned.peak)} for data.max_tokens={tokens}"
        raise TrainingError(f"{expected} {got}: {planned.advice}")
    model = cast(Transformer, trainer.model)
    model.encoder.set_recompute(planned.recompute)
    model.decoder.set_recompute(planned.decoder_recompute)
    # The largest of all ranks, so that all of them stop or none does.
    measured = int(max(trainer.ranks.rows(trainer.measure()))[0])
    policies = describe(planned.recompute, planned.decoder_recompute)
    if measured > limit:
        raise TrainingError(
            f"{expected} {format_bytes(measured)}, measured with recompute policies {policies}: "
            f"choose data.max_tokens below {tokens}"
        )
    return {
        "step": trainer.step,
        "predicted_bytes": planned.peak,
        "measured_bytes": measured,
        "policies": policies,
    }


def set_policy(model: TranslationModel, policy: str) -> None:
    """Sets one policy for all layers. A side without a depth connection gets "layer" instead of
    "layer+input"."""
    transformer = cast(Transformer, model)
    for stack in (transformer.encoder, transformer.decoder):
        mixes = stack.connection.depth is not None or policy != "layer+input"
        stack.set_recompute(policy if mixes else "layer")


def plan_run(trainer: Trainer, budget: int) -> Plan:
    """The plan for a trainer's model and ``data.max_tokens`` within a budget in bytes."""
    recipe, config = trainer.recipe, trainer.model.config
    scalar = config.dlcl.get("weight_type", "scalar") == "scalar"
    tokens, accumulate = _of_one_rank(trainer)
    # As far as it is known before the first step.
    dtype = getattr(torch, recipe.train.precision)
    attention = backends.chosen("attention", None, trainer.device, dtype)
    return plan(
        budget=budget,
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
    )


def _of_one_rank(trainer: Trainer) -> tuple[int, int]:
    """Tokens of the micro-batches of a rank, and how many it has in a step."""
    data, count, size = trainer.recipe.data, trainer.recipe.optim.accumulate, trainer.ranks.size
    together = 1 if trainer.model.draws else micro_batches_at_once(count, size)
    tokens = -(-data.max_tokens * together // size)
    # A sentence is not divided.
    return max(tokens, min(data.max_length, data.max_tokens)), count // together
