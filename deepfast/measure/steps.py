"""Training steps of encoders of several depths, and their connection alone: time, memory, traffic,
how far the forms agree, and a trace of one step."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.profiler import profile, record_function

from deepfast.files import write_atomically
from deepfast.measure.clock import COPY, Row, copy_variant
from deepfast.measure.encoders import REFERENCE, RESIDUAL, VARIANTS, StepCase
from deepfast.measure.forms import COMPILED, FORMS, mixing_alone
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.measure.traffic import states_moved
from deepfast.nn import DLCL

MIXING = ("deepfast", "DenseFormer form", REFERENCE, COPY)
"""Variants of the mixing alone."""

AGREEMENT_DEPTH, AGREEMENT_SENTENCES = 30, 8
"""The most layers and sentences of the comparison with float64."""
WEIGHT = "connection.dlcl.weight"

Step = tuple[Tensor, dict[str, Tensor]]
"""A loss, and gradients by parameter name."""


def steps(settings: Settings) -> list[Turns]:
    """A step of every variant at every depth."""
    found = []
    for depth in settings.depths:
        rows = [_row(settings, depth, variant) for variant in VARIANTS]
        states = (10 + settings.ffn_dim // settings.dim) * depth + _stacks(depth)
        rows[-1].predicted_bytes = states * settings.state_bytes
        if depth <= settings.compile_up_to:
            rows.append(_row(settings, depth, COMPILED, counted=False))
        make = partial(StepCase, settings, depth)
        found.append(Turns("a step", f"{depth} layers", rows, make, settings.rounds))
    return found


def mixing(settings: Settings) -> list[Turns]:
    """Each form of the connection alone, and a plain copy."""
    depth = settings.mixing_depth
    rows = {form: _row(settings, depth, form) for form in MIXING}
    rows[REFERENCE].predicted_bytes = _stacks(depth) * settings.state_bytes
    make = partial(MixingCase, settings, rows[COPY])
    found = list(rows.values())
    return [Turns("mixing alone", f"{depth} layers", found, make, settings.rounds)]


class MixingCase:
    """The connection of a whole stack whose layers do nothing, forward and backward."""

    def __init__(self, settings: Settings, copy_row: Row):
        torch.manual_seed(settings.seed)
        self.dlcl = DLCL(settings.mixing_depth, settings.dim)
        self.y = torch.randn(settings.tokens, settings.dim, requires_grad=True)
        self.grad = torch.randn(settings.tokens, settings.dim)
        self.copy, copy_row.nbytes = copy_variant()

    def run(self, variant: str) -> None:
        """One run of a form, or of the copy."""
        if variant == COPY:
            self.copy()
            return
        mixing_alone(FORMS[variant], self.dlcl, self.y, self.grad)
        self.y.grad = None
        self.dlcl.zero_grad(set_to_none=True)


def _row(settings: Settings, depth: int, variant: str, counted: bool = True) -> Row:
    moved = states_moved(variant, depth)
    return Row(
        variant=variant,
        depth=depth,
        tokens=settings.tokens,
        counted=counted,
        nbytes=None if moved is None else moved * settings.state_bytes,
    )


def _stacks(depth: int) -> int:
    """The number of states that stack and sum keeps: every stack, the states of each row, and the
    gradient and product of the last stack."""
    rows = depth + 1
    return rows * (rows + 1) // 2 + 5 * rows


def agreement(settings: Settings) -> dict:
    """Compares every form in float32, and deepfast also in float64, with stack and sum in float64.

    The activation is smooth. With ReLU a rounding error that changes a sign switches a whole unit's
    gradient on or off, in every form, and hides the differences measured here.

    Returns:
        Sizes, and for each form and dtype the largest differences: of the loss, relative; of all
        gradients, in units of the largest one; of the depth weights' gradient alone, in the same
        way.
    """
    small = [depth for depth in settings.depths if depth <= AGREEMENT_DEPTH]
    depth = max(small, default=min(settings.depths))
    settings = replace(settings, batch=min(settings.batch, AGREEMENT_SENTENCES))
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


def write_trace(settings: Settings, path: Path) -> int:
    """Writes a trace of a training step, for chrome://tracing and https://ui.perfetto.dev: the
    second step of deepfast's encoder at the least depth of the report.

    deepfast's ops are named ``deepfast::``. Layers are marked ``layer 0``, ``layer 1``, ...

    Returns:
        The number of layers.
    """
    depth = min(settings.depths)
    case = StepCase(settings, depth)
    for number, layer in enumerate(case.encoder.layers):
        named = record_function(f"layer {number}")
        layer.forward = named(layer.forward)  # type: ignore[method-assign]
    case.run("deepfast")
    with profile() as profiled, record_function("training step"):
        case.run("deepfast")
    with TemporaryDirectory() as folder:
        # The profiler writes only to a path, and not atomically.
        written = Path(folder, path.name)
        profiled.export_chrome_trace(str(written))
        write_atomically(path, written.read_bytes())
    return depth
