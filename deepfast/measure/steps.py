"""Training steps of encoders of several depths: time and memory."""

from collections.abc import Sequence
from functools import partial

from deepfast.measure.clock import Row
from deepfast.measure.encoders import REFERENCE, VARIANTS, StepCase
from deepfast.measure.forms import COMPILED
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings


def steps(settings: Settings, variants: Sequence[str] = (*VARIANTS, COMPILED)) -> list[Turns]:
    """A step of every variant at every depth; a compiled one up to ``settings.compile_up_to``."""
    found = []
    for depth in settings.depths:
        names = [v for v in variants if v != COMPILED or depth <= settings.compile_up_to]
        rows = [
            Row(variant=name, depth=depth, tokens=settings.tokens, counted=name != COMPILED)
            for name in names
        ]
        for row in rows:
            if row.variant == REFERENCE:
                states = (10 + settings.ffn_dim // settings.dim) * depth + states_of_stacks(depth)
                row.predicted_bytes = states * settings.state_bytes
        make = partial(StepCase, settings, depth, names)
        label = f"{depth} layers"
        found.append(Turns("a step", label, rows, make, settings.rounds, settings.clock))
    return found


def states_of_stacks(depth: int) -> int:
    """The number of states that stack and sum keeps: every stack, the states of each row, and the
    gradient and product of the last stack."""
    rows = depth + 1
    return rows * (rows + 1) // 2 + 5 * rows
