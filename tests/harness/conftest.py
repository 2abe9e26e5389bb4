"""A toy project: a reference of two roles, one gate, and what a test puts beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401
import pytest

from harness.devices import find, force_numerics

# pytester forgets what its runs imported, and torch's parts cannot be imported twice in a process.
force_numerics(find("cpu"))

REFERENCE = """
def double(x):
    return 2 * x

def half(x):
    return x / 2

ROLES = {"double": double, "half": half}
"""
HEAD = """
import pytest
from harness import benign, fault, gate, not_run
about = dict(roles=["double"], not_claimed="the rest", source="arithmetic")
"""
GATE = """
@gate(claim="double doubles", **about)
@pytest.mark.parametrize("x", [0, 1, 3])
def test_double(stack, x, check):
    check("value", stack.double(x), equal=2 * x, because="it is arithmetic")
"""


class Toy:
    """A project in an empty folder, and pytest run on it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        pytester.makeini("[pytest]\ntouchstone_reference = toy_reference")
        pytester.makepyfile(toy_reference=REFERENCE)

    def gates(self, source: str = GATE, file: str = "m1_toy") -> None:
        self.pytester.makepyfile(**{file: HEAD + source})

    def faults(self, source: str) -> None:
        package = self.pytester.mkpydir("faults")
        (package / "toy.py").write_text(HEAD + source)

    def candidate(self, body: str, name: str = "mine") -> None:
        self.pytester.makepyfile(**{name: body})

    def run(self, *arguments: str, new_process: bool = False) -> pytest.RunResult:
        run = self.pytester.runpytest_subprocess if new_process else self.pytester.runpytest
        return run("-p", "no:randomly", *(arguments or ["m1_toy.py"]))

    @property
    def folder(self) -> Path:
        """The evidence folder of the newest run."""
        return max((self.path / "evidence").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def evidence(self, kind: str = "") -> list[dict[str, Any]]:
        lines = (self.folder / "evidence.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [record for record in records if not kind or record["kind"] == kind]

    def end(self) -> dict[str, Any]:
        (end,) = self.evidence("end")
        return end

    def verdicts(self, kind: str = "gate") -> list[str]:
        return sorted(record["verdict"] for record in self.evidence(kind))


@pytest.fixture
def toy(pytester: pytest.Pytester) -> Toy:
    return Toy(pytester)
