"""A plan as values and as text."""

from dataclasses import asdict, dataclass
from itertools import groupby

from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """What would fit where a plan does not fit: other policies or, failing that, smaller sizes."""

    recompute: tuple[str, ...] = ()
    """Policies of the encoder's layers; empty where no policies save enough."""
    decoder_recompute: tuple[str, ...] = ()
    num_layers: int | None = None
    """The most that fit with the other sizes unchanged; None where policies fit, or not even one
    layer."""
    tokens: int | None = None
    dim: int | None = None
    budget: int
    """Bytes that the unchanged sizes need under the policies with the lowest peak."""


@dataclass(frozen=True)
class Plan:
    """The plan of a training step."""

    sizes: Sizes
    budget: int
    """Bytes."""
    recompute: tuple[str, ...]
    """Policies of the encoder's layers, from the bottom."""
    decoder_recompute: tuple[str, ...]
    table: dict[str, int]
    """Category -> bytes at the peak of the step."""
    time: float
    """Predicted time of a step relative to `none` everywhere, by floating-point operations."""
    what_fits: WhatFits | None
    """None where the plan fits."""
    solved: str | None
    """Which of budget, num_layers, dim and tokens was not given and has been found."""

    def __repr__(self) -> str:
        policies = describe(self.recompute, self.decoder_recompute)
        peak, budget = format_bytes(self.peak, up=True), format_bytes(self.budget)
        return f"Plan({self.sizes.num_layers} layers, {policies}, peak {peak} of {budget})"

    @property
    def peak(self) -> int:
        """Predicted peak bytes of a step."""
        return sum(self.table.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget

    @property
    def advice(self) -> str:
        """One sentence that says what would fit; empty where the plan fits."""
        return "" if self.what_fits is None else advise(self.what_fits)

    def to_dict(self) -> dict:
        """Plain values only."""
        found = asdict(self)
        policies = {name: list(found[name]) for name in ("recompute", "decoder_recompute")}
        derived = {"peak": self.peak, "fits": self.fits, "advice": self.advice}
        return found.pop("sizes") | found | policies | derived


def describe(policies: tuple[str, ...], decoder: tuple[str, ...] = ()) -> str:
    """Policies as text, such as "12 layer+input, 18 ffn from the bottom; decoder none"."""

    def side(names: tuple[str, ...]) -> str:
        runs = [f"{len(list(same))} {name}" for name, same in groupby(names)]
        return names[0] if len(runs) == 1 else ", ".join(runs) + " from the bottom"

    return side(policies) + (f"; decoder {side(decoder)}" if decoder else "")


def advise(found: WhatFits) -> str:
    """One sentence that says what fits."""
    if found.recompute:
        policies = describe(found.recompute, found.decoder_recompute)
        return f"it fits with recompute policies {policies}"
    sizes = (found.num_layers, "layers"), (found.tokens, "tokens"), (found.dim, "wide")
    parts = [f"{count} {noun}" for count, noun in sizes if count is not None]
    needed = format_bytes(found.budget, up=True)
    if not parts:
        return f"it needs a budget of {needed}"
    return f"what fits is {' or '.join(parts)}; unchanged it needs a budget of {needed}"


def lines(plan: Plan) -> list[str]:
    """Sizes, policies, the table by category, and whether the plan fits or what it needs."""
    sizes = plan.sizes
    decoder = f", {sizes.decoder_layers} decoder layers ({sizes.decoder_connection})"
    keys = "" if sizes.num_kv_heads is None else f" ({sizes.num_kv_heads} of the keys)"
    ranks = f", one of {sizes.ranks} ranks, {sizes.parallel}" if sizes.ranks > 1 else ""
    peak = max(plan.peak, 1)
    table = [*plan.table.items(), ("peak", plan.peak)]
    if plan.solved == "budget":
        verdict = f"it needs a budget of {format_bytes(plan.budget, up=True)}"
    else:
        table.append(("budget", plan.budget))
        verdict = "it fits" if plan.fits else f"it does not fit: {plan.advice}"
    return [
        f"{sizes.num_layers} encoder layers ({sizes.connection})"
        f"{decoder if sizes.decoder_layers else ''}, {sizes.norm}-norm, {sizes.dim} wide, "
        f"{sizes.num_heads} heads{keys}, {sizes.ffn_dim} feed-forward, "
        f"{sizes.parameters:,} parameters",
        f"{sizes.tokens:,} tokens in a micro-batch, {sizes.accumulate} in a step, {sizes.dtype}, "
        f"{sizes.optimizer}, {sizes.device}{ranks}",
        f"recompute policies: {describe(plan.recompute, plan.decoder_recompute)}",
        f"step time: {plan.time:.2f} times that of none, by floating-point operations",
        *(f"{name:18}{format_bytes(size):>12}{size / peak:6.0%}" for name, size in table),
        verdict,
    ]
