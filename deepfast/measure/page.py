"""The report as files: report.json and index.html, which needs no other file."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from deepfast.files import require, write_atomically
from deepfast.measure import report_pictures
from deepfast.memory import format_bytes

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


def render(report: dict) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "the report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["show"] = show
    template = importlib.resources.files("deepfast.measure").joinpath("report.html")
    return environment.from_string(template.read_text("utf-8")).render(
        report=report, pictures=report_pictures.draw(report)
    )


def write(report: dict, folder: Path) -> Path:
    """Writes both files into a folder that exists; returns the page's path."""
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "report.json", (data + "\n").encode())
    page = folder / PAGE
    write_atomically(page, render(report).encode())
    return page
