"""Ctrl-C while modules are imported."""

import contextlib
import os
import signal
import sys
import threading
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

    # Ctrl-C may be ignored or handled, and only the main thread has handlers.
    ours = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
