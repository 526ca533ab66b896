"""The console of rich that prints tables."""

import rich.console


class Console(rich.console.Console):
    """Leaves a reader that has closed the pipe to the command line, as `print` does."""

    def on_broken_pipe(self) -> None:
        # Called while the error is handled. Rich itself would end the process with exit code 1.
        raise
