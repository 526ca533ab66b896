"""Memory over depth: every policy of a plan's model, and the same model in plain PyTorch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deepfast.measure.pictures import BLUE, COLORS, WIDTH, Curve, Look, depth_figure, save
from deepfast.memory.eager import EAGER, RESIDUAL, eager_peak
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.policies import MIXING, POLICIES
from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes

DEPTHS = (6, 12, 20, 30, 60, 100, 200)
GREENS = ("#54ab83", "#3f9d75", "#26875f", COLORS["deepfast"], "#063b2a")
NAMES = {policy: f"deepfast, {policy}" for policy in POLICIES}
"""Policy -> name of its curve."""
COLOR_OF = dict(zip(NAMES.values(), GREENS, strict=True)) | {f: COLORS.get(f, BLUE) for f in EAGER}
LOOK = Look(COLOR_OF, strong=(NAMES["keep"], NAMES["history"]), dashed=(RESIDUAL,))
MEMORY_HEIGHT = 3.9
"""Inches: high enough for nine names below each other."""


def curves(sizes: Sizes) -> dict[str, list[tuple[int, float]]]:
    """Name -> (layers, GiB): each policy, the same on all layers, and each plain form. All include
    the same margin for a device's allocator."""
    mixes = sizes.connection in MIXING
    found: dict[str, list[tuple[int, float]]] = {}
    for layers in DEPTHS:
        deep = replace(sizes, layers=layers)
        peaks = {form: eager_peak(deep, form) for form in EAGER}
        peaks |= {NAMES[p]: uniform_peak(deep, p) for p in POLICIES if mixes or p != "history"}
        for name, peak in peaks.items():
            found.setdefault(name, []).append((layers, peak / 2**30))
    return found


def memory_figure(found: Mapping[str, Curve], title: str, budget: int | None = None):
    """The curves of `curves`, with a line at the budget."""
    line = None if budget is None else (f"budget {format_bytes(budget)}", budget / 2**30)
    return depth_figure(found, LOOK, title, line=line, size=(WIDTH, MEMORY_HEIGHT))


def title_of(sizes: Sizes) -> str:
    """The title of a picture of ``sizes``, one line."""
    return f"predicted peak of a step, GiB: {sizes.width} wide, {sizes.tokens:,} tokens"


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending."""
    save(memory_figure(curves(plan.sizes), title_of(plan.sizes), plan.budget), path)
