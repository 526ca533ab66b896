"""The report as files: report.json, and index.html which needs nothing beside it."""

import json
from pathlib import Path

from deepfast.measure import (
    memory_chapter,
    memory_pictures,
    pictures,
    results,
)
from deepfast.mt.data.errors import require
from deepfast.mt.data.text import write_atomically

TEMPLATE = "report.html"


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page by name; None where there is nothing to draw."""
    rows = report["sweep"]["rows"] + report["compiled"]["rows"]
    drawn = {
        "time": pictures.over_depth(
            results.curves(rows, "median_seconds"),
            name="time", title="Time of a step", unit="seconds",
        ),
        "memory": pictures.over_depth(
            results.curves(rows, "peak_bytes", 1 / results.GIB),
            name="memory", title="Peak memory of a step", unit="GiB",
        ),
        "losses": None,
        "weights": None,
    }  # fmt: skip
    drawn |= memory_pictures.draw(report["memory"])
    training = report["training"]
    if training["status"] == "measured":
        runs = {"DLCL, pre-norm": training["runs"]["dlcl"],
                "residual, post-norm": training["runs"]["twin"]}  # fmt: skip
        drawn["losses"] = pictures.losses(runs, token_frequencies=training["unigram_nll"])
        if training["weights"]:
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
    formats = ("seconds", "size", "traffic", "difference", "runs", "ordered")
    environment.filters |= {name: getattr(results, name) for name in formats}
    training = report["training"]
    return environment.get_template(TEMPLATE).render(
        report=report,
        pictures=draw(report),
        cards=results.headlines(report),
        traffic=results.traffic_table(report),
        frugal=memory_chapter.frugal(report["memory"]),
        spread=memory_chapter.spread,
        verdict=results.verdict(training) if training["status"] == "measured" else None,
    )


def write(report: dict, folder: Path) -> Path:
    """Writes both files; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "report.json", (data + "\n").encode())
    page = folder / "index.html"
    write_atomically(page, render(report).encode())
    return page
