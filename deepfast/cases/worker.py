"""A process that runs kernels which may be wrong: `deepfast.selfcheck.full` starts it.

Its argument is a job in JSON: op, by (backends), dtype, device, seconds (the limit of a case), and
thorough or timed. The op `full.STEP` times training steps with depth connections beside one
without. It writes a JSON line before each case, so that the parent knows what was running when the
process ended, and one with the result.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from deepfast.cases import check, sizes
from deepfast.cases.case import Case, Device
from deepfast.nn import Packing, TransformerEncoder
from deepfast.selfcheck import full
from deepfast.selfcheck.first_use import first_line, out_of_memory

ROUNDS = 9
"""Runs of each backend, of which the median is the time."""

STEPS = {"cuda": (24, 8192, 1024, 128), "cpu": (2, 6, 16, 3)}
"""By the type of a device: layers, tokens, D, tokens of a sentence."""

CONNECTIONS = ("residual", "dlcl", "attnres")
"""The connections whose steps are timed."""


def seconds_of_steps(device: Device, begin: Callable[[str], None]) -> dict[str, float]:
    """Median seconds of forward and backward of a pre-norm encoder under bf16 autocast, by its
    connection. Every op takes the backend that it has by default."""
    begin(CONNECTIONS[0])
    layers, T, D, length = STEPS[torch.device(device).type]
    x, target = torch.randn(2, T, D, device=device)
    packing = Packing(T // length, length)

    def step(encoder: TransformerEncoder) -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = encoder.forward_packed(x.bfloat16().requires_grad_(), packing)
        F.mse_loss(y.float(), target).backward()
        encoder.zero_grad(set_to_none=True)

    variants: dict[str, Callable[[], object]] = {}
    for connection in CONNECTIONS:
        encoder = TransformerEncoder(layers, D, max(1, D // 64), 4 * D, connection=connection)
        variants[connection] = partial(step, encoder.to(device))
    return check.in_turns(variants, device, begin, ROUNDS)


def result_of(job: dict, say: Callable[..., None]) -> dict:
    """The result of a job. "error" is None where nothing is wrong; "memory" says that memory ran
    out; "seconds" has the times by width and backend."""
    op, dtype, device = job["op"], getattr(torch, job["dtype"]), torch.device(job["device"])
    result: dict = {"error": None, "by": job["by"][0]}
    case: Case | None = None

    def begin(by: str) -> None:
        result["by"] = by
        say(by=by, case=case.name if case else op)

    try:
        if op == full.STEP:
            return result | {"seconds": seconds_of_steps(device, begin)}
        widths = sizes.widths(op, device.type)
        if job.get("timed"):
            times = {}
            for width in widths:
                case = sizes.typical(op, width, device.type)
                times[str(width)] = check.seconds(case, job["by"], dtype, device, begin, ROUNDS)
            return result | {"seconds": times}
        for case in sizes.cases(op, device.type, widths, job.get("thorough", False)):
            begin(result["by"])
            error = check.fault(case, result["by"], dtype, device)
            if error is not None:
                return result | {"error": error}
    except Exception as error:
        name = case.name if case else "the cases"
        return result | {"error": f"{name}: {first_line(error)}", "memory": out_of_memory(error)}
    return result


def main() -> None:
    # What libraries print must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])

    def say(**line: object) -> None:
        signal.alarm(job["seconds"])
        out.write(json.dumps(line) + "\n")
        out.flush()

    say(**result_of(job, say))


if __name__ == "__main__":
    main()
