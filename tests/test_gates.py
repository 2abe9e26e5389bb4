"""Every gate is shown to fail: it has a fault, and every variant names cases that exist."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import gates
from gates import fresh_process
from harness.contract import Gate, variants_beside
from harness.portable import Recipe

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


def hash_of_a_text(stack):
    return hash("a text")


def hashes_here_and_there():
    recipe = Recipe("reference.stack", (), "cpu", None)
    there = fresh_process.call(recipe, hash_of_a_text, "cpu")
    return f"{hash_of_a_text(None)} {there}"


@pytest.mark.parametrize("seed_here", ["0", "1", "random"])
def test_texts_have_other_hashes_in_a_fresh_process(seed_here):
    program = "from tests import test_gates; print(test_gates.hashes_here_and_there())"
    here, there = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed_here},
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert here != there


def test_roles_on_trial_are_roles_of_the_stack():
    from reference.stack import ROLES

    unknown = {role for _, gate in gate_functions() for role in gate.roles} - ROLES.keys()
    assert not unknown


def test_there_are_as_many_as_promised(variants):
    counts = Counter(variant.kind for variant in variants)
    assert counts["fault"] >= 60
    assert counts["benign"] >= 15
