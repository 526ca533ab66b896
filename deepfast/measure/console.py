"""Tables on the terminal, by rich."""

from collections.abc import Iterable, Sequence

import rich.console
from rich import box
from rich.table import Column, Table


class Console(rich.console.Console):
    """Leaves a reader that has closed the pipe to the command line, as `print` does."""

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
