"""The loop of adds under torch.compile, in a process of its own that is ended when time is up.

Compiling takes long and cannot be interrupted from within. The child is this module run as a
program: it gets its sizes as JSON and prints one JSON line.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import torch
from torch import Tensor

from deepfast.measure.encoders import COMPILED, Case, PeerEncoder
from deepfast.measure.forms import AddLoop
from deepfast.measure.rows import NOT_MEASURED, Row
from deepfast.measure.settings import Deadline, Settings

# A child needs some seconds to start; below this no graph is ready.
LEAST_SECONDS = 8.0


def compiled(settings: Settings, deadline: Deadline, say) -> list[Row]:
    """A row for every depth, shallow ones first, until one does not finish."""
    rows: list[Row] = []
    stopped: str | None = None
    for depth in settings.depths:
        row = Row(variant=COMPILED, depth=depth, tokens=settings.tokens)
        if stopped is None and deadline.left < LEAST_SECONDS:
            stopped = "no time of the budget was left"
        if stopped is None:
            stopped = _measure(row, settings, deadline.left)
        else:
            row.status, row.note = NOT_MEASURED, f"not tried: {stopped}"
        took = f"{row.median:.2f} s" if row.median else f"{row.status}: {row.note}"
        say(f"{depth:>4} layers  {COMPILED:24} {took}")
        rows.append(row)
    return rows


def _measure(row: Row, settings: Settings, seconds: float) -> str | None:
    """Fills the row; returns why no deeper one should be tried."""
    sizes = asdict(settings) | {"depths": (row.depth,)}
    answer, why = _child(json.dumps(sizes), seconds)
    if answer is None:
        row.status, row.note = NOT_MEASURED, why
        return f"{row.depth} layers {why}"
    row.seconds = answer["seconds"]
    row.note = f"after {answer['compile_seconds']:.0f} s of compiling, in a process of its own"
    return None


def _child(sizes: str, seconds: float) -> tuple[dict | None, str]:
    # One compile thread: worker processes would outlive the child.
    variables = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "deepfast.measure.compiled", sizes]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = child.communicate(timeout=seconds)
    except BaseException as error:
        # On Ctrl-C too: the C++ compiler that the child started is in a group of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, f"did not finish in {seconds:.0f} s"
    if child.returncode != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return None, f"failed: {last[:200]}"
    return json.loads(out.strip().splitlines()[-1]), ""


class CompiledLoop(AddLoop):
    """`AddLoop` whose sum is one compiled graph per row."""

    def mix(self, z: Tensor) -> Tensor:
        self.states.append(z)
        return _weighted_sum(self.states, self.weight[self.count].to(z.dtype))


@torch.compile(dynamic=False)
def _weighted_sum(states: list[Tensor], weight: Tensor) -> Tensor:
    x = weight[0] * states[0]
    for k in range(1, len(states)):
        x = x + weight[k] * states[k]
    return x


def main(sizes: str) -> None:
    """The child: compiles on the first step, then times as many steps as the settings ask."""
    settings = Settings(**json.loads(sizes))
    # Every row has a graph of its own.
    torch._dynamo.config.recompile_limit = 4 * max(settings.depths) + 64
    torch._dynamo.config.accumulated_recompile_limit = 1 << 16
    case = Case(settings, settings.depths[0], Deadline(math.inf))
    case.models[COMPILED] = PeerEncoder(case.encoder, CompiledLoop)
    seconds = []
    for _ in range(1 + settings.rounds):
        start = time.perf_counter()
        case.step(COMPILED)
        seconds.append(time.perf_counter() - start)
        case.forget_gradients()
    print(json.dumps({"compile_seconds": seconds[0], "seconds": seconds[1:]}))


if __name__ == "__main__":
    main(sys.argv[1])
