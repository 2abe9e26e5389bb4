"""Which gates a run was asked for, and of which milestones that is only a part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from harness.contract import MILESTONES
from harness.plugin import gate_of


def count(items: list[pytest.Item]) -> dict[str, int]:
    """Items of gates by milestone, faults and benign variants counted like the gates."""
    counts: dict[str, int] = {}
    for item in items:
        if gate_of(item):
            milestone = _milestone(item.path)
            counts[milestone] = counts.get(milestone, 0) + 1
    return counts


def describe(session: pytest.Session, collected: dict[str, int]) -> dict[str, Any]:
    """The selection as the evidence keeps it.

    A milestone is selected ``in_part`` when -k or -m left some of its items out, when --lf or
    --stepwise chose (they filter before anything is counted), when the command line names single
    gates, or when gate files of it beside those that ran were not read.
    """
    selected = count(session.items)
    read = {item.path for item in session.items if gate_of(item)}
    beside = {path for file in read for path in file.parent.glob("m[0-6]_*.py")}
    left_out = {_milestone(path) for path in beside - read}
    option = session.config.option
    some = any("::" in argument for argument in session.config.args)  # gates named one by one
    some = some or getattr(option, "lf", False) or getattr(option, "stepwise", False)
    in_part = [
        milestone
        for milestone in sorted(selected)
        if some or milestone in left_out or selected[milestone] < collected.get(milestone, 0)
    ]
    return {
        "collected": collected,
        "milestones": selected,
        "in_part": in_part,
        "selected": sum(selected.values()),
    }


def asked(expression: str) -> list[str]:
    """The milestones that ``-m`` names and would select: of "M1 or not M2" it is M1."""
    if not expression:
        return []
    compiled = Expression.compile(expression)

    def selects(milestone: str) -> bool:
        return compiled.evaluate(lambda name, /, **_: name == milestone)

    return [name for name in MILESTONES if re.search(rf"\b{name}\b", expression) and selects(name)]


def _milestone(path: Path) -> str:
    return path.name[:2].upper()
