"""What a report says, drawn from the records of a run. Nothing is run or judged here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from harness.contract import MILESTONES
from harness.formatting import listing
from harness.groups import (
    Milestone,
    Record,
    distinct,
    gates_of,
    num_passed,
    variants_of,
)
from harness.verdict import GATE_KINDS, is_as_required


class Report:
    """The run as its reader meets it.

    Args:
        records: what ``evidence.read`` returns.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.lines = records
        self.run = _only(records, "run")
        self.end = _only(records, "end")
        self.records = [record for record in records if record["kind"] in GATE_KINDS]
        self.selection = {**self.run.get("selection", {}), **_only(records, "selection")}
        self.device: dict[str, Any] = self.run.get("device", {})
        self.simulated = bool(self.device.get("simulated"))
        self.allow_incomplete = bool(self.selection.get("allow_incomplete"))
        self.no_faults = bool(self.selection.get("no_faults"))
        self.candidates: list[dict[str, Any]] = self.run.get("candidates", [])
        self.verdict = str(self.end.get("verdict", "INCOMPLETE"))
        unended = ["The run has no end: it was killed, or the disk was full."]
        self.problems: list[str] = self.end.get("problems", unended)
        self.gates = gates_of(self.records)
        self.milestones = [self._milestone(name) for name in MILESTONES]
        self.faults = variants_of(self.records, "fault")
        self.benign = variants_of(self.records, "benign")

        self.gates_passed = num_passed(self.gates)
        self.faults_caught = distinct(self.of_kind("fault"))
        self.benign_accepted = distinct(self.of_kind("benign"))
        self.num_not_run = sum(record["verdict"] == "NOT_RUN" for record in self.records)
        # Those that did not run are shown by reason instead.
        self.grave_problems = [text for text in self.problems if not text.startswith("NOT RUN ")]

    def of_kind(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def device_text(self) -> str:
        """Kind and name of the device, and whether it is simulated."""
        kind, name = self.device.get("kind", "unknown device"), self.device.get("name", "")
        notes = [name] if name and name != kind else []
        notes += ["SIMULATED"] if self.simulated else []
        notes += ["not there"] if self.device.get("missing") else []
        return f"{kind} ({', '.join(notes)})" if notes else str(kind)

    @property
    def command(self) -> str:
        """The command as one can type it again."""
        return shlex.join(map(str, self.run.get("command", [])))

    @property
    def on_trial(self) -> str:
        """Who claims: the candidates' modules, or the reference itself."""
        modules = list(dict.fromkeys(str(entry["module"]) for entry in self.candidates))
        if not modules:
            return "the reference"
        roles = [str(entry["role"]) for entry in self.candidates]
        told = listing(roles) if len(roles) <= 4 else f"{len(roles)} roles"
        noun = "candidate" if len(modules) == 1 else "candidates"
        return f"the {noun} {listing(modules)} ({told})"

    @property
    def asked(self) -> list[str]:
        """The milestones of which something was selected, or that the selection names."""
        named = re.findall(r"(?<!not )\bM[0-6]\b", str(self.selection.get("expression") or ""))
        counted = self.selection.get("milestones") or []
        return sorted({record["milestone"] for record in self.records} | {*named} | {*counted})

    @property
    def in_part(self) -> list[str]:
        """The milestones of which only some gates were selected."""
        return list(self.selection.get("in_part") or [])

    @property
    def not_run(self) -> dict[str, list[Record]]:
        """The gate runs that did not run, by reason."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            if record["verdict"] == "NOT_RUN":
                groups.setdefault(record["reason"], []).append(record)
        return groups

    @property
    def series(self) -> list[tuple[Record, list[dict[str, Any]]]]:
        """The curves of the stack on trial, those of one gate run with like axes together."""
        found: list[tuple[Record, list[dict[str, Any]]]] = []
        for record in self.of_kind("gate"):
            axes: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for series in record.get("series", []):
                axes.setdefault((series["x_label"], series["y_label"]), []).append(series)
            found += [(record, curves) for curves in axes.values()]
        return found

    def roles_with_faults(self, milestone: Milestone) -> list[str]:
        """The roles that a fault of the milestone's gates is planted in."""
        names = {gate.name for gate in milestone.gates}
        return sorted({str(fault.text["role"]) for fault in self.faults if fault.gate in names})

    def coverage(self, milestone: Milestone) -> list[tuple[str, list[tuple[int, int] | None]]]:
        """For every gate, over ``roles_with_faults``: (faults caught, faults planted) or None."""
        rows: list[tuple[str, list[tuple[int, int] | None]]] = []
        for gate in milestone.gates:
            here = [fault for fault in self.faults if fault.gate == gate.name]
            cells: list[tuple[int, int] | None] = []
            for role in self.roles_with_faults(milestone):
                own = [fault for fault in here if fault.text["role"] == role]
                caught = sum(fault.outcome == "CAUGHT" for fault in own)
                cells.append((caught, len(own)) if own else None)
            rows += [(gate.name, cells)] if here else []
        return rows

    def _milestone(self, name: str) -> Milestone:
        gates = [gate for gate in self.gates if gate.milestone == name]
        own = [record for record in self.records if record["milestone"] == name]
        counted = self.selection.get("milestones") or {}
        selected = counted.get(name, 0) if isinstance(counted, dict) else len(own)
        if name not in self.asked:
            state = "not asked"
        elif any(not is_as_required(r) and r["verdict"] != "NOT_RUN" for r in own):
            state = "failed"
        else:
            whole = any(gate.cases for gate in gates) and len(own) >= selected
            state = "passed" if whole and all(map(is_as_required, own)) else "incomplete"
            if state == "passed" and name in self.in_part:
                state = "passed in part"
        return Milestone(name, gates, state)


def _only(records: Sequence[Record], kind: str) -> Record:
    """The last record of a kind; empty if there is none."""
    return next((record for record in reversed(records) if record["kind"] == kind), {})
