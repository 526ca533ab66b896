"""The connection of a whole stack alone, whose layers only copy: deepfast beside plain forms."""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from deepfast.connections import BLOCKS
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    COMPILED,
    DENSEFORMER,
    FORMS,
    LOOP,
    PER_ROW,
    STACK,
    compiled,
    copying_layer,
    mixing_alone,
    perturb,
)
from deepfast.measure.settings import Settings
from deepfast.measure.traffic import engine_moved
from deepfast.measure.turns import COPY, Row, Turns, copy_variant
from deepfast.nn import DLCL, AttentionResiduals

FORWARD = ", forward alone"
BLOCKED = "attention residuals in blocks"
CONNECTIONS: dict[str, dict[str, Callable]] = {
    "DLCL": {form: FORMS[form] for form in (STACK, DENSEFORMER, PER_ROW, "deepfast")},
    "attention residuals": ATTENTION_FORMS,
    BLOCKED: ATTENTION_FORMS,
}
"""Connection -> its forms, in the order of the table."""


def module_of(name: str, layers: int, dim: int) -> DLCL | AttentionResiduals:
    if name == "DLCL":
        return DLCL(layers, dim)
    return AttentionResiduals(layers, dim, block=-(-layers // BLOCKS) if name == BLOCKED else None)


def mixing(settings: Settings) -> list[Turns]:
    """Every form of every connection at every depth, and a plain copy. DLCL is also measured as
    one compiled graph, up to ``settings.compile_up_to`` layers."""
    (tokens, dim), found = settings.mixing, []
    state = 4 * tokens * dim
    for depth in settings.mixing_depths:
        rows = [Row(variant=COPY, what=COPY, depth=depth, tokens=tokens)]
        for name, forms in CONNECTIONS.items():
            more = [COMPILED] * (name == "DLCL" and depth <= settings.compile_up_to)
            module = module_of(name, depth, 4)
            # Each layer reads its input and writes its output, in both directions. Without the
            # compiled ops nothing is counted.
            moved = engine_moved(module)
            nbytes = state * (moved + 4 * depth) if moved else None
            # Every stack, of attention two copies, and the states, gradients and products of the
            # last rows.
            stacks = 1 if name == "DLCL" else 2
            stacked = state * stacks * (sum(map(len, module.pattern)) + 5 * module.rows)
            rows += [
                Row(
                    variant=form, what=name + end, depth=depth, tokens=tokens,
                    counted=form != COMPILED,
                    nbytes=nbytes if form == "deepfast" and not end else None,
                    predicted_bytes=stacked if form == STACK else None,
                )
                for end in ("", *[FORWARD] * settings.mixing_forward)
                for form in (*forms, *more)
            ]  # fmt: skip
        make = partial(MixingCase, settings, depth, rows[0])
        rounds, clock = settings.rounds, settings.clock
        found.append(Turns("mixing alone", rows, make, rounds, clock, "deepfast"))
    return found


class MixingCase:
    """Every connection at one depth, on the same input."""

    def __init__(self, settings: Settings, depth: int, copy_row: Row):
        torch.manual_seed(1)
        self.modules = {name: module_of(name, depth, settings.mixing[1]) for name in CONNECTIONS}
        # Away from 0, where every weight of a row is the same for all tokens.
        for module in self.modules.values():
            perturb(module)
        self.y = torch.randn(settings.mixing, requires_grad=True)
        self.grad = torch.randn(settings.mixing)
        self.copy, copy_row.nbytes = copy_variant()

    def run(self, row: Row) -> None:
        """One run of a form, or of the copy."""
        if row.variant == COPY:
            self.copy()
            return
        name = row.what.removesuffix(FORWARD)
        with torch.set_grad_enabled(name == row.what):
            self.mixed(name, row.variant)
        self.y.grad = None
        self.modules[name].zero_grad(set_to_none=True)

    def mixed(self, name: str, form: str) -> Tensor:
        """The stack's output; with autograd also the gradients."""
        x = self.graph() if form == COMPILED else self.forward(name, form)
        if torch.is_grad_enabled():
            x.backward(self.grad)
        return x

    def forward(self, name: str, form: str) -> Tensor:
        kind = CONNECTIONS[name].get(form, FORMS[LOOP])
        return mixing_alone(kind, self.modules[name], self.y, copying_layer)

    @cached_property
    def graph(self) -> Callable[[], Tensor]:
        """A whole DLCL stack with loops of adds under `torch.compile`."""
        return compiled(lambda: self.forward("DLCL", COMPILED))
