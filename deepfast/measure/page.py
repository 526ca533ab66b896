"""The report as files: report.json and index.html, which needs no other file."""

import json
from pathlib import Path

from deepfast.files import require, write_atomically
from deepfast.measure import connection_pictures, connections, memory_pictures, pictures, results

TEMPLATE = "report.html"
PAGE = "index.html"
FORMATS = ("seconds", "size", "traffic", "difference", "runs")
"""Functions of `results` that the page uses as filters."""


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page by name; None without data."""
    time = results.curves(report["steps"], "median_seconds")
    memory = results.curves(report["steps"], "peak_bytes", 1 / results.GIB)
    drawn = {
        "time": pictures.over_depth(time, name="time", title="Time of a step", unit="seconds"),
        "memory": pictures.over_depth(
            memory, name="memory", title="Peak memory of a step", unit="GiB"
        ),
    }
    drawn |= connection_pictures.draw(report)
    drawn |= memory_pictures.draw(report)
    training = report["training"]
    if training["status"] == "measured":
        drawn["losses"] = pictures.losses(
            training["runs"], token_frequencies=training["unigram_nll"]
        )
        drawn["weights"] = pictures.depth_weights(training["weights"])
    return drawn


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
        pictures=draw(report),
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
