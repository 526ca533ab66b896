"""The deepest encoder that fits a device, by closed forms, and these forms beside counted steps."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deepfast.measure.encoders import EncoderModel
from deepfast.measure.progress import Job
from deepfast.measure.rows import Row
from deepfast.measure.settings import Settings
from deepfast.memory import LiveBytes, parse_bytes, plan
from deepfast.memory.eager import EAGER, eager_peak
from deepfast.memory.plan import Plan, largest, uniform_peak
from deepfast.memory.sizes import MOST, OPTIMIZERS, Sizes
from deepfast.memory.table import describe

BUDGETS = ("2GiB", "4GiB", "8GiB", "16GiB", "24GiB", "80GiB")
MODEL: dict[str, Any] = {"width": 512, "tokens": 8192, "vocabulary": 32_000, "decoder_layers": 0}
"""Sizes of the planned models. The rest are `plan`'s defaults: bf16 autocast, Adam, dropout,
CUDA."""
PLANNED = "deepfast"

HELD_MODEL: dict[str, Any] = {"width": 64, "vocabulary": 4000, "decoder_layers": 0, "device": "cpu"}
"""Sizes of the counted models: an eighth of `MODEL`, tokens and heads included."""
HELD_BATCH, HELD_LENGTH = 32, 32
HELD_POLICIES = {"deepfast, keep": "keep", "deepfast, history": "history"}
"""Form -> policy of all layers."""
DTYPES = ("float32", "bfloat16")


def planned(budget: str) -> Plan | None:
    """deepfast's deepest model within ``budget``; None if not even one layer fits."""
    try:
        return plan(budget=budget, **MODEL)
    except ValueError:
        return None


def deepest_eager(form: str, budget: int) -> int:
    """The most layers of a plain form whose step fits ``budget`` bytes; 0 if not even one fits."""
    sizes = plan(budget="1TiB", layers=1, **MODEL).sizes
    return largest(
        lambda layers: eager_peak(replace(sizes, layers=layers), form) <= budget, MOST["layers"]
    )


def deepest() -> dict:
    """The most layers for every budget and form, and the plan of deepfast's deepest model.

    Computed from closed forms; nothing here was measured.
    """
    plans = [planned(budget) for budget in BUDGETS]
    layers = {form: [deepest_eager(form, parse_bytes(b)) for b in BUDGETS] for form in EAGER}
    layers[PLANNED] = [0 if found is None else found.sizes.layers for found in plans]
    told = [
        found and {"policies": describe(found.policies), "time": found.time} for found in plans
    ]  # fmt: skip
    budgets = [{"name": budget, "bytes": parse_bytes(budget)} for budget in BUDGETS]
    return {"model": MODEL, "budgets": budgets, "layers": layers, "plans": told}


def held(
    settings: Settings, rows: list[Row], forms: tuple[str, ...] = (*EAGER, *HELD_POLICIES)
) -> list[Job]:
    """Adds a row for each small model. Returns the jobs that count its step beside the closed form.
    Both numbers include parameters, gradients and the optimizer's state."""
    jobs = []
    for depth in settings.held_depths:
        for dtype in DTYPES:
            for form in forms:
                sizes = held_sizes(depth, dtype)
                policy = HELD_POLICIES.get(form)
                peak = uniform_peak(sizes, policy) if policy else eager_peak(sizes, form)
                row = Row(variant=form, depth=depth, what=dtype, predicted_bytes=peak,
                          tokens=sizes.tokens)  # fmt: skip
                rows.append(row)
                label = f"{depth} layers, {form}, {dtype}"
                jobs.append(Job("closed forms", label, 0.03 * depth, partial(_count, row, sizes)))
    return jobs


def held_sizes(depth: int, dtype: str) -> Sizes:
    """The sizes of a small model."""
    return plan(
        budget="1TiB", layers=depth, dtype=dtype, tokens=HELD_BATCH * HELD_LENGTH,
        length=HELD_LENGTH, **HELD_MODEL,
    ).sizes  # fmt: skip


def _count(row: Row, sizes: Sizes) -> None:
    torch.manual_seed(0)
    model = EncoderModel(sizes, HELD_POLICIES.get(row.variant, row.variant))
    row.peak_bytes = counted_bytes(model, sizes)


def counted_bytes(model: EncoderModel, sizes: Sizes) -> int:
    """The peak of one step, forward and backward, with parameters and the optimizer's state."""
    shape = (sizes.tokens // sizes.length, sizes.length)
    tokens, target = (torch.randint(sizes.vocabulary, shape) for _ in range(2))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=sizes.dtype == "bfloat16"):
            loss = model.loss(tokens, target)
        loss.backward()
    count = sum(p.numel() for p in model.parameters())
    return live.peak + (4 + OPTIMIZERS[sizes.optimizer]) * count
