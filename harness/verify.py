"""Is the evidence what was written, and does every verdict follow from what was measured?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.chain import canonical, decode, encode, first_problem
from harness.evidence import EVIDENCE_FILE, read_lines
from harness.groups import Record
from harness.report import REPORT_FILE, report_json
from harness.verdict import (
    GATE_KINDS,
    exit_status,
    gate_verdict,
    margin,
    measurement_passes,
    place,
    run_verdict,
)
from harness.view import Report

KINDS = ("run", *GATE_KINDS, "selection", "end")


def verify(directory: Path | str) -> list[str]:
    """Every problem of the evidence in a folder, one sentence each; empty when it is sound.

    The chain comes first: when a line was changed, removed, added or moved, that is the only
    problem told, since the rest has no meaning.

    Raises:
        EvidenceError: there is no evidence, or it cannot be read.
    """
    folder = Path(directory)
    lines = read_lines(folder)
    problem = first_problem(lines)
    if problem:
        return [f"{EVIDENCE_FILE}: {problem}"]
    records = [decode(line) for line in lines]
    return [*_order(records), *_recomputed(records), *_beside(folder, records)]


def _order(records: Sequence[Record]) -> Iterator[str]:
    """The first line opens a run and the last one ends it, once each."""
    kinds = [record.get("kind") for record in records]
    for number, kind in enumerate(kinds, start=1):
        if kind not in KINDS:
            yield f"Line {number} is of the unknown kind {kind!r}."
    if kinds[0] != "run":
        yield "Line 1 does not open a run."
    if kinds[-1] != "end":
        yield f"The run has no end: line {len(kinds)} is the last, and it is of kind {kinds[-1]}."
    for kind in ("run", "end"):
        if kinds.count(kind) > 1:
            yield f"The evidence has {kinds.count(kind)} lines of kind {kind}; a run has one."


def _recomputed(records: Sequence[Record]) -> Iterator[str]:
    try:
        for number, record in enumerate(records, start=1):
            if record["kind"] in GATE_KINDS:
                yield from _gate(number, record)
        yield from _run(records)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield f"The verdicts cannot be recomputed: {type(error).__name__}: {error}."


def _gate(number: int, record: Record) -> Iterator[str]:
    """Each measurement against its bound, and the gate's verdict from its measurements."""
    where = f"Line {number}, {place(record)}"
    for measurement in record["measurements"]:
        value, bound = measurement["value"], measurement["bound"]
        if measurement["passed"] is not measurement_passes(value, bound):
            yield (
                f"{where}: {measurement['name']!r} is recorded as "
                f"{'passed' if measurement['passed'] else 'failed'}, but {value!r} under {bound} "
                "is not."
            )
        if measurement["margin"] != margin(value, bound):
            yield (
                f"{where}: the margin of {measurement['name']!r} is recorded as "
                f"{measurement['margin']!r}, but is {margin(value, bound)!r}."
            )
    recorded = record["verdict"]
    follows = gate_verdict(
        record["measurements"], error=recorded == "ERROR", not_run=recorded == "NOT_RUN"
    )
    if recorded != follows:
        yield f"{where}: the verdict {recorded} is recorded, but the measurements give {follows}."
    if recorded in ("ERROR", "NOT_RUN") and not record["reason"]:
        yield f"{where}: the verdict {recorded} has no reason."


def _run(records: Sequence[Record]) -> Iterator[str]:
    """The verdict of the run and its exit status, from the records."""
    report = Report(records)
    end = report.end
    if not end:
        return
    selected = report.selection.get("selected")
    errors = end.get("errors", [])
    asked = report.selection.get("asked", [])
    on_trial = [entry["role"] for entry in report.candidates]
    verdict, problems = run_verdict(
        report.records, selected, end["interrupted"], errors, asked, on_trial
    )
    if end["verdict"] != verdict:
        yield f"The run is recorded as {end['verdict']}, but the records give {verdict}."
    elif end["problems"] != problems:
        yield "The problems recorded at the end of the run are not those that the records give."
    elif end["exit_status"] != exit_status(verdict, report.allow_incomplete, end["interrupted"]):
        yield f"The exit status {end['exit_status']} does not go with the verdict {verdict}."


def _beside(folder: Path, records: Sequence[Record]) -> Iterator[str]:
    """report.json against the evidence, and the other files against report.json."""
    told = _report_file(folder)
    if told is None:
        yield (
            f"{REPORT_FILE} is missing or not readable, so it cannot be told whether lines were "
            "removed from the end."
        )
        return
    files = told.pop("files", None)
    head = {"num_lines": len(records), "head": records[-1]["hash"]}
    if told.get("evidence") != head:
        yield _other_head(told.get("evidence"), head)
        return
    yield from _retold(told, records)
    if not isinstance(files, dict) or set(files) != {"report.html", "summary.md", "junit.xml"}:
        yield f"{REPORT_FILE} does not name the files beside it."
        return
    for name, recorded in sorted(files.items()):
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}."
            continue
        if found != recorded:
            yield f"{name} was changed after it was rendered."


def _retold(told: dict[str, Any], records: Sequence[Record]) -> Iterator[str]:
    try:
        expected = encode(report_json(Report(records)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return  # told already: the verdicts cannot be recomputed
    if canonical(told) != canonical(expected):
        keys = sorted({*told, *expected})
        wrong = next(key for key in keys if told.get(key) != expected.get(key))
        yield f"{REPORT_FILE} does not say what the evidence says, first in {wrong!r}."


def _report_file(folder: Path) -> dict[str, Any] | None:
    try:
        told = json.loads((folder / REPORT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _other_head(told: Any, found: dict[str, Any]) -> str:
    known = told if isinstance(told, dict) else {}
    before, now = known.get("num_lines"), found["num_lines"]
    if isinstance(before, int) and before > now:
        return f"Line {now + 1} was removed: {REPORT_FILE} knows {before} lines, there are {now}."
    if isinstance(before, int) and before < now:
        return f"Line {before + 1} was added: {REPORT_FILE} knows {before} lines, there are {now}."
    return f"The last line is not the one whose hash {REPORT_FILE} holds: lines were hashed again."
