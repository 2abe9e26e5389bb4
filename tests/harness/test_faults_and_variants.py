"""A fault must be caught by the gate's own measurement, a benign variant must be accepted."""

import pytest

TWO_GATES = """
@gate(claim="double doubles", **about)
@pytest.mark.parametrize("x", [0, 1, 3])
def test_double(stack, x, check):
    check("value", stack.double(x), equal=2 * x, because="it is arithmetic")
"""
FAULT = """
@fault(role="double", caught_by={gates!r}, seen_in="own")
def wrong(reference):
    "Something wrong."
    return {role}
"""
BENIGN = """
@benign(role="double", accepted_by="m1_toy::test_double", because="the same by another way")
def other(reference):
    "Another way."
    return {role}
"""
CASES = ["m1_toy::test_double[1]", "m1_toy::test_double[3]"]


@pytest.fixture
def toy_of(toy):
    def make(variant, **values):
        toy.gates(TWO_GATES)
        toy.faults(variant.format(**{"gates": CASES, **values}))
        return toy

    return make


def test_a_fault_that_is_caught_lets_the_run_pass(toy_of):
    toy = toy_of(FAULT, role="lambda x: x * x")
    assert toy.run().ret == 0
    assert toy.verdicts("fault") == ["FAIL", "FAIL"]
    (one, _) = toy.evidence("fault")
    assert one["variant"] == {
        "name": "wrong", "role": "double", "summary": "Something wrong.", "seen_in": "own",
    }  # fmt: skip


def test_a_fault_that_is_not_caught_fails_the_run(toy_of):
    result = toy_of(FAULT, role="reference.double").run()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*MISSED: the fault wrong (Something wrong.) was not caught by*"])


def test_a_crash_is_not_a_catch(toy_of):
    toy = toy_of(FAULT, role="lambda x: 1 / 0")
    result = toy.run()
    assert result.ret == 1
    assert toy.verdicts("fault") == ["ERROR", "ERROR"]
    result.stdout.fnmatch_lines(["*crashed instead of failing: ZeroDivisionError*"])


def test_a_failed_assert_is_not_a_catch(toy_of):
    assert toy_of(FAULT, role="lambda x: pytest.fail('no')").run().ret == 1


def test_a_fault_that_cannot_be_built_is_not_a_catch(toy_of):
    toy = toy_of(FAULT, role="reference.no_such_role")
    assert toy.run().ret == 1
    assert toy.verdicts("fault") == ["ERROR", "ERROR"]


def test_a_fault_that_is_not_run_is_incomplete(toy_of):
    toy = toy_of(FAULT, role="lambda x: pytest.skip('no compiler')")
    assert toy.run().ret == 6
    assert toy.end()["verdict"] == "INCOMPLETE"


def test_without_a_case_every_case_must_catch_the_fault(toy_of):
    toy = toy_of(FAULT, gates="m1_toy::test_double", role="lambda x: x * x")
    assert toy.run().ret == 1, "0 * 0 is 2 * 0: the fault does not show there"
    assert toy.verdicts("fault") == ["FAIL", "FAIL", "PASS"]


def test_a_benign_variant_that_is_accepted_lets_the_run_pass(toy_of):
    toy = toy_of(BENIGN, role="lambda x: x + x")
    assert toy.run().ret == 0
    assert toy.verdicts("benign") == ["PASS"] * 3


@pytest.mark.parametrize("role", ["lambda x: x", "lambda x: 1 / 0"])
def test_a_false_alarm_fails_the_run(toy_of, role):
    assert toy_of(BENIGN, role=role).run().ret == 1


def test_no_faults_leaves_the_faults_out_and_keeps_the_benign_variants(toy_of):
    toy = toy_of(FAULT + BENIGN.replace("{role}", "lambda x: x + x"), role="reference.double")
    assert toy.run("m1_toy.py", "--no-faults").ret == 0
    assert (toy.verdicts("fault"), toy.verdicts("benign")) == ([], ["PASS"] * 3)
    assert toy.evidence("run")[0]["selection"]["no_faults"] is True


def test_faults_run_on_the_reference_whatever_is_on_trial(toy_of):
    toy = toy_of(FAULT, role="lambda x: reference.half(4 * x) + x")
    toy.candidate("ROLES = {'half': lambda x: x}")
    toy.run("m1_toy.py", "--candidate", "mine")
    assert sorted(f["measurements"][0]["value"] for f in toy.evidence("fault")) == [3, 9]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("@fault(role='double', caught_by=[], seen_in='own')", "at least one gate"),
        ("@fault(role='double', caught_by='m1_toy::test_double', seen_in='')", "an origin"),
    ],
)
def test_a_fault_that_says_too_little_is_refused(toy, declaration, message):
    toy.gates(TWO_GATES)
    toy.faults(f"{declaration}\ndef wrong(reference):\n    'Wrong.'\n")
    result = toy.run()
    assert result.ret != 0
    result.stdout.fnmatch_lines([f"*{message}*"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def test_bare(stack):\n    pass", "not marked with @gate"),
        ("@gate(claim='c', **about)\ndef test_blind(check):\n    pass", "takes no stack"),
        ("@gate(claim='', **about)\ndef test_mute(stack):\n    pass", "a gate states claim"),
    ],
)
def test_a_gate_that_could_not_fail_is_not_collected(toy, source, message):
    toy.gates(source)
    result = toy.run()
    assert result.ret == 1
    assert toy.end()["verdict"] == "FAILED"
    result.stdout.fnmatch_lines([f"*{message}*"])


def test_a_fault_that_another_family_imports_is_planted_once(toy_of):
    toy = toy_of(FAULT, role="lambda x: x * x")
    (toy.path / "faults" / "another.py").write_text("from faults.toy import wrong\n")
    assert toy.run().ret == 0
    assert toy.verdicts("fault") == ["FAIL", "FAIL"]
