"""The gradient norms of the layers over a run, as a table."""

import math
from collections.abc import Sequence
from typing import Any

from deepfast.mt.training.optim import PREFIX


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each side that has layers: a line for each layer with the norm of its gradient,
    before clipping, at the first, the middle and the last line of metrics; nan without a gradient.

    Args:
        rows: the lines of a run's metrics.
    """
    found = []
    trained = [row for row in rows if row["event"] == "train"]
    sides = dict.fromkeys(
        key
        for row in trained
        for key, value in row.items()
        if key.startswith(PREFIX) and isinstance(value, list)
    )
    for side in sides:
        own = [row for row in trained if side in row]
        chosen = [own[at] for at in sorted({0, len(own) // 2, len(own) - 1})]
        head = "".join(f"{'step ' + str(row['step']):>14}" for row in chosen)
        found.append(f"{side.removeprefix(PREFIX) + ' layer':<16}{head}")
        for layer, norms in enumerate(zip(*(row[side] for row in chosen), strict=True), 1):
            cells = "".join(f"{math.nan if x is None else x:>14.3g}" for x in norms)
            found.append(f"{layer:<16}{cells}")
    return found
