"""``python -m harness``: render a report again, verify evidence, look for false alarms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.evidence import EvidenceError, read

BROKEN = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "false-alarms":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "report":
            return _report(options.directory)
        if options.command == "verify":
            return _verify(options.directory)
        from harness.false_alarms import false_alarms

        return false_alarms(options.seeds, rest)
    except (EvidenceError, ValueError) as error:
        print(f"harness {options.command}: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print(f"harness {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="render report.html, report.json, summary.md and junit.xml again",
        description="Renders again from evidence.jsonl only. Nothing is run or judged anew.",
    )
    verify = commands.add_parser(
        "verify",
        help="recompute every hash and verdict",
        description="Exit status 0: sound; 1: a problem, one sentence each; 2: no evidence.",
    )
    for command in (report, verify):
        command.add_argument("directory", type=Path, metavar="DIR", help="a run's evidence folder")
    alarms = commands.add_parser(
        "false-alarms",
        help="run the gates and their benign variants over many seeds",
        description="Runs pytest once a seed with --no-faults and counts who was accepted. Other "
        "arguments go to pytest. Exit status 0: every gate passed on every seed; 1: a false "
        "alarm; 2: a seed without evidence; 6: something did not run.",
        allow_abbrev=False,
    )
    alarms.add_argument("--seeds", type=int, default=20, help="how many seeds (default 20)")
    return parser


def _report(directory: Path) -> int:
    from harness.report import render
    from harness.view import Report

    verdict = Report(read(directory)).verdict
    page = render(directory)
    print(f"{verdict}, as recorded. Rendered: {page}")
    return 0


def _verify(directory: Path) -> int:
    from harness.verify import verify

    problems = verify(directory)
    for problem in problems:
        print(problem)
    if problems:
        return 1
    records = read(directory)
    end = records[-1]
    print(f"Sound: {len(records)} lines, verdict {end['verdict']}, last hash {end['hash']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
