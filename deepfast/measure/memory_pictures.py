"""Pictures of the memory chapter: time against memory, and the deepest model over budgets."""

from deepfast.measure.deepest import PLANNED
from deepfast.measure.depth_picture import (
    GREENS,
    HEIGHT,
    PICTURE_COLORS,
    inline_svg,
)
from deepfast.measure.pictures import (
    COLORS,
    depth_figure,
    figure_of,
    inline,
    label_ends,
)
from deepfast.memory.eager import RESIDUAL

MIB = 1 << 20


def draw(report: dict) -> dict[str, str | None]:
    """The pictures by name; None without data."""
    timed = [row for row in report["policies"]["rows"] if row["relative"]]
    curves = report["curves"]
    return {
        "policies": _time_against_memory(timed) if timed else None,
        "deepest": _deepest(report["deepest"]),
        "depth_memory": inline_svg(curves["points"], curves["title"]),
    }


def _time_against_memory(rows: list[dict]) -> str:
    """A point for each policy, connected in the policies' order."""
    points = {row["variant"]: (row["relative"], row["peak_bytes"] / MIB) for row in rows}
    figure, axes = figure_of()
    axes.plot(*zip(*points.values(), strict=True), color="#9aa3ab", linewidth=1.2, zorder=2)
    colors = dict(zip(points, GREENS, strict=False))
    for policy, point in points.items():
        axes.plot(*point, color=colors[policy], marker="o", markersize=8, zorder=3)
    low, high = (pick(x for x, _ in points.values()) for pick in (min, max))
    room = max(0.05, 0.12 * (high - low))
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(0, 1.08 * max(y for _, y in points.values()))
    axes.set_xlabel("time of a step, relative to keep")
    axes.set_title(f"peak MiB, {rows[0]['depth']} layers", loc="left", fontsize=10)
    label_ends(figure, axes, {p: [point] for p, point in points.items()}, colors)
    return inline(figure, "policies", "Peak memory over the time of a step, every memory policy")


def _deepest(deepest: dict) -> str:
    """Layers over budgets; a form has no point if not even one layer fits."""
    budgets = [budget["bytes"] / 2**30 for budget in deepest["budgets"]]
    curves = {}
    for form, layers in deepest["layers"].items():
        points = [pair for pair in zip(budgets, layers, strict=True) if pair[1]]
        if points:
            curves[form] = points
    figure = depth_figure(
        curves, PICTURE_COLORS | {PLANNED: COLORS["deepfast"]}, title="most layers that fit",
        strong=(PLANNED,), dashed=(RESIDUAL,), across="GiB of the device", height=HEIGHT,
    )  # fmt: skip
    return inline(figure, "deepest", "Most encoder layers that fit, over budgets of memory")
