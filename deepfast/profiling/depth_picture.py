"""Memory over depth: every policy of a plan's model, and the same model in plain PyTorch."""

from dataclasses import replace
from pathlib import Path

import matplotlib

from deepfast.memory.eager import EAGER, eager_peak
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.policies import POLICIES
from deepfast.memory.units import format_bytes
from deepfast.profiling.pictures import COLORS, STYLE, depth_figure

DEPTHS = (6, 12, 20, 30, 60, 100, 200)
GREENS = ("#7cc8a5", "#4fae85", "#2b9369", COLORS["deepfast"], "#07402e")
PLAIN = ("stack and sum", "loop of adds", "plain residual", "loop of adds, compiled")
PICTURE_COLORS = dict(zip(POLICIES, GREENS, strict=True)) | {
    form: COLORS[like] for form, like in zip(EAGER, PLAIN, strict=True)
}


def curves(plan: Plan) -> dict[str, list[tuple[int, float]]]:
    """Name to (layers, GiB): each policy on all layers alike, and each plain form."""
    dlcl = plan.sizes.connection == "dlcl"
    found: dict[str, list[tuple[int, float]]] = {}
    for layers in DEPTHS:
        sizes = replace(plan.sizes, layers=layers)
        peaks = {form: eager_peak(sizes, form) for form in EAGER}
        peaks |= {p: uniform_peak(sizes, p) for p in POLICIES if dlcl or p != "history"}
        for name, peak in peaks.items():
            found.setdefault(name, []).append((layers, peak / 2**30))
    return found


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending."""
    budget = plan.budget / 2**30
    figure = depth_figure(
        curves(plan), PICTURE_COLORS,
        title=f"peak GiB, {plan.sizes.width} wide, {plan.sizes.tokens:,} tokens",
        strong=POLICIES, dashed=("plain residual",),
        line=(f"budget {format_bytes(plan.budget)}", budget),
    )  # fmt: skip
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=200, bbox_inches="tight", facecolor="white")
