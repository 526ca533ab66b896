"""From measurements to what the page and the terminal show: tables, ratios, sentences."""

from deepfast.measure.encoders import (
    COMPILED,
    REFERENCE,
    RESIDUAL,
    VARIANTS,
)
from deepfast.measure.rows import MEASURED
from deepfast.measure.traffic import forward_reads

GIB = 1 << 30
SHOWN = (RESIDUAL, "deepfast", "DenseFormer form", "loop of adds", COMPILED, REFERENCE)
"""Order of the variants in every table."""


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
    """1e9 or 1e6 bytes."""
    if nbytes is None:
        return ""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def difference(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def runs(row: dict) -> str:
    """How many runs a time stands on."""
    if row["median_seconds"] is None:
        return ""
    count = len(row["seconds"])
    return f"median of {count}" if count > 1 else "1 run" if count else "1 run, first"


def ordered(rows: list[dict]) -> list[dict]:
    """By depth, then in the order of SHOWN."""
    return sorted(rows, key=lambda r: (r["depth"], SHOWN.index(r["variant"])))


def find(rows: list[dict], depth: int, variant: str) -> dict | None:
    """The measured row of a variant at a depth."""
    for row in rows:
        if (row["depth"], row["variant"]) == (depth, variant) and row["status"] == MEASURED:
            return row
    return None


def curves(rows: list[dict], field: str, scale: float = 1.0) -> dict[str, list]:
    """Variant -> (depth, value) of all measured rows."""
    found: dict[str, list] = {v: [] for v in (*VARIANTS, COMPILED)}
    for row in rows:
        if row["status"] == MEASURED and row.get(field):
            found[row["variant"]].append((row["depth"], row[field] * scale))
    return found


def headlines(report: dict) -> list[dict]:
    """The main figures as ratios; a ratio that was not measured says why."""
    rows, cards = report["sweep"]["rows"], []

    def card(label, field, top, bottom, unit):
        for depth in sorted({r["depth"] for r in rows}, reverse=True):
            above, below = find(rows, depth, top), find(rows, depth, bottom)
            if above and below and above[field] and below[field]:
                value = above[field] / below[field]
                detail = f"{unit(above[field])} against {unit(below[field])}, {depth} layers"
                cards.append({"value": f"{value:.3g}×", "label": label, "detail": detail})
                return
        cards.append({"value": "–", "label": label, "detail": "not measured"})

    card("faster than stack and sum, a whole step", "median_seconds", REFERENCE, "deepfast",
         seconds)  # fmt: skip
    card("less memory than stack and sum", "peak_bytes", REFERENCE, "deepfast", size)
    cards.append(_best_other(rows + report["compiled"]["rows"]))
    card("the time of the same stack without any depth connection", "median_seconds",
         "deepfast", RESIDUAL, seconds)  # fmt: skip
    alone = report["mixing"]["rows"]
    for form in (REFERENCE, "DenseFormer form"):
        for depth in sorted({r["depth"] for r in alone}, reverse=True):
            slow, fast = find(alone, depth, form), find(alone, depth, "deepfast")
            if slow and fast:
                cards.append({
                    "value": f"{slow['median_seconds'] / fast['median_seconds']:.3g}×",
                    "label": f"faster than {form}, the mixing alone",
                    "detail": f"{seconds(slow['median_seconds'])} against "
                              f"{seconds(fast['median_seconds'])}, {depth} layers",
                })  # fmt: skip
                break
    return cards


def _best_other(rows: list[dict]) -> dict:
    """Against the fastest other form of DLCL at the deepest encoder where one was measured."""
    label = "faster than the fastest other form of DLCL"
    for depth in sorted({r["depth"] for r in rows}, reverse=True):
        ours = find(rows, depth, "deepfast")
        others = [found for v in SHOWN if v not in (RESIDUAL, "deepfast", REFERENCE)
                  and (found := find(rows, depth, v))]  # fmt: skip
        if ours and others:
            other = min(others, key=lambda row: row["median_seconds"])
            times = seconds(other["median_seconds"]), seconds(ours["median_seconds"])
            return {
                "value": f"{other['median_seconds'] / ours['median_seconds']:.3g}×",
                "label": f"{label} measured, {other['variant']}",
                "detail": f"{times[0]} against {times[1]}, {depth} layers",
            }
    return {"value": "–", "label": label, "detail": "not measured"}


def traffic_table(report: dict) -> list[dict]:
    """Per depth: bytes of a step by form, and the state reads of a forward pass."""
    found = []
    for depth in report["settings"]["depths"]:
        by = {r["variant"]: r["traffic_bytes"] for r in report["sweep"]["rows"]
              if r["depth"] == depth}  # fmt: skip
        found.append(
            {"depth": depth, "bytes": by, "reads": forward_reads(depth),
             "ratio": by[REFERENCE] / by["deepfast"]}
        )  # fmt: skip
    return found


def verdict(training: dict) -> str | None:
    """What the two curves show, from the numbers alone."""
    ours, twin = (training["runs"][key] for key in ("dlcl", "twin"))
    if min(ours["steps"], twin["steps"]) < 50:
        return "One of the two runs had too few steps to compare them."
    if not ours["curve"]["dev"] or not twin["curve"]["dev"]:
        return None
    floor = training["unigram_nll"]
    step, nll, _ = twin["curve"]["dev"][-1]
    # The other run at the same step, or at the nearest that was validated.
    near = min(ours["curve"]["dev"], key=lambda point: abs(point[0] - step))
    text = (
        f"After {step} steps the post-norm stack has a dev NLL of {nll:.2f}, the DLCL stack after "
        f"{near[0]} steps {near[1]:.2f}; knowing only how frequent each token is gives "
        f"{floor:.2f}. "
    )
    if nll > 0.9 * floor and near[1] < 0.8 * nll:
        text += "In this time the post-norm stack has learned little more than token frequencies."
    elif nll > near[1]:
        text += "The post-norm stack learns here too, but later."
    else:
        text += "In this run the post-norm stack is not behind."
    return text
