"""The pass of a module whose callers hold no history."""

import threading

from torch import Tensor

from deepfast.depth.history import DepthHistory


class OpenPass(threading.local):
    """The pass that is open in each thread. It is neither copied nor pickled."""

    history: DepthHistory | None = None
    x: Tensor | None = None
    """What the newest row returned."""

    def begin(self) -> None:
        self.end()
        self.history, self.x = DepthHistory(), None

    def end(self) -> None:
        if self.history is not None:
            self.history.close()
        self.history = None

    def __reduce__(self):
        return OpenPass, ()
