"""The first sentence of a report: who claimed what, on which device, and what came of it."""

from __future__ import annotations

from collections import Counter

from harness.formatting import amount, listing
from harness.verdict import is_as_required, outcome
from harness.view import Report

FAILING = {
    "FAIL": ("gate run failed", "gate runs failed"),
    "ERROR": ("gate run ended in an error", "gate runs ended in an error"),
    "MISSED": ("fault was missed", "faults were missed"),
    "CRASHED": ("variant crashed", "variants crashed"),
    "FALSE ALARM": ("benign variant was rejected", "benign variants were rejected"),
}


def headline(report: Report) -> str:
    """The verdict in words, without its word."""
    if report.verdict == "PASSED":
        return _passed(report)
    if report.verdict == "FAILED":
        return _failed(report)
    return _incomplete(report)


def teeth(report: Report) -> str:
    """How many faults were caught and benign variants accepted, in one sentence."""
    (caught, faults), (accepted, benign) = report.faults_caught, report.benign_accepted
    parts = [f"{caught:,} of {amount(faults, 'planted fault')} caught"] if faults else []
    if benign:
        parts.append(f"{accepted:,} of {amount(benign, 'benign variant')} accepted")
    told = f"{', '.join(parts)}." if parts else ""
    return told if faults else f"{told} No fault was planted in this run.".strip()


def _passed(report: Report) -> str:
    _, num_gates = report.gates_passed
    which = "selected gate" if report.in_part else "gate"
    subject = f"The one {which}" if num_gates == 1 else f"All {num_gates:,} {which}s"
    holds = "holds" if num_gates == 1 else "hold"
    return f"{subject} {_where(report)} {holds} for {_who(report)}. {teeth(report)}"


def _failed(report: Report) -> str:
    wrong = _wrong(report)
    found = [f"{wrong[word]:,} {FAILING[word][wrong[word] > 1]}" for word in FAILING if wrong[word]]
    what = listing(found) if found else "something outside the gates went wrong"
    if wrong["FAIL"] or wrong["ERROR"]:
        who = _who(report)
        subject = f"{who[0].upper()}{who[1:]} does not keep the contracts {_where(report)}"
    else:
        subject = f"The gates {_where(report)} cannot be relied on for {_who(report)}"
    return f"{subject}: {what}. {teeth(report)}"


def _wrong(report: Report) -> Counter[str]:
    """Gate runs by verdict, and variants by what became of them, each variant once."""
    gates = [record["verdict"] for record in report.of_kind("gate")]
    variants = {
        (outcome(record), record["variant"]["role"], record["variant"]["name"])
        for record in report.records
        if record["kind"] != "gate" and not is_as_required(record)
    }
    return Counter([*gates, *(word for word, _, _ in variants)])


def _incomplete(report: Report) -> str:
    runs = amount(len(report.records), "gate run")
    if report.num_not_run == len(report.records):
        return f"The claim is not shown: nothing ran {_where(report)} for {_who(report)}."
    part = f"only {runs} {_where(report)} came to a verdict for {_who(report)}"
    if report.num_not_run:
        part = f"{report.num_not_run:,} of {runs} {_where(report)} did not run for {_who(report)}"
    return f"The claim is not shown: {part}. Nothing that ran failed. {teeth(report)}"


def _where(report: Report) -> str:
    return f"of {listing(report.asked)}" if report.asked else "of any milestone"


def _who(report: Report) -> str:
    return f"{report.on_trial} on {report.device_text}"
