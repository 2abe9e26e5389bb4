"""The run as a page of Markdown, for a pull request or a CI summary."""

from __future__ import annotations

import re

from harness.formatting import duration, measured, share
from harness.groups import Record
from harness.headline import headline
from harness.verdict import is_as_required, outcome, place
from harness.view import Report

MOST_LINES = 20
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def summary_markdown(report: Report) -> str:
    """Verdict, ladder, problems, what failed, and what was not run."""
    lines = [f"# {report.verdict}", "", escape(headline(report)), ""]
    lines += _notes(report)
    lines += _ladder(report)
    lines += _problems(report)
    lines += _failed(report)
    lines += _not_run(report)
    lines += _about(report)
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _label(report: Report) -> str:
    return " (simulated)" if report.simulated else ""


def _notes(report: Report) -> list[str]:
    notes = []
    if report.allow_incomplete:
        notes.append("Run with --allow-incomplete: an incomplete run exits 0.")
    if report.simulated:
        notes.append("The device is SIMULATED; this closes no hardware milestone.")
    if report.no_faults:
        notes.append("Run with --no-faults: no fault was planted.")
    return [line for note in notes for line in (f"> {escape(note)}", "")]


def _ladder(report: Report) -> list[str]:
    lines = ["| milestone | state | |", "|---|---|---|"]
    for milestone in report.milestones:
        state = milestone.state + (_label(report) if milestone.gates else "")
        lines.append(f"| {milestone.name} | {state} | {escape(', '.join(milestone.tally))} |")
    return [*lines, ""]


def _problems(report: Report) -> list[str]:
    problems = report.grave_problems
    if not problems:
        return []
    lines = ["## Problems", ""]
    lines += [f"- {escape(text)}{_label(report)}" for text in problems[:MOST_LINES]]
    rest = len(problems) - MOST_LINES
    return [*lines, *([f"- and {rest} more"] if rest > 0 else []), ""]


def _failed(report: Report) -> list[str]:
    wrong = [r for r in report.records if not is_as_required(r) and r["verdict"] != "NOT_RUN"]
    if not wrong:
        return []
    lines = ["## Not as required", "", "| | gate | on | measurement | bound | margin |"]
    lines.append("|---|---|---|---|---|---|")
    lines += [_row(record, report) for record in wrong[:MOST_LINES]]
    return [*lines, ""]


def _row(record: Record, report: Report) -> str:
    on = record["variant"]["name"] if record["kind"] != "gate" else report.on_trial
    on += _label(report)
    failed = [m for m in record["measurements"] if not m["passed"]] or record["measurements"][-1:]
    cells = [outcome(record), place(record), on]
    if failed:
        value, bound = measured(failed[0]["value"], failed[0]["bound"])
        cells += [f"{failed[0]['name']} {value} {failed[0]['unit']}".strip(), bound]
        cells.append(share(failed[0]["margin"]))
    else:
        cells += [record["reason"], "", ""]
    return "| " + " | ".join(map(escape, cells)) + " |"


def _not_run(report: Report) -> list[str]:
    if not report.not_run:
        return []
    lines = ["## Not run", ""]
    for reason, records in report.not_run.items():
        lines.append(f"- {len(records)}{_label(report)}: {escape(reason)}")
    return [*lines, ""]


def _about(report: Report) -> list[str]:
    environment = report.run.get("environment", {})
    commit = environment.get("commit") or "unknown"
    dirty = f" with {len(environment['dirty'])} changed files" if environment.get("dirty") else ""
    facts = [
        f"on trial: {report.on_trial}",
        f"device: {report.device_text}",
        f"rung {report.run.get('rung')}, seed {report.run.get('seed')}",
        f"commit {str(commit)[:12]}{dirty}",
    ]
    if report.end:
        facts.append(f"{duration(report.end['duration_s'])}")
    head = report.lines[-1]["hash"][:16]
    facts.append(f"{len(report.lines)} lines of evidence, the last with hash {head}")
    return [escape("; ".join(facts)) + "."]
