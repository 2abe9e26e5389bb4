"""The records of a run in the groups in which a reader meets them.

A gate here is a pytest function, a *gate run* one of its cases on one implementation: the stack on
trial, a fault, or a benign variant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.formatting import amount
from harness.verdict import GATE_KINDS, is_as_required, outcome

GRAVITY = ("ERROR", "FAIL", "NOT_RUN", "PASS")
Record = dict[str, Any]


@dataclass(frozen=True)
class Gate:
    """A gate on the stack on trial, with the variants that were put into it."""

    name: str
    milestone: str
    cases: list[Record]
    faults: list[Record]
    benign: list[Record]

    @property
    def text(self) -> Record:
        """The record that holds claim, source and roles, which are the same in all."""
        return (self.cases or self.faults or self.benign)[0]

    @property
    def verdict(self) -> str:
        """The gravest verdict of its cases; NOT_RUN when the stack on trial was not selected."""
        verdicts = {record["verdict"] for record in self.cases} or {"NOT_RUN"}
        return next(verdict for verdict in GRAVITY if verdict in verdicts)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Why cases did not pass: the cases by reason."""
        if not self.cases:
            return {"Only variants of this gate were selected.": []}
        reasons: dict[str, list[str]] = {}
        for record in self.cases:
            if record["reason"]:
                reasons.setdefault(record["reason"], []).append(record["case"])
        return reasons

    @property
    def tightest(self) -> Record | None:
        """The measurement that stands closest to its bound, or past it."""
        return tightest(self.cases)

    @cached_property
    def measurements(self) -> list[tuple[Record, list[tuple[Record, Record]]]]:
        """Measurements of the same name and reason, over the cases: (first, [(case, own), …])."""
        groups: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
        for record in self.cases:
            for measurement in record["measurements"]:
                key = (measurement["name"], measurement["because"])
                groups.setdefault(key, []).append((record, measurement))
        return [(rows[0][1], rows) for rows in groups.values()]

    @property
    def is_as_required(self) -> bool:
        """Whether it passed, caught its faults and accepted its benign variants."""
        return all(map(is_as_required, [*self.cases, *self.faults, *self.benign]))


@dataclass(frozen=True)
class Variant:
    """A fault or a benign variant in one gate."""

    name: str
    gate: str
    records: list[Record]

    @property
    def text(self) -> Record:
        """role, summary, and seen_in or because."""
        text: Record = self.records[0]["variant"]
        return text

    @property
    def wrong(self) -> list[Record]:
        """The cases in which the gate did not do what it must."""
        return [record for record in self.records if not is_as_required(record)]

    @property
    def outcome(self) -> str:
        """The word for all its cases: that of the first wrong one, else the common one."""
        return outcome((self.wrong or self.records)[0])

    @property
    def reasons(self) -> list[str]:
        """Why cases crashed or did not run, each once; a measurement says the rest."""
        unmeasured = [r for r in self.wrong if r["verdict"] in ("ERROR", "NOT_RUN")]
        return list(dict.fromkeys(record["reason"] for record in unmeasured))

    @property
    def telling(self) -> Record | None:
        """The measurement that decided: of the wrong cases the tightest, else the narrowest catch.

        The narrowest catch is, of the failed measurements, the one nearest to its bound.
        """
        failed = [m for r in self.records for m in r["measurements"] if not m["passed"]]
        if self.wrong or not failed:
            return tightest(self.wrong or self.records)
        narrowest: Record = max(failed, key=lambda m: _order(m["margin"], missing=float("-inf")))
        return narrowest


@dataclass(frozen=True)
class Milestone:
    """One rung of the ladder. ``state``: passed, passed in part, failed, incomplete, not asked."""

    name: str
    gates: list[Gate]
    state: str

    @property
    def topics(self) -> str:
        """What its gate files are about, after their names."""
        files = dict.fromkeys(gate.name.partition("::")[0] for gate in self.gates)
        return ", ".join(re.sub(r"^m\d_", "", name).replace("_", " ") for name in files)

    @property
    def tally(self) -> list[str]:
        """Gates passed, faults caught, benign variants accepted, as short texts."""
        faults = [record for gate in self.gates for record in gate.faults]
        benign = [record for gate in self.gates for record in gate.benign]
        texts = []
        if self.gates:
            passed, total = num_passed(self.gates)
            texts.append(f"{passed:,} of {amount(total, 'gate')}")
        if faults:
            caught, total = distinct(faults)
            texts.append(f"{caught:,} of {amount(total, 'fault')} caught")
        if benign:
            accepted, total = distinct(benign)
            texts.append(f"{accepted:,} of {total:,} benign accepted")
        return texts


def gates_of(records: Sequence[Record]) -> list[Gate]:
    names = dict.fromkeys((record["milestone"], record["gate"]) for record in records)
    gates = []
    for milestone, name in sorted(names, key=lambda key: (key[0], key[1].partition("::")[0])):
        own = [record for record in records if record["gate"] == name]
        by_kind = [[r for r in own if r["kind"] == kind] for kind in GATE_KINDS]
        gates.append(Gate(name, milestone, *by_kind))
    return gates


def variants_of(records: Sequence[Record], kind: str) -> list[Variant]:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == kind:
            variant = record["variant"]
            groups.setdefault((variant["role"], variant["name"], record["gate"]), []).append(record)
    return [Variant(key[1], key[2], own) for key, own in sorted(groups.items())]


def distinct(records: Iterable[Record]) -> tuple[int, int]:
    """Of faults or benign variants: those treated as they must be in every run, and all."""
    right: dict[tuple[str, str], bool] = {}
    for record in records:
        key = (record["variant"]["role"], record["variant"]["name"])
        right[key] = right.get(key, True) and is_as_required(record)
    return sum(right.values()), len(right)


def num_passed(gates: Sequence[Gate]) -> tuple[int, int]:
    """Gates whose every case passed, and gates of which a case was selected."""
    return sum(gate.verdict == "PASS" for gate in gates), sum(bool(gate.cases) for gate in gates)


def tightest(records: Iterable[Record]) -> Record | None:
    """The measurement with the least margin; a failed one before any other; None if none."""
    found = [m for record in records for m in record["measurements"]]
    if not found:
        return None
    first: Record = min(
        found, key=lambda m: (m["passed"], _order(m["margin"], missing=float("inf")))
    )
    return first


def _order(margin: float | None, missing: float) -> float:
    return missing if margin is None else margin
