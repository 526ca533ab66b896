"""A process that runs kernels which may be wrong: `deepfast.selfcheck.full` starts it.

Its argument is a job in JSON: op, by (backends), dtype, device, and thorough, or the widths at
which the backends are timed. The op `full.STEP` times training steps. It writes a JSON line before
each case, so that the parent knows what was running when the process ended, and one with the
result.
"""

import json
import os
import sys
from collections.abc import Callable

import torch

from deepfast.cases import check, sizes, steps
from deepfast.cases.case import Case
from deepfast.selfcheck import full
from deepfast.selfcheck.first_use import first_line, out_of_memory

ROUNDS = 9
"""Runs of each backend, of which the median is the time."""


def result_of(job: dict, say: Callable[..., None]) -> dict:
    """The result of a job. "error" is None where nothing is wrong; "memory" says that memory ran
    out; "seconds" has the times by width and backend."""
    op, dtype, device = job["op"], getattr(torch, job["dtype"]), torch.device(job["device"])
    found: dict = {"error": None, "by": job["by"][0]}
    case: Case | None = None

    def begin(by: str) -> None:
        found["by"] = by
        say(by=by, case=case.name if case else op)

    try:
        if op == full.STEP:
            return found | {"seconds": steps.seconds(device, begin, ROUNDS)}
        for width in job.get("widths", ()):
            case = sizes.typical(op, width, device.type)
            seconds = check.seconds(case, job["by"], dtype, device, begin, ROUNDS)
            found.setdefault("seconds", {})[str(width)] = seconds
        if "widths" in job:
            return found
        for case in sizes.cases(op, device.type, full.widths(op, device.type), job["thorough"]):
            begin(found["by"])
            error = check.fault(case, found["by"], dtype, device)
            if error is not None:
                return found | {"error": error}
    except Exception as error:
        return found | {
            "error": f"{case.name if case else 'the cases'}: {first_line(error)}",
            "memory": out_of_memory(error),
        }
    return found


def main() -> None:
    # What libraries print must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line: object) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    say(**result_of(json.loads(sys.argv[1]), say))


if __name__ == "__main__":
    main()
