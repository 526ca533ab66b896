"""A plan as text."""

from typing import TYPE_CHECKING

from .units import format_bytes

if TYPE_CHECKING:
    from .plan import Plan


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


def lines(plan: "Plan") -> list[str]:
    """Sizes, policies, the table by category, and whether it fits."""
    sizes = plan.sizes
    decoder = f", {sizes.decoder_layers} decoder layers ({sizes.decoder_connection})"
    peak = max(plan.peak, 1)
    table = [*plan.table.items(), ("peak", plan.peak), ("budget", plan.budget)]
    return [
        f"{sizes.layers} encoder layers ({sizes.connection})"
        f"{decoder if sizes.decoder_layers else ''}, {sizes.norm}-norm, {sizes.width} wide, "
        f"{sizes.heads} heads, {sizes.ffn} feed-forward, {sizes.parameters:,} parameters",
        f"{sizes.tokens:,} tokens in a micro-batch, {sizes.accumulate} in a step, {sizes.dtype}, "
        f"{sizes.optimizer}, {sizes.device}",
        f"memory policies: {describe(plan.policies, plan.decoder_policies)}",
        f"step time: {plan.time:.2f} times that of keep, by floating-point operations",
        *(f"{name:18}{format_bytes(size):>12}{size / peak:6.0%}" for name, size in table),
        "it fits" if plan.fits else f"it does not fit: {plan.advice}",
    ]
