"""The run: its evidence, its verdict, its exit status, and the table on the terminal.

Under pytest-xdist the workers judge their gates, and the controller records.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.contract import Gate
from harness.evidence import EvidenceError, EvidenceWriter
from harness.fixtures import trial_of
from harness.plugin import GATE_FILE, asked_for_gates, drop_unmeant_cases
from harness.rank_options import session_of
from harness.selection import asked, count, describe
from harness.verdict import EXIT_INCOMPLETE, exit_status, is_as_required, run_verdict

RUN = pytest.StashKey["Run"]()
ERRORS = pytest.StashKey[list[str]]()  # what went wrong outside any gate
COLLECTED = pytest.StashKey[dict[str, int]]()
CASE = re.compile(r"(.*?)-?(?:(fault|benign):(\w+))?")
GATE_ID = re.compile(r"(.*/)?(m[0-6]_\w+)\.py::(\w+)(\[.*\])?")


class Run:
    """One run of gates: everything recorded so far, and the open evidence folder."""

    def __init__(self, config: pytest.Config) -> None:
        from harness.environment import describe_environment

        self.config = config
        self.started = time.monotonic()
        self.records: list[dict[str, Any]] = []
        self.selection: dict[str, Any] = {}
        self.interrupted = False
        self.errors = config.stash.setdefault(ERRORS, [])
        self.verdict = ""
        self.problems: list[str] = []
        trial, option = trial_of(config), config.option
        try:
            self.evidence = EvidenceWriter(option.evidence or _new_folder(config))
            self.evidence.append(
                {
                    "kind": "run",
                    "started": _now(),
                    "command": ["pytest", *map(str, config.invocation_params.args)],
                    "selection": {
                        "expression": option.markexpr,
                        "keyword": option.keyword,
                        "last_failed": bool(getattr(option, "lf", False)),
                        "no_faults": option.no_faults,
                        "allow_incomplete": option.allow_incomplete,
                    },
                    "device": trial.device.describe(),
                    "rung": option.rung,
                    "seed": option.seed,
                    "candidates": trial.origins,
                    "dtypes": [str(dtype) for dtype in trial.stack.dtypes],
                    "environment": describe_environment(config.rootpath),
                    "flags": trial.flags,
                    "ranks": session_of(config).describe(),
                }
            )
        except EvidenceError as error:
            raise pytest.UsageError(f"no evidence, no run: {error}") from error

    def add(self, record: dict[str, Any]) -> None:
        """Keep one gate's record, in memory and on disk."""
        try:
            self.evidence.append(record)
        except EvidenceError as error:
            pytest.exit(f"no evidence, no run: {error}")
        self.records.append(record)

    def discard(self) -> None:
        """Take back the evidence of a run that ended in a usage error before any gate."""
        self.evidence.close()
        if not self.records:
            self.evidence.path.unlink()
            with contextlib.suppress(OSError):  # the folder held other files before
                self.evidence.path.parent.rmdir()

    def finish(self, exitstatus: int) -> int:
        """Judge the run, close the evidence, render the report; return the exit status."""
        from harness.report import render

        if exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            self.errors.append("pytest met an internal error")
        elif exitstatus == pytest.ExitCode.TESTS_FAILED and not any(map(_is_wrong, self.records)):
            self.errors.append("pytest reported a failure that is no gate's")
        self.selection["asked"] = asked(self.config.option.markexpr)
        self.verdict, self.problems = run_verdict(
            self.records,
            self.selection.get("selected"),
            self.interrupted,
            self.errors,
            self.selection["asked"],
            [origin["role"] for origin in trial_of(self.config).origins],
        )
        status = exit_status(self.verdict, self.config.option.allow_incomplete, self.interrupted)
        try:
            self.evidence.append({"kind": "selection", **self.selection})
            self.evidence.append(
                {
                    "kind": "end",
                    "verdict": self.verdict,
                    "exit_status": status,
                    "interrupted": self.interrupted,
                    "errors": self.errors,
                    "problems": self.problems,
                    "finished": _now(),
                    "duration_s": time.monotonic() - self.started,
                }
            )
            self.evidence.close()
            render(self.evidence.path.parent)
        except (EvidenceError, OSError) as error:
            self.problems.append(f"The evidence is not complete: {error}")
            self.verdict = "FAILED" if self.verdict == "FAILED" else "INCOMPLETE"
            status = status or EXIT_INCOMPLETE
        return status


