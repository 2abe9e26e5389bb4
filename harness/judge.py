"""The verdict of one gate on one implementation, and what pytest is told of it."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from harness.candidates import noting
from harness.checks import Check, CheckFailed
from harness.contract import Gate, Role, Stack
from harness.plugin import case_of, gate_name, variant_of
from harness.verdict import gate_verdict, is_as_required, place

CHECK = pytest.StashKey[Check]()
CALLED = pytest.StashKey[set[str]]()
WORLD_SIZES = pytest.StashKey[set[int]]()
RECORD = pytest.StashKey[dict[str, Any]]()


def check_of(item: pytest.Item) -> Check:
    """The gate's measurements so far."""
    return item.stash.setdefault(CHECK, Check())


def counting(item: pytest.Item, stack: Stack, roles: list[str]) -> dict[str, Role]:
    """The roles on trial, each noting in the item's record that it was called."""
    return noting(stack, roles, called_by(item).add)


def called_by(item: pytest.Item) -> set[str]:
    """The roles on trial that the gate called so far, in this process or in its ranks."""
    return item.stash.setdefault(CALLED, set())


def world_sizes_of(item: pytest.Item) -> set[int]:
    """In how many ranks the gate ran programs so far."""
    return item.stash.setdefault(WORLD_SIZES, set())


def phase(
    item: pytest.Item, gate: Gate, call: pytest.CallInfo[None], report: pytest.TestReport
) -> pytest.TestReport:
    """Judge one phase (setup, call, teardown) of a gate's item.

    The record is complete, and travels with the report, when the teardown is over.
    """
    if call.when == "setup":
        item.stash[RECORD] = _blank_of(item, gate)
    record = item.stash[RECORD]
    record["duration_s"] += call.duration
    if call.when == "call" or call.excinfo is not None:
        _judge(item, call, record)
        _tell_pytest(report, record)
    report.gate = record["gate"]  # type: ignore[attr-defined]
    if call.when == "teardown":
        report.record = record  # type: ignore[attr-defined]
    return report


def blank(kind: str, gate: Gate, name: str, case: str, nodeid: str) -> dict[str, Any]:
    """The record of a gate that has not come to an end."""
    return {
        "kind": kind,
        "gate": name,
        "case": case,
        "milestone": name[:2].upper(),
        "nodeid": nodeid,
        "claim": gate.claim,
        "not_claimed": gate.not_claimed,
        "source": gate.source,
        "roles": list(gate.roles),
        "measurements": [],
        "series": [],
        "called": [],
        "world_sizes": [],
        "rank_logs": "",
        "verdict": "ERROR",
        "reason": "the gate did not come to an end",
        "duration_s": 0.0,
    }


def _blank_of(item: pytest.Item, gate: Gate) -> dict[str, Any]:
    variant, name = variant_of(item), gate_name(item)
    nodeid = item.nodeid if item.nodeid[0] != ":" else f"{item.path.name}{item.nodeid}"
    record = blank(variant.kind if variant else "gate", gate, name, case_of(item), nodeid)
    if variant:
        origin = "seen_in" if variant.kind == "fault" else "because"
        record["variant"] = {
            "name": variant.name,
            "role": variant.role,
            "summary": variant.summary,
            origin: variant.origin,
        }
    return record


def _judge(item: pytest.Item, call: pytest.CallInfo[None], record: dict[str, Any]) -> None:
    check = check_of(item)
    measurements = list(check.measurements.values())
    record["measurements"], record["series"] = measurements, check.curves
    record["called"] = sorted(item.stash.get(CALLED, ()))
    record["world_sizes"] = sorted(item.stash.get(WORLD_SIZES, ()))
    raised = call.excinfo.value if call.excinfo else None
    record["rank_logs"] = _printable(getattr(raised, "rank_logs", record["rank_logs"]))
    failed = isinstance(raised, CheckFailed) and call.when == "call"
    not_run = isinstance(raised, pytest.skip.Exception) and call.when != "teardown"
    error = "" if raised is None or failed or not_run else _told(raised)
    if error and call.when != "call":
        error = f"in {call.when}: {error}"
    verdict = gate_verdict(measurements, error=error, not_run=not_run)
    reasons = {
        "PASS": "",
        "ERROR": error or "the gate measured nothing",
        "FAIL": str(raised) if failed else "a failed check was swallowed by the gate",
        "NOT_RUN": str(raised),
    }
    record["verdict"], record["reason"] = verdict, reasons[verdict]


def _told(error: BaseException) -> str:
    """The exception as Python prints it, in characters that every file can hold."""
    return _printable("".join(traceback.format_exception_only(error)).strip())


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _tell_pytest(report: pytest.TestReport, record: dict[str, Any]) -> None:
    """Turn the verdict round for a fault: only a FAIL by its own measurement is as required."""
    report.__dict__.pop("wasxfail", None)
    verdict, reason = record["verdict"], record["reason"]
    if verdict == "NOT_RUN":
        report.outcome = "skipped"
        report.longrepr = (str(report.location[0]), report.location[1] or 0, reason)
    elif is_as_required(record):
        report.outcome, report.longrepr = "passed", None
    else:
        crash = _crash(report, record) if verdict == "ERROR" and report.longrepr else ""
        report.outcome = "failed"
        report.longrepr = f"{explain(record)}\n{crash}".rstrip()


def _crash(report: pytest.TestReport, record: dict[str, Any]) -> str:
    """The traceback, of which the gate's part is a line where the ranks say more."""
    where = getattr(report.longrepr, "reprcrash", None)
    if not (record["rank_logs"] and where):
        return str(report.longrepr)
    return f"{record['rank_logs']}\n{where.path}:{where.lineno}: in the gate"


def explain(record: dict[str, Any]) -> str:
    """One sentence on a record that is not as required."""
    verdict, reason = record["verdict"], record["reason"]
    where = place(record)
    variant = record.get("variant", {})
    if record["kind"] == "fault":
        how = "was not caught" if verdict == "PASS" else f"crashed instead of failing: {reason}"
        return f"MISSED: the fault {variant['name']} ({variant['summary']}) {how} by {where}"
    if record["kind"] == "benign":
        return f"FALSE ALARM: {where} rejects the benign variant {variant['name']}: {reason}"
    return f"{verdict}: {where}: {reason}\nclaim: {record['claim']}"
