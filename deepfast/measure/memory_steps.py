"""The memory chapter: every policy of an encoder, predicted and measured; the deepest encoder that
the planner fits into a device; and whole steps, counted, also of plain PyTorch."""

import statistics
from functools import partial
from typing import Any

import torch

from deepfast.measure.clock import Row
from deepfast.measure.encoders import DROPOUT, PLAIN_FORMS, EncoderModel
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.memory import POLICIES, Plan, parse_bytes, plan
from deepfast.memory.plan import uniform_peak
from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.table import describe
from deepfast.nn import Packing, TransformerEncoder

PARAMETERS = "parameters"
"""A category of a plan's table."""

BUDGETS = ("2GiB", "4GiB", "8GiB", "16GiB", "24GiB", "80GiB")
MODEL: dict[str, Any] = {"dim": 512, "tokens": 8192, "vocab_size": 32_000, "decoder_layers": 0}
"""Sizes of the planned models. The rest are `plan`'s defaults: bf16 autocast, Adam, dropout,
CUDA."""

HELD_MODEL: dict[str, Any] = {"dim": 64, "vocab_size": 4000, "decoder_layers": 0, "device": "cpu"}
"""Sizes of the counted models: an eighth of `MODEL`, tokens and heads included."""
HELD_BATCH, HELD_LENGTH = 32, 32
HELD_POLICIES = {f"deepfast, {p}": p for p in ("none", "layer+input")}
"""Form -> policy of all layers."""
DTYPES = ("float32", "bfloat16")


# ---- policies ------------------------------------------------------------------------------------


class PolicyCase:
    """One depth: an encoder with dropout, an input and a gradient of its result."""

    def __init__(self, settings: Settings, depth: int):
        torch.manual_seed(settings.seed)
        sizes = predicted(settings, depth, POLICIES[0]).sizes
        self.encoder = TransformerEncoder(
            depth, sizes.dim, sizes.num_heads, sizes.ffn_dim, dropout=DROPOUT
        )
        self.packing = Packing(settings.memory_batch, settings.length)
        self.x = torch.randn(sizes.tokens, sizes.dim, requires_grad=True)
        self.gradient = torch.ones(sizes.tokens, sizes.dim)

    def run(self, policy: str) -> None:
        """Forward and backward with every layer under ``policy``."""
        self.encoder.set_recompute(policy)
        # The first state is made in the step, like the result of an embedding.
        y = self.encoder.forward_packed(self.x * 1, self.packing)
        y.backward(self.gradient)
        self.encoder.zero_grad(set_to_none=True)
        self.x.grad = None


def predicted(settings: Settings, depth: int, policy: str) -> Plan:
    """The plan of `deepfast.memory.plan` for a `PolicyCase`; nothing of it is measured."""
    return plan(
        budget="1TiB", num_layers=depth, dim=settings.memory_dim, tokens=settings.memory_tokens,
        vocab_size=0, decoder_layers=0, dtype="float32", optimizer="none", device="cpu",
        length=settings.length, recompute=policy,
    )  # fmt: skip


def policies(settings: Settings) -> list[Turns]:
    """Every policy at every depth, without the parameters' bytes. At one depth they are timed."""
    found = []
    for depth in settings.depths:
        rows = []
        for policy in POLICIES:
            known = predicted(settings, depth, policy)
            row = Row(variant=policy, depth=depth, tokens=settings.memory_tokens)
            row.predicted_bytes = known.peak - known.table[PARAMETERS]
            rows.append(row)
        make = partial(PolicyCase, settings, depth)
        rounds = settings.rounds if depth == settings.policy_depth else 0
        found.append(Turns("recompute policies", f"{depth} layers", rows, make, rounds))
    return found