def _is_wrong(record: dict[str, Any]) -> bool:
    return record["verdict"] != "NOT_RUN" and not is_as_required(record)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _new_folder(config: pytest.Config) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    parent, number = config.invocation_params.dir / "evidence", 1
    while (parent / f"{stamp}-{number}").exists():
        number += 1
    return parent / f"{stamp}-{number}"


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _begin(config: pytest.Config) -> Run | None:
    """The run of this process; None in a worker and when nothing is to be run."""
    option = config.option
    if _is_worker(config) or option.collectonly or option.setupplan:
        return None
    if RUN not in config.stash:
        config.stash[RUN] = Run(config)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: end in order
    return config.stash[RUN]


# --- what pytest tells ---------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    if asked_for_gates(session.config):
        _begin(session.config)  # a bad candidate or folder is an error before any gate


@pytest.hookimpl(tryfirst=True)  # before -k, -m and --lf look at the items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    drop_unmeant_cases(items)
    config.stash[COLLECTED] = count(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    selection = describe(session, session.config.stash.get(COLLECTED, {}))
    if _is_worker(session.config):
        session.config.workeroutput["selection"] = selection  # type: ignore[attr-defined]
    else:
        _select(session.config, selection)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    num_gates = sum(bool(GATE_ID.fullmatch(name)) for name in ids)
    _select(node.config, {"collected": {}, "selected": num_gates})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    selection = getattr(node, "workeroutput", {}).get("selection")
    if selection:
        _select(node.config, selection)


def _select(config: pytest.Config, selection: dict[str, Any]) -> None:
    """Begin the run if there are gates, and tell it how many were selected."""
    if selection["collected"] or selection["selected"] or RUN in config.stash:
        run = _begin(config)
        if run:
            run.selection = selection


class _Reports:
    """Hears the reports, whose hooks are not told the config."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, "record", None) or _crashed_worker(report)
        run = _begin(self.config) if record else None
        if run and record:
            run.add(record)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not _is_worker(self.config):
            error = f"{report.nodeid} could not be collected: {report.longreprtext}"
            self.config.stash.setdefault(ERRORS, []).append(error)
            if GATE_FILE.fullmatch(report.nodeid.rpartition("/")[2]):
                _begin(self.config)

    def pytest_keyboard_interrupt(self) -> None:
        run = self.config.stash.get(RUN, None)
        if run:
            run.interrupted = True


def _crashed_worker(report: pytest.TestReport) -> dict[str, Any] | None:
    """A worker that died leaves a report without a record; the gate is an ERROR."""
    match = GATE_ID.fullmatch(report.nodeid)
    if not match or getattr(report, "gate", None) or not report.failed:
        return None
    from harness.judge import blank

    case, kind, name = CASE.fullmatch((match[4] or "[]")[1:-1]).groups()  # type: ignore[union-attr]
    unknown = Gate("", (), "", "")
    record = blank(kind or "gate", unknown, f"{match[2]}::{match[3]}", case, report.nodeid)
    if kind:
        record["variant"] = {"name": name, "role": "", "summary": "", "seen_in": "", "because": ""}
    record["reason"] = str(report.longrepr)
    return record


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        config.pluginmanager.register(_Reports(config))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash.get(RUN, None)
    if run and exitstatus == pytest.ExitCode.USAGE_ERROR:
        run.discard()
    elif run:
        session.exitstatus = run.finish(int(exitstatus))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run and run.verdict:
        from harness.summary import write_summary

        write_summary(terminalreporter, run)
        # In CI pytest's last lines would repeat every reason, traceback and all.
        config.option.force_short_summary = True
