"""The report as files: report.json and index.html, which needs no other file."""

import json
from pathlib import Path

from deepfast.files import require, write_atomically
from deepfast.measure import connections, report_pictures, results

TEMPLATE = "report.html"
PAGE = "index.html"
FORMATS = ("seconds", "size", "traffic", "difference", "runs")
"""Functions of `results` that the page uses as filters."""


def render(report: dict) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "the report")
    loader = jinja2.PackageLoader("deepfast.measure", package_path="")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {name: getattr(results, name) for name in FORMATS}
    training = report["training"]
    return environment.get_template(TEMPLATE).render(
        report=report,
        pictures=report_pictures.draw(report),
        cards=results.headlines(report),
        traffic=results.traffic_table(report),
        connections=connections,
        spread=results.spread,
        verdict=results.verdict(training) if training["status"] == "measured" else None,
    )


def write(report: dict, folder: Path) -> Path:
    """Writes both files into a folder that exists; returns the page's path."""
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "report.json", (data + "\n").encode())
    page = folder / PAGE
    write_atomically(page, render(report).encode())
    return page
