"""Memory over depth: every policy of a plan's model, and the same model in plain PyTorch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deepfast.measure.pictures import (
    COLORS,
    Curve,
    depth_figure,
    inline,
    save,
)
from deepfast.memory.eager import EAGER, eager_peak
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.policies import MIXING, POLICIES
from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes

DEPTHS = (6, 12, 20, 30, 60, 100, 200)
GREENS = ("#54ab83", "#3f9d75", "#26875f", COLORS["deepfast"], "#063b2a")
BLUE = "#2f6db5"
NAMES = {policy: f"deepfast, {policy}" for policy in POLICIES}
"""Policy -> name of its curve."""
PICTURE_COLORS = dict(zip(NAMES.values(), GREENS, strict=True)) | {
    form: COLORS.get(form, BLUE) for form in EAGER
}
HEIGHT = 3.9
"""High enough for nine names below each other."""


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


def _figure(found: Mapping[str, Curve], title: str, budget: int | None):
    line = None if budget is None else (f"budget {format_bytes(budget)}", budget / 2**30)
    return depth_figure(
        found, PICTURE_COLORS, title=title, strong=(NAMES["keep"], NAMES["history"]),
        dashed=("plain residual",), line=line, height=HEIGHT,
    )  # fmt: skip


def title_of(sizes: Sizes) -> str:
    """The title of a picture of ``sizes``, one line."""
    return f"predicted peak of a step, GiB: {sizes.width} wide, {sizes.tokens:,} tokens"


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending."""
    save(_figure(curves(plan.sizes), title_of(plan.sizes), plan.budget), path)


def inline_svg(found: Mapping[str, Curve], title: str) -> str:
    """The picture of `curves` as text for a page."""
    return inline(_figure(found, title, None), "depth-memory", title)
