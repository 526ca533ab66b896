"""A plan as text."""

from typing import TYPE_CHECKING

from deepfast.memory.units import format_bytes

if TYPE_CHECKING:
    from deepfast.memory.plan import Plan, WhatFits


def describe(policies: tuple[str, ...], decoder: tuple[str, ...] = ()) -> str:
    """Policies in words: "12 history, 18 lean from the bottom; decoder keep"."""

    def side(names: tuple[str, ...]) -> str:
        runs: list[list] = []
        for name in names:
            if runs and runs[-1][1] == name:
                runs[-1][0] += 1
            else:
                runs.append([1, name])
        if len(runs) == 1:
            return runs[0][1]
        return ", ".join(f"{count} {name}" for count, name in runs) + " from the bottom"

    return side(policies) + (f"; decoder {side(decoder)}" if decoder else "")


def advise(found: "WhatFits", *, budget: bool = True) -> str:
    """One sentence; ``budget``: whether to say what the sizes as they are need, where smaller ones
    are named too."""
    if found.policies:
        policies = describe(found.policies, found.decoder_policies)
        return f"it fits with memory policies {policies}"
    sizes = (found.layers, "layers"), (found.tokens, "tokens"), (found.width, "wide")
    parts = [f"{count} {noun}" for count, noun in sizes if count is not None]
    needed = format_bytes(found.budget, up=True)
    if not parts:
        return f"it needs a budget of {needed}"
    smaller = f"what fits is {' or '.join(parts)}"
    return f"{smaller}, and as it is a budget of {needed}" if budget else smaller


def lines(plan: "Plan") -> list[str]:
    """Sizes, policies, the table by category, and whether it fits; where no budget was given, what
    it needs."""
    sizes = plan.sizes
    decoder = f", {sizes.decoder_layers} decoder layers ({sizes.decoder_connection})"
    peak = max(plan.peak, 1)
    table = [*plan.table.items(), ("peak", plan.peak)]
    if plan.solved == "budget":
        verdict = f"it needs a budget of {format_bytes(plan.budget, up=True)}"
    else:
        table.append(("budget", plan.budget))
        verdict = "it fits" if plan.fits else f"it does not fit: {plan.advice}"
    return [
        f"{sizes.layers} encoder layers ({sizes.connection})"
        f"{decoder if sizes.decoder_layers else ''}, {sizes.norm}-norm, {sizes.width} wide, "
        f"{sizes.heads} heads, {sizes.ffn} feed-forward, {sizes.parameters:,} parameters",
        f"{sizes.tokens:,} tokens in a micro-batch, {sizes.accumulate} in a step, {sizes.dtype}, "
        f"{sizes.optimizer}, {sizes.device}",
        f"memory policies: {describe(plan.policies, plan.decoder_policies)}",
        f"step time: {plan.time:.2f} times that of keep, by floating-point operations",
        *(f"{name:18}{format_bytes(size):>12}{size / peak:6.0%}" for name, size in table),
        verdict,
    ]
