"""Ctrl-C while modules are imported."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Inside the block Ctrl-C ends the process at once, with exit code 130. As an exception it may
    be lost, or turned into another one, inside the imports of torch.

    Args:
        name: the command, for the message.
    """

    def leave(*_) -> None:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    # It may be ignored, and only the main thread has handlers.
    if before is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, leave)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
