"""The report as files: report.json and index.html, which needs no other file."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from deepfast.files import require, write_atomically
from deepfast.measure import report_pictures
from deepfast.measure.forms import DENSEFORMER, STACK
from deepfast.measure.steps import VARIANTS
from deepfast.memory import POLICIES, format_bytes

PAGE = "index.html"


def show(value: Any, form: str) -> str:
    """A value as text.

    Args:
        value: None for a number that was not measured.
        form: "seconds", "bytes", or a format such as "{:.2f}".
    """
    if value is None:
        return "–"
    if form == "seconds":
        # Three digits.
        if value < 0.9995:
            return f"{value * 1e3:.3g} ms"
        return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    return format_bytes(value) if form == "bytes" else form.format(value)


# ---- the main results ----------------------------------------------------------------------------

QUANTITIES = {"median_seconds": ("time", "seconds"), "peak_bytes": ("peak memory", "bytes")}
PARTS = {
    "steps": "a step",
    "mixing": "the mixing of DLCL alone",
    "policies": "a step with recompute",
}
ONE = "", "DLCL"
"""The connections that the main results are about."""
RATIOS = (
    *(("steps", v, "deepfast", "median_seconds") for v in VARIANTS if v != "deepfast"),
    ("steps", STACK, "deepfast", "peak_bytes"),
    *(("mixing", v, "deepfast", "median_seconds") for v in (STACK, DENSEFORMER)),
    *(("policies", POLICIES[0], POLICIES[-1], field) for field in QUANTITIES),
)
"""The main results: chapter, two of its variants, and what is divided."""


def headlines(report: dict) -> list[dict[str, str]]:
    """The main results, each at the greatest depth where both variants were timed."""
    cards = []
    for chapter, top, bottom, field in RATIOS:
        name, unit = QUANTITIES[field]
        rows = [row for row in report[chapter] if row["median_seconds"] and row["what"] in ONE]
        known = {(row["depth"], row["variant"]): row[field] for row in rows}
        depths = [d for d, variant in known if variant == top and (d, bottom) in known]
        value, detail = "–", "not measured"
        if depths:
            pair = known[max(depths), top], known[max(depths), bottom]
            value = f"{pair[0] / pair[1]:.3g}×"
            detail = f"{show(pair[0], unit)} and {show(pair[1], unit)}, {max(depths)} layers"
        label = f"{name} of {PARTS[chapter]}: {top} over {bottom}"
        cards.append({"value": value, "label": label, "detail": detail})
    return cards


# ---- files ---------------------------------------------------------------------------------------


def render(report: dict) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "the report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["show"] = show
    template = importlib.resources.files("deepfast.measure").joinpath("report.html")
    return environment.from_string(template.read_text("utf-8")).render(
        report=report, pictures=report_pictures.draw(report), cards=headlines(report)
    )


def write(report: dict, folder: Path) -> Path:
    """Writes both files into a folder that exists; returns the page's path."""
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "report.json", (data + "\n").encode())
    page = folder / PAGE
    write_atomically(page, render(report).encode())
    return page
