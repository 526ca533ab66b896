"""The report as files: report.json and index.html, which needs no other file.

Measurements become what the page and the terminal show: tables, ratios, sentences.
"""

import json
from collections.abc import Callable
from pathlib import Path

from deepfast.files import require, write_atomically
from deepfast.measure import connections, report_pictures
from deepfast.measure.encoders import REFERENCE, RESIDUAL, VARIANTS
from deepfast.measure.traffic import forward_reads
from deepfast.memory import POLICIES, format_bytes

TEMPLATE, PAGE = "report.html", "index.html"


# ---- numbers as text -----------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """Three digits, with the unit."""
    if value is None:
        return ""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def size(nbytes: float | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def traffic(nbytes: float | None) -> str:
    """Bytes in units of 1e9 or 1e6."""
    if nbytes is None:
        return ""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def difference(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def runs(row: dict) -> str:
    """How many runs are behind a time."""
    count = len(row["seconds"])
    return f"median of {count}" if count > 1 else "1 run" if count else ""


FILTERS: tuple[Callable, ...] = (seconds, size, traffic, difference, runs)
"""What the page may apply to a value, by its name."""


# ---- the main results ----------------------------------------------------------------------------


def headlines(report: dict) -> list[dict]:
    """The main results as ratios, each at the greatest depth where both forms were measured."""
    steps, alone = report["steps"], report["mixing"]
    others = [v for v in VARIANTS if v not in (RESIDUAL, "deepfast")]
    cards = [
        _card(steps, [REFERENCE], "deepfast", "faster than stack and sum, a whole step"),
        _card(steps, [REFERENCE], "deepfast", "less memory than stack and sum", "peak_bytes", size),
        _card(steps, others, "deepfast", "faster than the fastest other form of DLCL"),
        _card(
            steps, ["deepfast"], RESIDUAL, "the time of the same stack without any depth connection"
        ),
        *(
            _card(alone, [form], "deepfast", f"faster than {form}, the mixing alone")
            for form in (REFERENCE, "DenseFormer form")
        ),
    ]
    return cards + _frugal(report["policies"]["rows"])


def _card(
    rows: list[dict], tops: list[str], bottom: str, label: str, field: str = "median_seconds",
    unit: Callable = seconds,
) -> dict:  # fmt: skip
    """The ratio of a field of the fastest of several variants and of another one, at the greatest
    depth where both were timed."""
    for depth in sorted({row["depth"] for row in rows}, reverse=True):
        timed = [row for row in rows if row["depth"] == depth and row["median_seconds"]]
        above = [row for row in timed if row["variant"] in tops]
        below = [row for row in timed if row["variant"] == bottom]
        if above and below:
            top = min(above, key=lambda row: row["median_seconds"])
            pair = top[field], below[0][field]
            ratio = pair[0] / pair[1]
            for word, opposite in (("faster", "slower"), ("less", "more")):
                if ratio < 1 and label.startswith(word):
                    ratio, label = 1 / ratio, opposite + label.removeprefix(word)
            return {
                "value": f"{ratio:.3g}×",
                "label": label if len(tops) == 1 else f"{label} measured, {top['variant']}",
                "detail": f"{unit(pair[0])} against {unit(pair[1])}, {depth} layers",
            }
    return {"value": "–", "label": label, "detail": "not measured"}


def _frugal(rows: list[dict]) -> list[dict]:
    """What the policy that saves most costs and saves against `none`, if both were timed."""
    timed = {row["variant"]: row for row in rows if row["relative"]}
    if POLICIES[-1] not in timed:
        return []
    keep, last = timed[POLICIES[0]], timed[POLICIES[-1]]
    return [
        {
            "value": f"{keep['peak_bytes'] / last['peak_bytes']:.2f}×",
            "label": f"less memory with recompute={POLICIES[-1]} than without",
            "detail": f"for {last['relative']:.2f}× the time, {last['depth']} layers",
        }
    ]


def spread(rows: list[dict]) -> dict | None:
    """The lowest and the highest ratio of predicted to measured, and how many there are."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {"low": min(ratios), "high": max(ratios), "count": len(ratios)} if ratios else None


def traffic_table(report: dict) -> list[dict]:
    """Per depth: bytes of a step by form, and the state reads of a forward pass."""
    found = []
    for depth in report["settings"]["depths"]:
        by = {r["variant"]: r["nbytes"] for r in report["steps"] if r["depth"] == depth}
        ratio = by[REFERENCE] / by["deepfast"]
        found.append({"depth": depth, "bytes": by, "reads": forward_reads(depth), "ratio": ratio})
    return found


def verdict(training: dict) -> str | None:
    """What the two curves show, from the numbers alone; None if a run is missing."""
    if training["status"] != "measured" or set(training["runs"]) != {"dlcl", "twin"}:
        return None
    ours, twin = (training["runs"][key]["curve"]["dev"] for key in ("dlcl", "twin"))
    floor = training["unigram_nll"]
    step, nll, _ = twin[-1]
    # The other run at the same step, or at the nearest one with a validation.
    near = min(ours, key=lambda point: abs(point[0] - step))
    text = (
        f"After {step} steps the post-norm stack has a dev NLL of {nll:.2f}, the DLCL stack after "
        f"{near[0]} steps {near[1]:.2f}; knowing only how frequent each token is gives "
        f"{floor:.2f}. "
    )
    if nll > 0.9 * floor and near[1] < 0.8 * nll:
        return text + "By then the post-norm stack has learned little more than token frequencies."
    if nll > near[1]:
        return text + "The post-norm stack learns here too, but later."
    return text + "In this run the post-norm stack is not behind."


# ---- files ---------------------------------------------------------------------------------------


def render(report: dict) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "the report")
    loader = jinja2.PackageLoader("deepfast.measure", package_path="")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment.get_template(TEMPLATE).render(
        report=report,
        pictures=report_pictures.draw(report),
        cards=headlines(report),
        traffic=traffic_table(report),
        connections=connections,
        spread=spread,
        verdict=verdict(report["training"]),
    )


def write(report: dict, folder: Path) -> Path:
    """Writes both files into a folder that exists; returns the page's path."""
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "report.json", (data + "\n").encode())
    page = folder / PAGE
    write_atomically(page, render(report).encode())
    return page
