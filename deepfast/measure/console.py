"""Tables and progress on the terminal, by rich."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import rich.console
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table


class Console(rich.console.Console):
    """Lets the command line handle a closed pipe, as `print` does."""

    def on_broken_pipe(self) -> None:
        # Called while the error is handled. Rich itself would end the process with exit code 1.
        raise


def show_table(
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    padding: tuple[int, int, int, int] = (0, 1, 0, 1),
) -> None:
    """Prints a table; a column that is only text is aligned right."""
    headers = [
        Column(c, justify="right", no_wrap=True) if isinstance(c, str) else c for c in columns
    ]
    footed = any(column.footer for column in headers)
    table = Table(*headers, title=title, box=box.SIMPLE, show_footer=footed, padding=padding)
    for cells in rows:
        table.add_row(*cells)
    Console(highlight=False).print(table)


@contextlib.contextmanager
def progress(count: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error, and nothing if that is not a terminal. It gives a function
    that takes the number of finished steps, of ``count``, and what runs now.
    """
    bar = Progress(
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True,
        # What is printed meanwhile stays on standard output; on a terminal it is above the bar.
        redirect_stdout=sys.stdout.isatty(),
        # A redraw takes a millisecond of a core, and what is measured may be running.
        refresh_per_second=1,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=count, now="")
        yield lambda done, now: bar.update(task, completed=done, now=now)
