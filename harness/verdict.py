"""What a number, a gate and a run amount to. Pure functions of what was recorded.

A bound is a dict with one of the keys

======== ======================= ==================================================
bound    passes when             margin: the share of the bound that is left unused
======== ======================= ==================================================
at_most  value <= x              1 - value / x
at_least value >= x              1 - x / value
within   lo <= value <= hi       min(value - lo, hi - value) / ((hi - lo) / 2)
equal    value == x              none
======== ======================= ==================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Bound = Mapping[str, Any]
Record = Mapping[str, Any]

GATE_KINDS = ("gate", "fault", "benign")
REQUIRED = {"gate": "PASS", "fault": "FAIL", "benign": "PASS"}
EXIT_PASSED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INCOMPLETE = 0, 1, 2, 6


def measurement_passes(value: Any, bound: Bound) -> bool:
    """Whether ``value`` keeps to ``bound``.

    NaN fails every bound, and so does an infinity under ``at_most``, ``at_least`` and ``within``:
    minus infinity is an overflow, not a small error. ``equal`` compares numbers by value, and
    strings and lists element by element; True is not 1.

    Raises:
        ValueError: no bound or several, a bound that is not finite (``equal``: NaN), or a value
            without an order under a bound that needs one.
    """
    kind, limit = _single(bound)
    if kind == "equal":
        return _same(value, limit)
    if not _is_number(value):
        raise ValueError(f"{kind} bounds a number; got {value!r}; use equal for {type(value)}")
    if not _is_finite(value):
        return False
    if kind == "at_most":
        return bool(value <= limit)
    if kind == "at_least":
        return bool(value >= limit)
    low, high = limit
    return bool(low <= value <= high)


def margin(value: Any, bound: Bound) -> float | None:
    """The share of the bound that is left unused: 1 far inside, 0 at the edge, below 0 outside.

    None where a share means nothing: ``equal``, a bound of zero, an interval of no width, a value
    that is not finite, or a failing value on the other side of zero.
    """
    kind, limit = _single(bound)
    if kind == "equal" or not _is_number(value) or not _is_finite(value):
        return None
    if kind == "within":
        low, high = limit
        half = (high - low) / 2
        return float(min(1.0, min(value - low, high - value) / half)) if half > 0 else None
    if kind == "at_least":  # value >= x is -value <= -x
        value, limit = -value, -limit
    if limit == 0 or (limit < 0 and value >= 0):
        return None
    used = value / limit if limit > 0 else limit / value
    return float(min(1.0, 1.0 - used))


def gate_verdict(
    measurements: Sequence[Mapping[str, Any]], error: object = None, not_run: object = None
) -> str:
    """PASS, FAIL, ERROR or NOT_RUN of one gate on one implementation.

    A gate that raised is an ERROR whatever it measured, one with a failed measurement a FAIL
    even if it swallowed the exception, and one that measured nothing an ERROR.

    Args:
        error: what the gate raised other than a failed check; anything false for nothing.
        not_run: the reason why it could not run; anything false if it ran.
    """
    if error:
        return "ERROR"
    if any(measurement["passed"] is not True for measurement in measurements):
        return "FAIL"
    if not_run:
        return "NOT_RUN"
    return "PASS" if measurements else "ERROR"


def is_as_required(record: Record) -> bool:
    """Whether a gate or benign variant passed, or a fault failed by its own measurement."""
    return bool(record["verdict"] == REQUIRED[record["kind"]])


def outcome(record: Record) -> str:
    """The word for a record: the gate's own verdict, or what became of the variant.

    fault: CAUGHT, MISSED, CRASHED; benign: ACCEPTED, FALSE ALARM, CRASHED; all: NOT RUN.
    """
    verdict = str(record["verdict"])
    if verdict == "NOT_RUN":
        return "NOT RUN"
    if record["kind"] == "gate":
        return verdict
    words = {"PASS": "MISSED", "FAIL": "CAUGHT", "ERROR": "CRASHED"}
    if record["kind"] == "benign":
        words = {"PASS": "ACCEPTED", "FAIL": "FALSE ALARM", "ERROR": "CRASHED"}
    return words[verdict]


def place(record: Record) -> str:
    """``file::function[case]`` of a record."""
    return f"{record['gate']}[{record['case']}]" if record.get("case") else str(record["gate"])


def run_verdict(
    records: Iterable[Record],
    selected_count: int | None,
    interrupted: bool,
    errors: Sequence[str] = (),
    asked: Sequence[str] = (),
    on_trial: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """PASSED, FAILED or INCOMPLETE, and one sentence for every problem, the gravest first.

    Args:
        records: the evidence; records of other kinds than gate, fault and benign are left out.
        selected_count: how many of them were selected to run; None when that is not known.
        interrupted: whether the run was stopped before its end.
        errors: what went wrong outside any gate, such as a file that could not be collected, one
            sentence each; any of them makes the run FAILED.
        asked: the milestones that -m names; one without a gate run makes the run INCOMPLETE.
        on_trial: the candidates' roles; one that no gate called makes the run INCOMPLETE.
    """
    judged = [record for record in records if record["kind"] in GATE_KINDS]
    failures = [_failure(record) for record in judged]
    grave = [*errors, *(sentence for sentence in failures if sentence)]
    missing = [_not_run(record) for record in judged if record["verdict"] == "NOT_RUN"]
    num_distinct = len({record["nodeid"] for record in judged})
    if num_distinct < len(judged):
        grave.append(
            f"{_count(len(judged) - num_distinct, 'gate run')} came to a verdict more than once; "
            "nothing may be retried."
        )
    if interrupted:
        missing.insert(0, "The run was interrupted before its end.")
    if selected_count is None:
        missing.append("It is not known how many gates were selected.")
    elif num_distinct != selected_count:
        missing.append(
            f"{_count(selected_count, 'gate run')}: that many were selected, "
            f"{num_distinct} recorded."
        )
    reached = {record["milestone"] for record in judged if record["kind"] == "gate"}
    missing += [f"No gate of {name} ran, though -m asks for it." for name in asked
                if name not in reached]  # fmt: skip
    called = {role for record in judged for role in record.get("called", ())}
    missing += [f"No selected gate called the role {role}, so it was not on trial."
                for role in on_trial if role not in called]  # fmt: skip
    if not any(record["kind"] == "gate" and record["verdict"] != "NOT_RUN" for record in judged):
        missing.append("No gate ran.")
    verdict = "FAILED" if grave else "INCOMPLETE" if missing else "PASSED"
    return verdict, [*grave, *missing]


def exit_status(verdict: str, allow_incomplete: bool = False, interrupted: bool = False) -> int:
    """0 PASSED, 1 FAILED, 2 interrupted, 6 INCOMPLETE (0 with ``allow_incomplete``).

    An interrupted run never exits 0.
    """
    if verdict == "FAILED":
        return EXIT_FAILED
    if interrupted:
        return EXIT_INTERRUPTED
    if verdict == "INCOMPLETE":
        return EXIT_PASSED if allow_incomplete else EXIT_INCOMPLETE
    if verdict == "PASSED":
        return EXIT_PASSED
    raise ValueError(f"unknown verdict {verdict!r}; it is PASSED, FAILED or INCOMPLETE")


def _single(bound: Bound) -> tuple[str, Any]:
    """The kind and the limit of a bound that some value can fail and some value can pass."""
    nothing: tuple[str, Any] = ("", None)
    kind, limit = next(iter(bound.items()), nothing)
    known = False
    if kind == "equal":
        known = not _has_nan(limit)
    elif kind in ("at_most", "at_least"):
        known = _is_number(limit) and _is_finite(limit)
    elif kind == "within" and isinstance(limit, (list, tuple)) and len(limit) == 2:
        known = all(_is_number(edge) and _is_finite(edge) for edge in limit)
        known = known and bool(limit[0] <= limit[1])
    if not known or len(bound) != 1:
        raise ValueError(
            f"bound {dict(bound)!r}: give exactly one of at_most, at_least, within (low, high) "
            "with low <= high, all finite, or equal without NaN"
        )
    return kind, limit


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float


def _has_nan(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_nan(element) for element in value)
    return isinstance(value, float) and math.isnan(value)


def _same(value: Any, limit: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(limit, (list, tuple)):
        return len(value) == len(limit) and all(map(_same, value, limit))
    if _is_number(value) and _is_number(limit):
        return bool(value == limit)
    return type(value) is type(limit) and bool(value == limit)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _failure(record: Record) -> str:
    """A sentence on a record that makes the run FAILED; empty for any other."""
    if record["verdict"] == "NOT_RUN" or is_as_required(record):
        return ""
    where, what = place(record), outcome(record)
    reason = f": {record['reason']}" if record.get("reason") else ""
    if record["kind"] == "gate":
        return f"{what} {where}{reason}"
    name = record["variant"]["name"]
    if what == "MISSED":
        return f"MISSED {where} accepts the fault {name}."
    kind = "fault" if record["kind"] == "fault" else "benign variant"
    verb = "rejects" if what == "FALSE ALARM" else "crashes on"
    return f"{what} {where} {verb} the {kind} {name}{reason}"


def _not_run(record: Record) -> str:
    variant = f" on {record['variant']['name']}" if record.get("variant") else ""
    return f"NOT RUN {place(record)}{variant}: {record['reason']}"
