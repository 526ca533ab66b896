"""Pictures of the connections over depth: traffic, time and memory."""

from deepfast.measure.connections import CONNECTIONS, PLAIN
from deepfast.measure.depth_picture import BLUE
from deepfast.measure.pictures import COLORS, depth_figure, inline

FIELDS = {
    "nbytes": ("traffic", "counted traffic, GB", 1e-9),
    "median_seconds": ("time", "time, ms", 1e3),
    "peak_bytes": ("memory", "peak memory, MiB", 1 / (1 << 20)),
}
"""Field of a row -> the picture's name, its title, and what the number is multiplied by."""
CONNECTION_COLORS = dict(
    zip(
        CONNECTIONS,
        (COLORS["deepfast"], BLUE, COLORS["DenseFormer form"], COLORS["loop of adds"]),
        strict=True,
    )
)
WIDTH, HEIGHT = 3.6, 3.6
"""Three pictures side by side."""


def draw(report: dict) -> dict[str, str | None]:
    """The pictures by name; None without data."""
    return {
        f"connection-{name}": _over_depth(report["connections"], field, name, title, scale)
        for field, (name, title, scale) in FIELDS.items()
    }


def _over_depth(rows: list[dict], field: str, name: str, title: str, scale: float) -> str | None:
    """A curve for each connection, and one of the same colour for its plain form."""
    curves: dict[str, list] = {}
    colors, plain = {}, []
    for row in rows:
        if row[field] and row["seconds"]:
            form = row["variant"]
            if form.endswith(PLAIN):
                plain.append(form)
            else:
                form = row["what"]
            curves.setdefault(form, []).append((row["depth"], row[field] * scale))
            colors[form] = CONNECTION_COLORS[row["what"]]
    if not any(form not in plain for form in curves):
        return None
    figure = depth_figure(
        curves, colors, title=title, strong=(), dashed=plain, unnamed=plain, across="layers",
        width=WIDTH, height=HEIGHT,
    )  # fmt: skip
    return inline(figure, f"connection-{name}", f"{title} of every connection over layers")
