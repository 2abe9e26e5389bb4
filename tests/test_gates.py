"""Every gate is shown to fail: it has a fault, and every variant names cases that exist."""

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import gates
from harness.contract import Gate, variants_beside

FOLDER = Path(gates.__path__[0])


@pytest.fixture(scope="module")
def collected():
    """The node ids of every gate's items: {"file::function": {(case, variant), …}}."""
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--collect-only", "-q"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent).stdout
    items = {}
    for line in output.splitlines():
        match = re.search(
            r"(m\d_\w+)\.py::(\w+)\[(?:(.*)-)?((?:fault|benign):\w+|reference)\]", line
        )
        if match:
            file, function, case, variant = match.groups()
            items.setdefault(f"{file}::{function}", set()).add((case or "", variant))
    assert items, output
    return items


@pytest.fixture(scope="module")
def variants():
    module = importlib.import_module("gates.ladder")
    return list(variants_beside(module))


def gate_functions():
    for file in sorted(FOLDER.glob("m[0-6]_*.py")):
        module = importlib.import_module(f"gates.{file.stem}")
        for name, function in vars(module).items():
            if isinstance(getattr(function, "gate", None), Gate):
                yield f"{file.stem}::{name}", function.gate


def test_every_gate_has_a_fault(variants):
    named = {name.partition("[")[0] for v in variants if v.kind == "fault" for name in v.gates}
    toothless = sorted({name for name, _ in gate_functions()} - named)
    assert not toothless


def test_every_variant_runs_in_every_case_that_it_names(variants, collected):
    dangling = []
    for variant in variants:
        for name in variant.gates:
            gate, _, case = name.partition("[")
            ran = {c for c, v in collected.get(gate, ()) if v == f"{variant.kind}:{variant.name}"}
            if not ran or (case and case.rstrip("]") not in ran):
                dangling.append(f"{variant.name} names {name}")
    assert not dangling


def test_names_of_variants_are_unique(variants):
    counts = Counter(variant.name for variant in variants)
    assert not [name for name, count in counts.items() if count > 1]


def test_roles_on_trial_are_roles_of_the_stack():
    from reference.stack import ROLES

    unknown = {role for _, gate in gate_functions() for role in gate.roles} - ROLES.keys()
    assert not unknown


def test_there_are_as_many_as_promised(variants):
    counts = Counter(variant.kind for variant in variants)
    assert counts["fault"] >= 60
    assert counts["benign"] >= 15
