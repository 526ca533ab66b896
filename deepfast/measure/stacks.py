"""Training steps of encoders, time and memory: of several connections over depth, and of recompute
policies, with encoders of plain PyTorch beside them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    perturb,
)
from deepfast.measure.settings import Settings, Size
from deepfast.measure.turns import Row, Turns
from deepfast.memory import POLICIES, Plan, plan
from deepfast.nn import DLCL, Packing, TransformerEncoder

VARIANTS = (RESIDUAL, "deepfast", DENSEFORMER, LOOP, STACK)
"""Of an encoder with DLCL, in the order of every table. The last is the form that outputs and
gradients are compared with: the DLCL paper's code."""

ATTENTION, ATTENTION_PER_ROW = "attention residuals", "attention residuals, per row"
"""Variants with two reads a layer, by deepfast and by one fused pass for each row."""

KINDS: dict[str, tuple[str, Callable | None]] = {
    **{name: ("dlcl", form) for name, form in FORMS.items()},
    "deepfast": ("dlcl", None),
    RESIDUAL: ("residual", None),
    ATTENTION: ("attnres", None),
    ATTENTION_PER_ROW: ("attnres", ATTENTION_FORMS[PER_ROW]),
}
"""Variant -> the connection of its encoder, and the form that computes it in place of deepfast."""

CHECKPOINTED = "plain, checkpointed"
PLAIN_FORMS = (RESIDUAL, CHECKPOINTED, STACK)
"""Encoders of plain torch: no depth connection; no depth connection and `torch.utils.checkpoint`
around each layer; DLCL as in the paper's code."""


