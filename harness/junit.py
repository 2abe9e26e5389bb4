"""The run as JUnit XML, the common form that CI servers read.

A suite a milestone; every fault and every benign variant is a test case of its own. The suite
"run" holds the verdict of the whole run, so that a run in which nothing ran is not all green.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from harness.groups import Record
from harness.headline import headline
from harness.verdict import is_as_required, outcome
from harness.view import Report

# XML 1.0, section 2.2: what may not stand in a document, not even escaped.
ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: Report) -> bytes:
    """The document, UTF-8."""
    suites = ElementTree.Element("testsuites", name="Touchstone")
    _run_suite(suites, report)
    for milestone in report.asked:
        own = [record for record in report.records if record["milestone"] == milestone]
        _suite(suites, milestone, own, report)
    for count in ("tests", "failures", "errors", "skipped"):
        suites.set(count, str(sum(int(suite.attrib[count]) for suite in suites)))
    suites.set("time", f"{sum(float(suite.attrib['time']) for suite in suites):.3f}")
    ElementTree.indent(suites)
    document: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _run_suite(suites: ElementTree.Element, report: Report) -> None:
    suite = _open(suites, "run", report)
    case = ElementTree.SubElement(suite, "testcase", classname="touchstone", name="verdict")
    case.set("time", "0.000")
    failed = report.verdict == "FAILED"
    told = report.verdict == "INCOMPLETE"
    skipped = told and report.allow_incomplete
    if failed or told:
        tag = "skipped" if skipped else "failure"
        problems = "\n".join(report.problems)
        _add(case, tag, report.verdict, f"{report.verdict}. {headline(report)}", problems)
    _count(suite, 1, int((failed or told) and not skipped), 0, int(skipped), 0.0)


def _suite(
    suites: ElementTree.Element, name: str, records: Sequence[Record], report: Report
) -> None:
    suite = _open(suites, name, report)
    for record in records:
        file, _, function = record["gate"].partition("::")
        case = f"[{record['case']}]" if record["case"] else ""
        name_on = f"{function}{case}"
        if record["kind"] != "gate":
            verb = "rejects" if record["kind"] == "fault" else "accepts"
            name_on += f" {verb} {record['kind']}:{record['variant']['name']}"
        if report.simulated:
            name_on += " (simulated)"
        element = ElementTree.SubElement(
            suite, "testcase", classname=_clean(f"gates.{file}"), name=_clean(name_on)
        )
        element.set("time", f"{record['duration_s']:.3f}")
        _outcome(element, record)
    words = [(is_as_required(record), record["verdict"]) for record in records]
    skipped = sum(verdict == "NOT_RUN" for _, verdict in words)
    errors = sum(verdict == "ERROR" for _, verdict in words)
    failures = sum(not right for right, _ in words) - errors - skipped
    duration_s = sum(record["duration_s"] for record in records)
    _count(suite, len(records), failures, errors, skipped, duration_s)


def _outcome(element: ElementTree.Element, record: Record) -> None:
    if is_as_required(record):
        return
    tag = {"NOT_RUN": "skipped", "ERROR": "error"}.get(record["verdict"], "failure")
    word = outcome(record)
    message = f"{word}: {record['reason'] or 'the gate passed'}"
    details = [message, f"claim: {record['claim']}", f"nodeid: {record['nodeid']}"]
    if record["kind"] != "gate":
        details.append(f"{record['kind']}: {record['variant']['summary']}")
    if logs := record.get("rank_logs"):  # not in evidence of before
        details.append(logs)
    _add(element, tag, word, message, "\n".join(details))


def _open(suites: ElementTree.Element, name: str, report: Report) -> ElementTree.Element:
    suite = ElementTree.SubElement(suites, "testsuite", name=name)
    started = str(report.run.get("started", ""))[:19]
    if started:
        suite.set("timestamp", started)
    properties = ElementTree.SubElement(suite, "properties")
    told = {
        "device": report.device_text,
        "rung": report.run.get("rung", ""),
        "seed": report.run.get("seed", ""),
        "on trial": report.on_trial,
    }
    for key, value in told.items():
        ElementTree.SubElement(properties, "property", name=key, value=_clean(str(value)))
    return suite


def _add(case: ElementTree.Element, tag: str, kind: str, message: str, text: str) -> None:
    attributes = {"message": _clean(message)}
    if tag != "skipped":
        attributes["type"] = kind
    ElementTree.SubElement(case, tag, attributes).text = _clean(text)


def _count(
    suite: ElementTree.Element,
    tests: int,
    failures: int,
    errors: int,
    skipped: int,
    duration_s: float,
) -> None:
    counts = {"tests": tests, "failures": failures, "errors": errors, "skipped": skipped}
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("time", f"{duration_s:.3f}")


def _clean(text: str) -> str:
    return ILLEGAL.sub("\ufffd", text)
