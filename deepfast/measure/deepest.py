"""The deepest encoder that fits a device: deepfast and plain PyTorch by their closed forms, and
these forms held to steps that are counted."""

from collections.abc import Callable
from dataclasses import replace

import torch

from deepfast.measure.plain import FusedModel, PlainModel
from deepfast.measure.rows import MEASURED, NOT_MEASURED
from deepfast.measure.settings import Deadline, Settings
from deepfast.measure.sweep import Say
from deepfast.memory import LiveBytes, parse_bytes, plan
from deepfast.memory.eager import EAGER, eager_peak
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.table import describe

BUDGETS = ("2GiB", "4GiB", "8GiB", "16GiB", "24GiB", "80GiB")
MODEL = {"width": 512, "tokens": 8192, "vocabulary": 32_000, "decoder_layers": 0}
"""Of the models that are planned; `plan`'s defaults beside: bf16 autocast, Adam, dropout, CUDA."""
PLANNED = "deepfast"

HELD_MODEL = {"width": 64, "vocabulary": 4000, "decoder_layers": 0, "device": "cpu"}
"""Of the models that are counted: an eighth of `MODEL`, its tokens and heads included."""
HELD_BATCH, HELD_LENGTH = 32, 32
HELD_POLICIES = {"deepfast, keep": "keep", "deepfast, history": "history"}
"""Form -> policy of all layers."""
DTYPES = ("float32", "bfloat16")


def planned(budget: str) -> Plan | None:
    """deepfast's deepest model in ``budget``; None where not even one layer fits."""
    try:
        return plan(budget=budget, **MODEL)
    except ValueError:
        return None


def deepest_eager(form: str, budget: int) -> int:
    """Most layers of a plain form whose step fits ``budget`` bytes; 0 where not even one does."""
    sizes = plan(budget="1TiB", layers=1, **MODEL).sizes
    return _most(lambda layers: eager_peak(replace(sizes, layers=layers), form) <= budget)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where all below it do; 0 where 1 does not."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def deepest() -> dict:
    """Every budget and form: most layers; and how deepfast's deepest model is planned.

    Computed from closed forms; nothing here was measured.
    """
    plans = {budget: planned(budget) for budget in BUDGETS}
    layers = {form: [deepest_eager(form, parse_bytes(b)) for b in BUDGETS] for form in EAGER}
    layers[PLANNED] = [0 if found is None else found.sizes.layers for found in plans.values()]
    return {
        "model": MODEL,
        "budgets": [{"name": budget, "bytes": parse_bytes(budget)} for budget in BUDGETS],
        "layers": layers,
        "plans": [
            None
            if found is None
            else {
                "policies": describe(found.policies),
                "parameters": found.sizes.parameters,
                "time": found.time,
            }
            for found in plans.values()
        ],
    }


def held(
    settings: Settings,
    deadline: Deadline,
    say: Say,
    forms: tuple[str, ...] = (*EAGER, *HELD_POLICIES),
) -> list[dict]:
    """The closed forms beside counted steps of small models, in both dtypes; parameters, gradients
    and the optimizer's state included in both numbers."""
    rows = []
    for depth in settings.held_depths:
        for dtype in DTYPES:
            for form in forms:
                row = _held(form, depth, dtype, deadline)
                told = row["status"]
                if told == MEASURED:
                    told = f"{row['ratio']:.3f} predicted over measured"
                say(f"{depth:>4} layers  {form:24} {dtype:9} {told}")
                rows.append(row)
    return rows


def _held(form: str, depth: int, dtype: str, deadline: Deadline) -> dict:
    policy = HELD_POLICIES.get(form)
    sizes = plan(
        budget="1TiB", layers=depth, dtype=dtype, tokens=HELD_BATCH * HELD_LENGTH,
        length=HELD_LENGTH, **HELD_MODEL,
    ).sizes  # fmt: skip
    predicted = eager_peak(sizes, form) if policy is None else uniform_peak(sizes, policy)
    row = {
        "form": form, "depth": depth, "dtype": dtype, "status": MEASURED, "ratio": None,
        "predicted_bytes": predicted, "measured_bytes": None,
    }  # fmt: skip
    if deadline.left <= 0:
        return row | {"status": NOT_MEASURED}
    torch.manual_seed(0)
    model = PlainModel(sizes, form) if policy is None else FusedModel(sizes, policy)
    measured = counted_bytes(model, sizes)
    return row | {"measured_bytes": measured, "ratio": predicted / measured}


def counted_bytes(model: torch.nn.Module, sizes: Sizes) -> int:
    """The peak of one step, forward and backward, with parameters and the optimizer's state."""
    shape = (sizes.tokens // sizes.length, sizes.length)
    tokens, target = (torch.randint(sizes.vocabulary, shape) for _ in range(2))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=sizes.dtype == "bfloat16"):
            loss = model.loss(tokens, target)
        loss.backward()
    count = sum(p.numel() for p in model.parameters())
    return live.peak + (4 + OPTIMIZERS[sizes.optimizer]) * count
