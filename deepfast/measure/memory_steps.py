"""Recompute policies of an encoder, predicted and measured, and plain PyTorch beside them."""

import statistics
from collections.abc import Sequence
from functools import cache, partial

import torch

from deepfast.measure.clock import Row
from deepfast.measure.encoders import DROPOUT, STACK, PlainEncoder
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.measure.steps import states_of_stacks
from deepfast.memory import POLICIES, Plan, plan
from deepfast.nn import Packing, TransformerEncoder

PARAMETERS = "parameters"
"""A category of a plan's table."""


class PolicyCase:
    """One depth: encoders with dropout, an input and a gradient of their result."""

    def __init__(self, settings: Settings, depth: int):
        torch.manual_seed(settings.seed)
        sizes = predicted(settings, depth, POLICIES[0]).sizes
        shape = depth, sizes.dim, sizes.num_heads, sizes.ffn_dim
        self.encoder = TransformerEncoder(*shape, dropout=DROPOUT)
        self.plain = cache(lambda form: PlainEncoder(*shape, form=form))
        self.packing = Packing(settings.memory_batch, settings.length)
        self.x = torch.randn(sizes.tokens, sizes.dim, requires_grad=True)
        self.gradient = torch.ones(sizes.tokens, sizes.dim)

    def run(self, row: Row) -> None:
        """Forward and backward, with every layer under one policy or of plain PyTorch."""
        # The first state is made in the step, like the result of an embedding.
        x = self.x * 1
        if row.variant in POLICIES:
            model: torch.nn.Module = self.encoder
            self.encoder.set_recompute(row.variant)
            y = self.encoder.forward_packed(x, self.packing)
        else:
            model = self.plain(row.variant)
            y = model(x.unflatten(0, (self.packing.batch, self.packing.length))).flatten(0, 1)
        y.backward(self.gradient)
        model.zero_grad(set_to_none=True)
        self.x.grad = None


def predicted(settings: Settings, depth: int, policy: str) -> Plan:
    """The plan of `deepfast.memory.plan` for a `PolicyCase`; nothing of it is measured."""
    return plan(
        budget="1TiB", num_layers=depth, dim=settings.memory_dim, tokens=settings.memory_tokens,
        vocab_size=0, decoder_layers=0, dtype="float32", optimizer="none", device="cpu",
        length=settings.length, recompute=policy,
    )  # fmt: skip


def policies(settings: Settings, plain: Sequence[str] = ()) -> list[Turns]:
    """Every policy at every depth, without the parameters' bytes, and forms of plain PyTorch beside
    them. At one depth they are timed."""
    found = []
    for depth in settings.depths:
        rows = [
            Row(variant=name, depth=depth, tokens=settings.memory_tokens)
            for name in (*POLICIES, *plain)
        ]
        for row in rows:
            if row.variant in POLICIES:
                known = predicted(settings, depth, row.variant)
                row.predicted_bytes = known.peak - known.table[PARAMETERS]
            elif row.variant == STACK:
                states = states_of_stacks(depth) + 20 * depth
                row.predicted_bytes = 4 * states * settings.memory_tokens * settings.memory_dim
        make = partial(PolicyCase, settings, depth)
        rounds = settings.rounds if depth == settings.policy_depth else 0
        label = f"{depth} layers"
        found.append(Turns("recompute policies", label, rows, make, rounds, settings.clock))
    return found


def policy_chapter(settings: Settings, rows: list[Row]) -> list[dict]:
    """The rows of `policies` with ratios: of predicted to measured peaks, of times to the time of
    the first policy, and what the planner expects of this."""
    keep = next((r for r in rows if r.seconds and r.variant == POLICIES[0]), None)
    found = []
    for row in rows:
        relative = ratio = None
        if row.seconds and keep is not None:
            # An interrupted round has measured fewer variants.
            pairs = zip(row.seconds, keep.seconds, strict=False)
            relative = statistics.median(own / other for own, other in pairs)
        if row.variant in POLICIES and row.predicted_bytes and row.peak_bytes:
            ratio = row.predicted_bytes / row.peak_bytes
        expected = None
        if row.variant in POLICIES:
            expected = predicted(settings, row.depth or 1, row.variant).time
        ratios = {"ratio": ratio, "relative": relative, "expected_relative": expected}
        found.append(row.as_dict() | ratios)
    return found
