"""Training steps of encoders of several depths with different connections: time and memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.measure.clock import Row
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    COMPILED,
    DENSEFORMER,
    FORMS,
    LOOP,
    PER_ROW,
    RESIDUAL,
    STACK,
    InStack,
)
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.nn import Packing, TransformerEncoder

VARIANTS = (RESIDUAL, "deepfast", DENSEFORMER, LOOP, STACK)
"""Of an encoder with DLCL, in the order of every table. The last is the form that losses and
gradients are compared with: the DLCL paper's code."""

ATTENTION, ATTENTION_PER_ROW = "attention residuals", "attention residuals, per row"
"""Variants with two reads a layer, by deepfast and by one fused pass for each row."""

REPLACED = FORMS | {ATTENTION_PER_ROW: ATTENTION_FORMS[PER_ROW]}
"""Variant -> the form that computes its connection."""


class StepCase:
    """A step at one depth: an input, a target, and all variants over the same layers. Those with
    DLCL share every parameter."""

    def __init__(
        self, settings: Settings, depth: int, variants: Sequence[str] = VARIANTS,
        activation: str = "relu",
    ):  # fmt: skip
        torch.manual_seed(1)
        sizes = (depth, settings.dim, settings.num_heads, settings.ffn_dim)
        options: dict[str, Any] = {"dropout": 0.0, "activation": activation}
        self.encoder = TransformerEncoder(*sizes, **options)
        dlcl = self.encoder.connection.depth
        residuals = TransformerEncoder(*sizes, connection="attnres", **options).connection
        # Away from the initial averages: equal weights would hide a mix-up of layers.
        with torch.no_grad():
            dlcl.weight.mul_(1 + 0.3 * torch.randn_like(dlcl.weight))
            dlcl.norm_weight.add_(0.1 * torch.randn_like(dlcl.norm_weight))
            residuals.depth.query.normal_(std=settings.dim**-0.5)

        def beside(name: str) -> TransformerEncoder:
            """An encoder of the same layers; the norms of sublayers are others."""
            reads = name.startswith(ATTENTION)
            kind = "attnres" if reads else "residual" if name == RESIDUAL else "dlcl"
            with torch.device("meta"):
                made = TransformerEncoder(*sizes, connection=kind, **options)
            made.layers = self.encoder.layers
            outer = residuals if reads else self.encoder.connection
            made.connection.norms = outer.norms
            if name != RESIDUAL:
                form = REPLACED.get(name)
                inner = outer.depth if form is None else InStack(form, outer.depth)
                setattr(made.connection, outer.child, inner)
            return made

        self.models = {name: beside(name) for name in variants}
        self.models["deepfast"] = self.encoder
        self.x = torch.randn(settings.tokens, settings.dim)
        self.target = torch.randn(settings.tokens, settings.dim)
        self.packing = Packing(settings.batch, settings.length)

    def step(self, variant: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward: the loss, and the gradients of the parameters by name."""
        model = self.models[variant]
        out = model.forward_packed(self.x, self.packing)
        loss = F.mse_loss(out, self.target)
        loss.backward()
        # A form in the place of a module would lengthen the names.
        named = self.encoder.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def run(self, row: Row) -> None:
        """A step whose results are discarded."""
        self.step(row.variant)


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
            if row.variant == STACK:
                states = (10 + settings.ffn_dim // settings.dim) * depth + states_of_stacks(depth)
                row.predicted_bytes = states * settings.state_bytes
        make = partial(StepCase, settings, depth, names)
        found.append(Turns("a step", rows, make, settings.rounds, settings.clock))
    return found


def states_of_stacks(depth: int) -> int:
    """The number of states that stack and sum keeps: every stack, the states of each row, and the
    gradient and product of the last stack."""
    rows = depth + 1
    return rows * (rows + 1) // 2 + 5 * rows
