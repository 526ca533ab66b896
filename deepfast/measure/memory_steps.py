"""Recompute policies of an encoder, predicted and measured, and plain PyTorch beside them."""

import statistics
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast.measure.clock import Row
from deepfast.measure.forms import FORMS, RESIDUAL, STACK
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.measure.steps import states_of_stacks
from deepfast.memory import POLICIES, Plan, plan
from deepfast.nn import DLCL, Packing, TransformerEncoder

DROPOUT = 0.1
CHECKPOINTED = "plain, checkpointed"
PLAIN_FORMS = (RESIDUAL, CHECKPOINTED, STACK)
"""Encoders of plain torch: no depth connection; no depth connection and `torch.utils.checkpoint`
around each layer; DLCL as in the paper's code."""


class PlainEncoder(nn.Module):
    """A pre-norm encoder of plain torch, in one of `PLAIN_FORMS`: (B, S, D) to (B, S, D)."""

    def __init__(self, layers: int, dim: int, num_heads: int, ffn_dim: int, form: str):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.TransformerEncoderLayer(
                dim, num_heads, ffn_dim, DROPOUT, batch_first=True, norm_first=True
            )
            # As in deepfast's encoder only the branches have dropout.
            layer.self_attn.dropout, layer.dropout = 0.0, nn.Identity()  # type: ignore[assignment]
            self.layers.append(layer)
        self.form, self.norm = form, nn.LayerNorm(dim)
        self.dlcl = DLCL(layers, dim) if form == STACK else None

    def forward(self, x: Tensor) -> Tensor:
        connect = (lambda y: y) if self.dlcl is None else FORMS[STACK](self.dlcl)
        x = connect(x)
        for layer in self.layers:
            if self.form == CHECKPOINTED:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = connect(layer(x))
        return self.norm(x)


class PolicyCase:
    """One depth: encoders with dropout, an input and a gradient of their result."""

    def __init__(self, settings: Settings, depth: int):
        torch.manual_seed(1)
        sizes = predicted(settings, depth, POLICIES[0]).sizes
        shape = depth, sizes.dim, sizes.num_heads, sizes.ffn_dim
        self.encoder = TransformerEncoder(*shape, dropout=DROPOUT)
        self.plain = cache(lambda form: PlainEncoder(*shape, form))
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
                row.predicted_bytes = known.peak - known.table["parameters"]
            elif row.variant == STACK:
                states = states_of_stacks(depth) + 20 * depth
                row.predicted_bytes = 4 * states * settings.memory_tokens * settings.memory_dim
        make = partial(PolicyCase, settings, depth)
        rounds = settings.rounds if depth == settings.policy_depth else 0
        found.append(Turns("recompute policies", rows, make, rounds, settings.clock))
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
