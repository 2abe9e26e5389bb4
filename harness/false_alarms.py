"""Do the gates reject what is right? The stack on trial and every benign variant, seed by seed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from harness.evidence import EvidenceError, read
from harness.groups import Record
from harness.verdict import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_PASSED, GATE_KINDS

OWN_OPTIONS = ("--no-faults", "--seed", "--evidence")
Key = tuple[str, str]  # gate, who was on trial


def false_alarms(num_seeds: int, pytest_arguments: Sequence[str]) -> int:
    """Run pytest once a seed, print a table of passes, and return the exit status.

    0 if every gate passed on every seed, 1 at any false alarm or error, 6 if something did not
    run. The evidence is kept when there was an alarm.

    Raises:
        ValueError: no seed, or an option that this command sets itself.
        EvidenceError: a seed left no evidence.
    """
    if num_seeds < 1:
        raise ValueError(f"--seeds {num_seeds}: give at least 1")
    for argument in pytest_arguments:
        if argument.partition("=")[0] in OWN_OPTIONS:
            raise ValueError(f"{argument} is set for every seed; leave it out")
    folder = Path(tempfile.mkdtemp(prefix="touchstone-false-alarms-"))
    console = Console()
    seeds = [
        _run_seed(seed, pytest_arguments, folder)
        for seed in track(range(num_seeds), "seeds", console=console, transient=True)
    ]
    verdicts = _count(records for records, _ in seeds)
    console.print(_table(verdicts, num_seeds))
    alarms = sum(count["FAIL"] + count["ERROR"] for count in verdicts.values())
    missing = sum(_expected(count, num_seeds) - count["PASS"] for count in verdicts.values())
    if alarms:
        console.print(f"{alarms} false alarms; the evidence is kept in {folder}", soft_wrap=True)
        return EXIT_FAILED
    shutil.rmtree(folder)
    if missing or any(verdict != "PASSED" for _, verdict in seeds):
        console.print("no false alarm, but not everything ran: INCOMPLETE")
        return EXIT_INCOMPLETE
    passed = sum(count["PASS"] for count in verdicts.values())
    console.print(f"no false alarm in {passed} gate runs over {num_seeds} seeds")
    return EXIT_PASSED


def _run_seed(seed: int, pytest_arguments: Sequence[str], folder: Path) -> tuple[list[Record], str]:
    """The records of a seed's run, and its verdict."""
    evidence = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "pytest", *pytest_arguments, "--no-faults"]
    command += ["--seed", str(seed), "--evidence", str(evidence)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        records = read(evidence)
    except EvidenceError as error:
        told = (done.stdout + done.stderr).strip()[-2000:]
        raise EvidenceError(f"seed {seed} left no evidence ({error}); pytest said:\n{told}") from (
            error
        )
    errors = records[-1].get("errors", [])
    if records[-1]["kind"] != "end" or errors:
        told = "".join(f"\n{error[-500:]}" for error in errors)
        raise EvidenceError(f"seed {seed} did not come to its end; see {evidence}{told}")
    judged = [record for record in records if record["kind"] in GATE_KINDS]
    return judged, str(records[-1]["verdict"])


def _who(record: Record) -> str:
    return f"benign: {record['variant']['name']}" if "variant" in record else "on trial"


def _count(seeds: Iterable[list[Record]]) -> dict[Key, Counter[str]]:
    """Verdicts by gate and implementation, and "cases", the most that one seed had."""
    counts: dict[Key, Counter[str]] = {}
    for records in seeds:
        cases = Counter((record["gate"], _who(record)) for record in records)
        for record in records:
            counts.setdefault((record["gate"], _who(record)), Counter())[record["verdict"]] += 1
        for key, num_cases in cases.items():
            counts[key]["cases"] = max(counts[key]["cases"], num_cases)
    return counts


def _expected(count: Counter[str], num_seeds: int) -> int:
    return num_seeds * count["cases"]


def _table(verdicts: dict[Key, Counter[str]], num_seeds: int) -> Table:
    table = Table(title=f"Passes over {num_seeds} seeds", title_justify="left")
    table.add_column("gate", overflow="fold")
    table.add_column("implementation", overflow="fold")
    for name in ("cases", "passed", "alarms", "not run"):
        table.add_column(name, justify="right")
    for (gate, who), count in sorted(verdicts.items()):
        table.add_row(
            gate,
            who,
            str(count["cases"]),
            f"{count['PASS']}/{_expected(count, num_seeds)}",
            str(count["FAIL"] + count["ERROR"]),
            str(count["NOT_RUN"]),
        )
    return table
