"""The table of verdicts at the end of a run, and where the report lies."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.formatting import listing
from harness.verdict import is_as_required

if TYPE_CHECKING:
    from harness.recorder import Run

STYLES = {"PASSED": "bold green", "FAILED": "bold red", "INCOMPLETE": "bold yellow"}


def write_summary(terminal: Any, run: Run) -> None:
    """Write the verdicts by milestone, what went wrong, the verdict, and the report's path."""
    text = io.StringIO()
    console = Console(
        file=text, width=terminal._tw.fullwidth, force_terminal=terminal.hasmarkup, highlight=False
    )
    console.print()
    if run.records:
        console.print(verdict_table(run.records))
    for problem in run.problems:
        console.print(Text("  " + problem))
    console.print(Text(run.verdict, STYLES[run.verdict]), end="  ")
    console.print(Text(_about(run)))
    report = run.evidence.path.parent.resolve() / "report.html"
    console.print(Text(f"report: {report}"), soft_wrap=True)
    terminal.write(text.getvalue())


def _about(run: Run) -> str:
    trial = run.config.option.candidate
    who = "candidate " + ", ".join(trial) if trial else "the reference"
    collected = sum(run.selection.get("collected", {}).values())
    selected = run.selection.get("selected", 0)
    part = f", {selected} of {collected} collected" if collected > selected else ""
    if run.selection.get("in_part"):
        part += f"; only a part of {', '.join(run.selection['in_part'])}"
    if run.config.option.no_faults:
        part += "; no fault was planted (--no-faults)"
    option = run.config.option
    return f"{who} on {option.device}, rung {option.rung}{_ranks(run.records)}{part}"


def _ranks(records: list[dict[str, Any]]) -> str:
    """In how many ranks gates ran, of those that ran any."""
    sizes = sorted({size for record in records for size in record["world_sizes"]})
    noun = "rank" if sizes == [1] else "ranks"
    return f", in {listing([str(size) for size in sizes])} {noun}" if sizes else ""


def verdict_table(records: list[dict[str, Any]]) -> Table:
    """One row a milestone: gates, their cases by verdict, faults caught, benign accepted."""
    table = Table(title="Gates, and their cases by verdict", title_justify="left")
    table.add_column("milestone")
    table.add_column("gates", justify="right")
    for name in ("PASS", "FAIL", "ERROR", "NOT_RUN", "faults caught", "benign accepted"):
        table.add_column(name, justify="right")
    for milestone in sorted({record["milestone"] for record in records}):
        own = [record for record in records if record["milestone"] == milestone]
        verdicts = Counter(record["verdict"] for record in own if record["kind"] == "gate")
        gates = {record["gate"] for record in own}
        cells = [
            str(len(gates)),
            *(str(verdicts[name]) for name in ("PASS", "FAIL", "ERROR", "NOT_RUN")),
        ]
        cells += [_ratio(own, kind) for kind in ("fault", "benign")]
        table.add_row(milestone, *cells)
    return table


def _ratio(records: list[dict[str, Any]], kind: str) -> str:
    """Variants of a kind that were as required in every case they ran in, of all."""
    as_required: dict[str, bool] = {}
    for record in records:
        if record["kind"] == kind:
            name = record["variant"]["name"]
            as_required[name] = as_required.get(name, True) and is_as_required(record)
    return f"{sum(as_required.values())}/{len(as_required)}" if as_required else "-"
