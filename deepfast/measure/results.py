"""Turns measurements into what the page and the terminal show: tables, ratios, sentences."""

from deepfast.measure.encoders import REFERENCE, RESIDUAL, VARIANTS
from deepfast.measure.traffic import forward_reads
from deepfast.memory import POLICIES

GIB = 1 << 30


def seconds(value: float | None) -> str:
    """Three digits, with the unit."""
    if value is None:
        return ""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def size(nbytes: float | None) -> str:
    """GiB, or MiB below one."""
    if nbytes is None:
        return ""
    if nbytes < 0.9995 * GIB:
        mib = nbytes / (1 << 20)
        return f"{mib:.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 10 * GIB else f"{nbytes / GIB:.2f} GiB"


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


def find(rows: list[dict], depth: int, variant: str) -> dict | None:
    """The row of a variant at a depth that has a time."""
    for row in rows:
        if (row["depth"], row["variant"]) == (depth, variant) and row["median_seconds"]:
            return row
    return None


def curves(rows: list[dict], field: str, scale: float = 1.0) -> dict[str, list]:
    """Variant -> (depth, value) of all rows that have a value."""
    found: dict[str, list] = {v: [] for v in VARIANTS}
    for row in rows:
        if row[field]:
            found[row["variant"]].append((row["depth"], row[field] * scale))
    return found


def headlines(report: dict) -> list[dict]:
    """The main results as ratios, each at the greatest depth where both forms were measured."""
    steps, alone = report["steps"], report["mixing"]
    cards = [
        _card(steps, REFERENCE, "deepfast", "faster than stack and sum, a whole step"),
        _card(steps, REFERENCE, "deepfast", "less memory than stack and sum", "peak_bytes", size),
        _best_other(steps),
        _card(steps, "deepfast", RESIDUAL,
              "the time of the same stack without any depth connection"),
        *(_card(alone, form, "deepfast", f"faster than {form}, the mixing alone")
          for form in (REFERENCE, "DenseFormer form")),
    ]  # fmt: skip
    frugal = _frugal(report["policies"]["rows"])
    return [*cards, frugal] if frugal else cards


def _card(
    rows: list[dict], top: str, bottom: str, label: str, field: str = "median_seconds", unit=seconds
) -> dict:
    for depth in sorted({r["depth"] for r in rows}, reverse=True):
        above, below = find(rows, depth, top), find(rows, depth, bottom)
        if above and below:
            value = above[field] / below[field]
            detail = f"{unit(above[field])} against {unit(below[field])}, {depth} layers"
            return {"value": f"{value:.3g}×", "label": label, "detail": detail}
    return {"value": "–", "label": label, "detail": "not measured"}


def _best_other(rows: list[dict]) -> dict:
    """Compares with the fastest other form of DLCL, at the greatest depth with one."""
    label = "faster than the fastest other form of DLCL"
    for depth in sorted({r["depth"] for r in rows}, reverse=True):
        others = [find(rows, depth, v) for v in VARIANTS if v not in (RESIDUAL, "deepfast")]
        others = [row for row in others if row]
        if others and find(rows, depth, "deepfast"):
            other = min(others, key=lambda row: row["median_seconds"])["variant"]
            some = [row for row in rows if row["depth"] == depth]
            return _card(some, other, "deepfast", f"{label} measured, {other}")
    return {"value": "–", "label": label, "detail": "not measured"}


def _frugal(rows: list[dict]) -> dict | None:
    """What the policy that saves most costs and saves against `keep`, if both were timed."""
    timed = {row["variant"]: row for row in rows if row["relative"]}
    if POLICIES[-1] not in timed:
        return None
    keep, last = timed[POLICIES[0]], timed[POLICIES[-1]]
    return {
        "value": f"{keep['peak_bytes'] / last['peak_bytes']:.2f}×",
        "label": f"less memory with policy {POLICIES[-1]} than with keep",
        "detail": f"for {last['relative']:.2f}× the time, {last['depth']} layers",
    }


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
    if set(training["runs"]) != {"dlcl", "twin"}:
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
        text += "By then the post-norm stack has learned little more than token frequencies."
    elif nll > near[1]:
        text += "The post-norm stack learns here too, but later."
    else:
        text += "In this run the post-norm stack is not behind."
    return text
