"""Tables as a terminal shows them: nothing is cut, nothing of the data steers the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from reference.data.visible import visible


def screen_table(*heads: str, title: str) -> Table:
    """Text that is too wide goes on in the next line: numbers are never cut."""
    table = Table(title=title)
    for head in heads:
        table.add_column(visible(head), overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """A row; what data brings into it is made visible, but for the ends of lines."""
    table.add_row(*(visible(cell, "\n") if isinstance(cell, str) else cell for cell in cells))