class StepCase:
    """Steps at one depth: an input, a gradient of the output, and all variants over the same
    layers. Those with one connection share every parameter."""

    def __init__(
        self, size: Size, depth: int, variants: Iterable[str] = VARIANTS, dropout: float = 0.0,
        activation: str = "relu",
    ):  # fmt: skip
        torch.manual_seed(1)
        self.size, self.depth, self.dropout = size, depth, dropout
        self.options: dict[str, Any] = {"dropout": dropout, "activation": activation}
        self.encoders: dict[str, TransformerEncoder] = {}
        self.models = {variant: self.model(variant) for variant in variants}
        self.packing = Packing(size.batch, size.length)
        self.x = torch.randn(size.tokens, size.dim, requires_grad=True)
        self.gradient = torch.randn(size.tokens, size.dim)

    def model(self, variant: str) -> nn.Module:
        """The encoder of a variant."""
        return self.encoder(KINDS[variant][0])

    def encoder(self, connection: str) -> TransformerEncoder:
        """One encoder for each connection, all with the same layers."""
        if connection not in self.encoders:
            made = TransformerEncoder(
                self.depth, *self.size.sizes, connection=connection, **self.options
            )
            # Equal weights would hide a mix-up of layers.
            if made.connection.depth is not None:
                perturb(made.connection.depth)
            for other in self.encoders.values():
                made.layers = other.layers
            self.encoders[connection] = made
        return self.encoders[connection]

    def step(self, variant: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward: the output, and the gradients of the parameters by name."""
        # The first state is made in the step, like the result of an embedding.
        y = self.forward(variant, self.x * 1)
        y.backward(self.gradient)
        named = self.models[variant].named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        self.models[variant].zero_grad(set_to_none=True)
        self.x.grad = None
        return y.detach(), gradients

    def forward(self, variant: str, x: Tensor) -> Tensor:
        encoder, form = cast(TransformerEncoder, self.models[variant]), KINDS[variant][1]
        connection: Any = encoder.connection
        depth = connection.depth
        if form is not None:
            setattr(connection, connection.child, InStack(form, depth))
        y = encoder.forward_packed(x, self.packing)
        if form is not None:
            setattr(connection, connection.child, depth)
        return y

    def run(self, row: Row) -> None:
        """A step whose results are discarded."""
        self.step(row.variant)


def steps(settings: Settings, base: str, variants: Iterable[str] = VARIANTS) -> list[Turns]:
    """A step of every variant at every depth; a compiled one up to ``settings.compile_up_to``."""
    size, found = settings.step, []
    for depth in settings.depths:
        names = [*variants, *[COMPILED] * (depth <= settings.compile_up_to)]
        rows = [
            Row(variant=name, depth=depth, tokens=size.tokens, counted=name != COMPILED)
            for name in names
        ]
        for row in rows:
            if row.variant == STACK:
                row.predicted_bytes = stacked_bytes(size, depth, 14)
        make = partial(StepCase, size, depth, names)
        found.append(Turns("a step", rows, make, settings.rounds, settings.clock, base))
    return found


def stacked_bytes(size: Size, depth: int, states: int) -> int:
    """What stack and sum keeps: every stack, the states of each row, the gradient and product of
    the last stack, and this many states of each layer."""
    rows = depth + 1
    return 4 * size.tokens * size.dim * (rows * (rows + 1) // 2 + 5 * rows + states * depth)


# ---- recompute policies --------------------------------------------------------------------------


class PolicyCase(StepCase):
    """Encoders with dropout, their layers under one policy or of plain torch."""

    def model(self, variant: str) -> nn.Module:
        return self.encoder("dlcl") if variant in POLICIES else self.plain

    @cached_property
    def plain(self) -> nn.ModuleList:
        """Pre-norm layers of plain torch, the last norm, and a DLCL."""
        dim, heads, ffn_dim = self.size.sizes
        found = nn.ModuleList()
        for _ in range(self.depth):
            layer = nn.TransformerEncoderLayer(
                dim, heads, ffn_dim, self.dropout, batch_first=True, norm_first=True
            )
            # As in deepfast's encoder only the branches have dropout.
            layer.self_attn.dropout, layer.dropout = 0.0, nn.Identity()  # type: ignore[assignment]
            found.append(layer)
        return found.extend([nn.LayerNorm(dim), DLCL(self.depth, dim)])

    def forward(self, variant: str, x: Tensor) -> Tensor:
        if variant in POLICIES:
            self.encoder("dlcl").set_recompute(variant)
            return self.encoder("dlcl").forward_packed(x, self.packing)
        *layers, norm, dlcl = self.plain
        connect = FORMS[STACK](cast(DLCL, dlcl)) if variant == STACK else lambda y: y
        x = connect(x.unflatten(0, (self.size.batch, self.size.length)))
        for layer in layers:
            if variant == CHECKPOINTED:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = connect(layer(x))
        return norm(x).flatten(0, 1)


def predicted(size: Size, depth: int, policy: str) -> Plan:
    """The plan of `deepfast.memory.plan` for a `PolicyCase`; nothing of it is measured."""
    return plan(
        budget="1TiB", num_layers=depth, dim=size.dim, tokens=size.tokens, vocab_size=0,
        decoder_layers=0, dtype="float32", optimizer="none", device="cpu", length=size.length,
        recompute=policy,
    )  # fmt: skip


def policies(settings: Settings, plain: Sequence[str] = ()) -> list[Turns]:
    """Every policy at every depth, without the parameters' bytes, and forms of plain PyTorch beside
    them. At one depth they are timed."""
    size, found = settings.memory, []
    for depth in settings.depths:
        names = (*POLICIES, *plain)
        rows = [Row(variant=name, depth=depth, tokens=size.tokens) for name in names]
        for row in rows:
            if row.variant in POLICIES:
                known = predicted(size, depth, row.variant)
                row.predicted_bytes = known.peak - known.table["parameters"]
                row.expected = known.time
            elif row.variant == STACK:
                row.predicted_bytes = stacked_bytes(size, depth, 20)
        make = partial(PolicyCase, size, depth, names, 0.1)
        rounds = settings.rounds if depth == settings.policy_depth else 0
        found.append(Turns("recompute policies", rows, make, rounds, settings.clock, POLICIES[0]))
    return found
