"""Plain tables on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Where there is no terminal, names must not be cut to the 80 columns that rich assumes.
PIPE_WIDTH = 200


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table without borders."""
    table = Table(box=None)
    for title in titles:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(table)
