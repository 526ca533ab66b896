"""The connection of a whole stack alone, whose layers only copy: deepfast beside plain forms."""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from deepfast.connections import BLOCKS
from deepfast.measure.clock import COPY, Row, copy_variant
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    COMPILED,
    DENSEFORMER,
    FORMS,
    LOOP,
    PER_ROW,
    STACK,
    copying_layer,
    mixing_alone,
)
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.measure.traffic import engine_moved
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
    found = []
    passes = ("", FORWARD) if settings.mixing_forward else ("",)
    for depth in settings.mixing_depths:
        rows = [Row(variant=COPY, what=COPY, depth=depth, tokens=settings.mixing_tokens)]
        for name, forms in CONNECTIONS.items():
            names = list(forms)
            if name == "DLCL" and depth <= settings.compile_up_to:
                names.append(COMPILED)
            rows += [_row(settings, depth, name, end, form) for end in passes for form in names]
        make = partial(MixingCase, settings, depth, rows[0])
        found.append(Turns("mixing alone", rows, make, settings.rounds, settings.clock))
    return found


def _row(settings: Settings, depth: int, name: str, end: str, form: str) -> Row:
    state = 4 * settings.mixing_tokens * settings.mixing_dim
    row = Row(variant=form, what=name + end, depth=depth, tokens=settings.mixing_tokens,
              counted=form != COMPILED)  # fmt: skip
    module = module_of(name, depth, settings.mixing_dim)
    if form == "deepfast" and not end:
        # Each layer reads its input and writes its output, in both directions.
        row.nbytes = state * (engine_moved(module.pattern, module.continues) + 4 * depth)
    if form == STACK:
        # Every stack, of attention two copies, and the states, gradients and products of the last
        # rows.
        stacks = 1 if name == "DLCL" else 2
        row.predicted_bytes = state * stacks * (sum(map(len, module.pattern)) + 5 * module.rows)
    return row


class MixingCase:
    """Every connection at one depth, on the same input."""

    def __init__(self, settings: Settings, depth: int, copy_row: Row):
        torch.manual_seed(1)
        size = settings.mixing_tokens, settings.mixing_dim
        self.modules = {name: module_of(name, depth, size[1]) for name in CONNECTIONS}
        # Away from 0, where every weight of a row is the same for all tokens.
        with torch.no_grad():
            for module in self.modules.values():
                for name, parameter in module.named_parameters():
                    if name.startswith("query"):
                        parameter.normal_(std=0.1 * parameter.shape[-1] ** -0.5)
        self.y, self.grad = torch.randn(size, requires_grad=True), torch.randn(size)
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
        # A variant for each depth, with autograd and without.
        torch._dynamo.config.recompile_limit = 256
        return torch.compile(lambda: self.forward("DLCL", COMPILED), fullgraph=True, dynamic=False)
