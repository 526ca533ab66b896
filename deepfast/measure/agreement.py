"""Whether the forms compute the same: loss and gradients of each against float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepfast.measure.encoders import (
    REFERENCE,
    RESIDUAL,
    VARIANTS,
    Case,
)
from deepfast.measure.settings import Deadline, Settings

DEPTH, SENTENCES = 30, 8
WEIGHT = "connection.dlcl.weight"


@dataclass(kw_only=True)
class Agreement:
    """A form's largest differences from stack and sum in float64."""

    variant: str
    dtype: str
    loss: float
    """Relative."""
    gradients: float
    """Over all parameters, in units of the largest gradient."""
    weight: float
    """Of the depth weights W, in units of W's largest gradient."""


def agreement(settings: Settings, deadline: Deadline) -> dict:
    """Every form in float32, deepfast in float64 too; empty rows where there is no time.

    Smooth activations: under ReLU a rounding error that turns a sign makes a whole unit's gradient
    appear or vanish, in every form alike, and hides what is to be compared.
    """
    depth = max((d for d in settings.depths if d <= DEPTH), default=min(settings.depths))
    settings = replace(settings, batch=min(settings.batch, SENTENCES))
    found = {"depth": depth, "tokens": settings.tokens, "activation": "gelu", "rows": []}
    case = Case(settings, depth, deadline, activation="gelu")
    forms = [v for v in VARIANTS if v != RESIDUAL]
    if deadline.left <= 0:
        return found
    single = {form: _step(case, form) for form in forms}
    case.encoder.double()
    case.x, case.target = case.x.double(), case.target.double()
    truth = _step(case, REFERENCE)
    rows = [_compare(form, "float32", result, truth) for form, result in single.items()]
    rows.append(_compare("deepfast", "float64", _step(case, "deepfast"), truth))
    return found | {"rows": rows}


def _step(case: Case, form: str) -> tuple[float, dict[str, Tensor]]:
    return case.step(form).item(), case.gradients()


def _compare(variant: str, dtype: str, result, truth) -> Agreement:
    (loss, gradients), (true_loss, true_gradients) = result, truth
    return Agreement(
        variant=variant,
        dtype=dtype,
        loss=abs(loss - true_loss) / abs(true_loss),
        gradients=_difference(true_gradients, gradients),
        weight=_difference({WEIGHT: true_gradients[WEIGHT]}, {WEIGHT: gradients[WEIGHT]}),
    )


def _difference(truth: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest absolute difference of all tensors, in units of the largest true value."""
    if truth.keys() != other.keys():
        missing = sorted(truth.keys() ^ other.keys())
        raise RuntimeError(f"{missing[0]}: one form has a gradient there, the other has none")
    scale = max(t.abs().max().item() for t in truth.values())
    with torch.no_grad():
        worst = max((t - other[name].double()).abs().max().item() for name, t in truth.items())
    return worst / scale
