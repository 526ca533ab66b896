"""Kernels that are broken on purpose: the launches of layer_norm, by any backend.

A worker loads this file in its prelude; tests in one process import it.
"""

import itertools
import os
import signal
import time

import torch

from deepfast import backend
from deepfast.cases import sizes

FORWARD = "layer_norm_forward"
calls = itertools.count()


def wrong(y):
    y.add_(1)


def not_finite(y):
    if y.numel():
        y[-1] = torch.nan


def unsteady(y):
    """As accurate as can be, but with other bits in each second run."""
    if y.numel() and next(calls) % 2:
        first = y.flatten()[0]
        y[(0,) * y.dim()] = torch.nextafter(first, first + 1)


def raises(y):
    raise RuntimeError("broken on purpose")


def memory(y):
    raise torch.cuda.OutOfMemoryError("Tried to allocate 9.00 GiB")


def killed(y):
    # As the system does to a process where memory runs out.
    os.kill(os.getpid(), signal.SIGKILL)


def abort_in_float32(y):
    if y.dtype == torch.float32:
        os.abort()


def hang(y):
    time.sleep(600)


def broken(runs, names, fault, launch=FORWARD, result="y"):
    """`backend.launchers` where a launch goes wrong on the backends ``names``."""

    def made(op, name):
        found = runs(op, name)
        if launch not in found or name not in names:
            return found

        def run(operands):
            found[launch](operands)
            fault(getattr(operands, result))

        return found | {launch: run}

    return made


def one(op, kind, widths, thorough=False):
    """The first call, of an odd width: Triton's interpreter is slow."""
    torch.manual_seed(1)
    return [next(sizes.LISTED[op](sizes.QUICK[kind]))]


def install(names, fault):
    """Breaks the kernels in this process."""
    backend.launchers = broken(backend.launchers, names, globals()[fault])
    sizes.cases = one