def policy_chapter(settings: Settings, rows: list[Row]) -> list[dict]:
    """The rows with ratios: predicted to measured peaks, with and without parameters,
    and times to the time of `none`."""
    keep = next((r for r in rows if r.seconds and r.variant == POLICIES[0]), None)
    found = []
    for row in rows:
        known = predicted(settings, row.depth, row.variant)
        parameters = known.table[PARAMETERS]
        relative = None
        if row.seconds and keep is not None:
            # An interrupted round has measured fewer policies.
            pairs = zip(row.seconds, keep.seconds, strict=False)
            relative = statistics.median(own / other for own, other in pairs)
        found.append(
            row.as_dict()
            | {
                "ratio": ratio(row),
                "ratio_with_parameters": ratio(row, parameters),
                "relative": relative,
                "parameter_bytes": parameters,
                "expected_relative": known.time,
            }
        )
    return found


def ratio(row: Row, more: int = 0) -> float | None:
    """Predicted over measured peak, with ``more`` bytes in both; None where one is missing."""
    if row.predicted_bytes is None or row.peak_bytes is None:
        return None
    return (row.predicted_bytes + more) / (row.peak_bytes + more)


# ---- the deepest model ---------------------------------------------------------------------------


def planned(budget: str) -> Plan | None:
    """deepfast's deepest model within ``budget``; None if not even one layer fits."""
    try:
        return plan(budget=budget, **MODEL)
    except ValueError:
        return None


def planned_sizes() -> Sizes:
    """The sizes of `MODEL` with one layer."""
    return plan(budget="1TiB", num_layers=1, **MODEL).sizes


def deepest() -> dict:
    """The plan of the deepest model for every budget. Nothing here was measured."""
    plans = []
    for budget in BUDGETS:
        row: dict = {"budget": budget, "bytes": parse_bytes(budget), "layers": 0}
        if (found := planned(budget)) is not None:
            row |= {"layers": found.sizes.num_layers, "time": found.time}
            row["policies"] = describe(found.recompute)
        plans.append(row)
    return {"model": MODEL, "plans": plans}


# ---- whole steps, counted ------------------------------------------------------------------------


class HeldCase:
    """Small models of one size. A run makes one and trains it for a step, with its parameters,
    their gradients and the optimizer's state."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        shape = sizes.tokens // sizes.length, sizes.length
        self.tokens, self.target = (torch.randint(sizes.vocab_size, shape) for _ in range(2))

    def run(self, form: str) -> None:
        model = EncoderModel(self.sizes, HELD_POLICIES.get(form, form))
        count = sum(p.numel() for p in model.parameters())
        moments = torch.empty(OPTIMIZERS[self.sizes.optimizer] * count, dtype=torch.uint8)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.sizes.dtype == "bfloat16"):
            loss = model.loss(self.tokens, self.target)
        loss.backward()
        del moments


def held(
    settings: Settings, forms: tuple[str, ...] = (*PLAIN_FORMS, *HELD_POLICIES)
) -> list[Turns]:
    """Every form at every small depth and dtype, counted once; deepfast's with its prediction."""
    found = []
    for depth in settings.held_depths:
        for dtype in DTYPES:
            sizes, rows = held_sizes(depth, dtype), []
            for form in forms:
                policy = HELD_POLICIES.get(form)
                peak = uniform_peak(sizes, policy) if policy else None
                rows.append(Row(variant=form, depth=depth, what=dtype, predicted_bytes=peak,
                                tokens=sizes.tokens))  # fmt: skip
            make = partial(HeldCase, sizes)
            found.append(Turns("whole steps", f"{depth} layers, {dtype}", rows, make))
    return found


def held_chapter(rows: list[Row]) -> dict:
    """Sizes, and the rows with the ratio of predicted to measured peaks."""
    found = [row.as_dict() | {"ratio": ratio(row)} for row in rows]
    return {"tokens": HELD_BATCH * HELD_LENGTH, **HELD_MODEL, "rows": found}


def held_sizes(depth: int, dtype: str) -> Sizes:
    """The sizes of a small model."""
    return plan(
        budget="1TiB", num_layers=depth, dtype=dtype, tokens=HELD_BATCH * HELD_LENGTH,
        length=HELD_LENGTH, **HELD_MODEL,
    ).sizes  # fmt: skip
