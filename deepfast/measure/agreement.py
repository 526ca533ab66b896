"""Checks that the forms agree: the loss and gradients of each against float64."""

from dataclasses import replace

import torch
from torch import Tensor

from deepfast.measure.encoders import REFERENCE, RESIDUAL, VARIANTS, StepCase
from deepfast.measure.settings import Settings

DEPTH, SENTENCES = 30, 8
WEIGHT = "connection.dlcl.weight"

Step = tuple[Tensor, dict[str, Tensor]]
"""A loss, and gradients by parameter name."""


def agreement(settings: Settings) -> dict:
    """Compares every form in float32, and deepfast also in float64, with stack and sum in float64.

    The activation is smooth. With ReLU a rounding error that changes a sign switches a whole unit's
    gradient on or off, in every form, and hides the differences measured here.

    Returns:
        Sizes, and for each form and dtype the largest differences: of the loss, relative; of all
        gradients, in units of the largest one; of the depth weights' gradient alone, in the same
        way.
    """
    depth = max((d for d in settings.depths if d <= DEPTH), default=min(settings.depths))
    settings = replace(settings, batch=min(settings.batch, SENTENCES))
    case = StepCase(settings, depth, activation="gelu")
    single = {form: case.step(form) for form in VARIANTS if form != RESIDUAL}
    case.encoder.double()
    case.x, case.target = case.x.double(), case.target.double()
    truth = case.step(REFERENCE)
    rows = [_compare(form, "float32", result, truth) for form, result in single.items()]
    rows.append(_compare("deepfast", "float64", case.step("deepfast"), truth))
    return {"depth": depth, "tokens": settings.tokens, "activation": "gelu", "rows": rows}


def _compare(variant: str, dtype: str, result: Step, truth: Step) -> dict:
    (loss, gradients), (true_loss, true_gradients) = result, truth
    return {
        "variant": variant,
        "dtype": dtype,
        "loss": abs(loss.item() - true_loss.item()) / abs(true_loss.item()),
        "gradients": _difference(true_gradients, gradients),
        "weight": _difference({WEIGHT: true_gradients[WEIGHT]}, {WEIGHT: gradients[WEIGHT]}),
    }


def _difference(truth: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors, in units of the largest true value."""
    if truth.keys() != other.keys():
        missing = sorted(truth.keys() ^ other.keys())
        raise RuntimeError(f"{missing[0]}: one form has a gradient, the other has none")
    scale = max(t.abs().max().item() for t in truth.values())
    with torch.no_grad():
        worst = max((t - other[name].double()).abs().max().item() for name, t in truth.items())
    return worst / scale
