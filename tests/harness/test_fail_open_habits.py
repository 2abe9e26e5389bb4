"""Habits by which other projects' red runs came out green. None of them works here.

Those of a single number (a tolerance that is dropped, an inequality turned round, a threshold that
nothing reaches, a few elements exempt, a buffer compared with itself) are in test_checks and
test_compare.
"""

import tomllib
from pathlib import Path

import pytest

MEASURE = "check('value', stack.double(1), equal=2, because='arithmetic')"
GATE = "@gate(claim='a claim', **about)\n{marks}def test_it(stack, check{more}):\n    {body}\n"


def gate(body=MEASURE, marks="", more=""):
    return GATE.format(body=body, marks=marks, more=more)


@pytest.mark.parametrize(
    "source",
    [
        gate("pytest.skip('everything is skipped')"),
        gate("pytest.importorskip('no_such_compiler')"),
        gate(marks="@pytest.mark.skip(reason='flaky')\n"),
        gate(marks="@pytest.mark.parametrize('x', [])\n", more=", x"),
    ],
    ids=["skip", "importorskip", "mark", "empty parameter list"],
)
def test_what_is_skipped_is_incomplete(toy, source):
    toy.gates(source)
    assert toy.run().ret == 6
    assert toy.end()["verdict"] == "INCOMPLETE"


def test_a_gate_that_asserts_instead_of_measuring_is_an_error_even_when_it_holds(toy):
    toy.gates(gate("assert stack.double(1) == 2"))
    assert toy.run().ret == 1
    assert toy.evidence("gate")[0]["reason"] == "the gate measured nothing"


def test_a_gate_that_is_run_again_until_it_passes_fails_the_run(toy):
    toy.gates(
        gate(
            "import pathlib; first = not pathlib.Path('ran').exists(); pathlib.Path('ran').touch()"
            "\n    check('value', 1 if first else 2, equal=2, because='arithmetic')"
        )
    )
    toy.pytester.makeconftest(
        "from _pytest.runner import runtestprotocol\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    for _ in range(2):\n"
        "        item._initrequest()\n"
        "        reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "        for report in reports:\n"
        "            item.ihook.pytest_runtest_logreport(report=report)\n"
        "    return True\n"
    )
    assert toy.run().ret == 1
    assert toy.end()["verdict"] == "FAILED"


def test_a_result_that_never_arrives_is_no_success(toy):
    toy.gates(gate() + gate().replace("test_it", "test_lost"))
    toy.pytester.makeconftest(
        "def pytest_runtest_protocol(item):\n    return True if 'lost' in item.name else None\n"
    )
    assert toy.run().ret == 6
    assert any("2 gate runs" in problem for problem in toy.end()["problems"])


def test_a_gate_whose_prerequisite_was_deselected_does_not_pass(toy):
    depends = "not_run('test_first did not run')"
    toy.gates(gate().replace("test_it", "test_first") + gate(depends))
    assert toy.run("m1_toy.py", "-k", "test_it").ret == 6


def test_our_own_suite_is_strict():
    file = Path(__file__).parents[2] / "pyproject.toml"
    options = tomllib.loads(file.read_text())["tool"]["pytest"]["ini_options"]
    assert options["strict"] is True, "--strict-markers in addopts is ignored by some releases"
    assert options["empty_parameter_set_mark"] == "fail_at_collect"
