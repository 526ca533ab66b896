"""Training steps of encoders of several depths, variants in turn: time, memory, traffic."""

from functools import partial

import torch

from deepfast.measure.clock import COPY, copy_variant
from deepfast.measure.encoders import REFERENCE, RESIDUAL, VARIANTS, StepCase
from deepfast.measure.forms import FORMS, mixing_alone
from deepfast.measure.progress import Job
from deepfast.measure.rows import Row
from deepfast.measure.settings import Settings
from deepfast.measure.traffic import states_moved
from deepfast.measure.turns import Variant, turns
from deepfast.nn import DLCL

LAYER_WORK = 0.06
"""About how many seconds a layer takes at D=256, F=1024 and 2,048 tokens."""
PAIR_WORK = {"stack and sum": 3.6e-3, "DenseFormer form": 9e-4, "loop of adds": 9e-4}
"""The same for each pair of a layer and a source; deepfast's time does not depend on them."""
MIXING = ("deepfast", "DenseFormer form", REFERENCE, COPY)
"""Variants of the mixing alone."""


def sweep(settings: Settings, rows: list[Row]) -> list[Job]:
    """Adds a row for every variant at every depth; returns the jobs that fill them."""
    jobs = []
    for depth in settings.depths:
        some = [
            _row(settings, depth, variant, states_moved(variant, depth)) for variant in VARIANTS
        ]
        rows += some
        states = (10 + settings.ffn_dim // settings.dim) * depth + _stacks(depth)
        some[-1].predicted_bytes = states * settings.state_bytes
        variants = [
            Variant(row, _rounds(settings, row.variant), _work(settings, depth, row.variant))
            for row in some
        ]
        jobs += turns("a step", f"{depth} layers", variants, partial(StepCase, settings, depth))
    return jobs


def mixing(settings: Settings, rows: list[Row]) -> list[Job]:
    """Adds a row for each form of the connection alone and one for a plain copy; returns the jobs
    that fill them."""
    depth = settings.mixing_depth
    rows += [_row(settings, depth, form, states_moved(form, depth)) for form in MIXING]
    by_name = {row.variant: row for row in rows}
    by_name[REFERENCE].predicted_bytes = _stacks(depth) * settings.state_bytes
    case = partial(MixingCase, settings, by_name[COPY])
    residual = _work(settings, depth, RESIDUAL)
    variants = [
        Variant(
            row,
            _rounds(settings, row.variant),
            _work(settings, depth, row.variant) - residual + 0.05,
        )
        for row in rows
    ]
    return turns("mixing alone", f"{depth} layers", variants, case)


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


def _row(settings: Settings, depth: int, variant: str, moved: int | None) -> Row:
    nbytes = None if moved is None else moved * settings.state_bytes
    return Row(variant=variant, depth=depth, tokens=settings.tokens, nbytes=nbytes)


def _stacks(depth: int) -> int:
    """The number of states that stack and sum keeps: every stack, the states of each row, and the
    gradient and product of the last stack."""
    rows = depth + 1
    return rows * (rows + 1) // 2 + 5 * rows


def _rounds(settings: Settings, variant: str) -> int:
    quick = variant in (RESIDUAL, "deepfast", COPY)
    return settings.rounds if quick else settings.slow_rounds


def _work(settings: Settings, depth: int, variant: str) -> float:
    layers = LAYER_WORK * (1.1 if variant == "deepfast" else 1.0) * depth
    scale = settings.tokens / 2048 * settings.dim / 256
    return scale * (layers + PAIR_WORK.get(variant, 0.0) * depth**2) + 0.05
