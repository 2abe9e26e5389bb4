"""How a table of the books looks: its columns, and the ground each line stands on."""

from rich.table import Table

EXACT, CONVENTION, ASSUMED = "exact", "convention", "[bold yellow]ASSUMED[/]"


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text, whose last is the ground, with numbers between."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")  # a number is never cut
    table.add_column("ground", overflow="fold")
    return table
