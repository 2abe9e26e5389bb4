"""Claims about the verdict and the exit status of a run."""

import pytest
from toy_evidence import measurement, not_run, record, small_records, variant

from harness.verdict import exit_status, run_verdict

GOOD, BAD = measurement("a", 0.5, at_most=1), measurement("b", 2.0, at_most=1)


def judged(records, selected=None, interrupted=False, errors=()):
    return run_verdict(records, len(records) if selected is None else selected, interrupted, errors)


def with_kind(kind, verdict):
    """The small run in which the first record of ``kind`` has another verdict."""
    records = small_records()
    place = next(i for i, made in enumerate(records) if made["kind"] == kind)
    records[place] = {**records[place], "verdict": verdict, "reason": "something happened"}
    return records


def test_a_run_passes_when_all_is_as_required():
    assert judged(small_records()) == ("PASSED", [])


@pytest.mark.parametrize(
    ("kind", "verdict", "word"),
    [
        ("gate", "FAIL", "FAIL"),
        ("gate", "ERROR", "ERROR"),
        ("fault", "PASS", "MISSED"),
        ("fault", "ERROR", "CRASHED"),
        ("benign", "FAIL", "FALSE ALARM"),
        ("benign", "ERROR", "CRASHED"),
    ],
)
def test_one_thing_not_as_required_fails_the_run(kind, verdict, word):
    found, problems = judged(with_kind(kind, verdict))
    assert found == "FAILED"
    assert len(problems) == 1
    assert problems[0].startswith(word)


@pytest.mark.parametrize("kind", ["gate", "fault", "benign"])
def test_one_thing_not_run_makes_the_run_incomplete(kind):
    found, problems = judged(with_kind(kind, "NOT_RUN"))
    assert found == "INCOMPLETE"
    assert problems[0].startswith("NOT RUN")


def test_nothing_selected_is_incomplete():
    assert judged([]) == ("INCOMPLETE", ["No gate ran."])


def test_everything_not_run_is_incomplete():
    found, problems = judged([not_run(made, "No GPU.") for made in small_records()])
    assert found == "INCOMPLETE"
    assert problems[-1] == "No gate ran."


def test_faults_alone_are_incomplete():
    faults = [made for made in small_records() if made["kind"] == "fault"]
    assert judged(faults) == ("INCOMPLETE", ["No gate ran."])


def test_a_missing_record_is_never_read_as_success():
    records = small_records()
    assert judged(records, selected=len(records) + 1)[0] == "INCOMPLETE"
    assert judged(records, selected=len(records) - 1)[0] == "INCOMPLETE"
    assert run_verdict(records, None, False)[0] == "INCOMPLETE"


def test_a_gate_tried_twice_fails_the_run():
    records = small_records()
    found, problems = judged([*records, records[0]], selected=len(records) + 1)
    assert found == "FAILED"
    assert "more than once" in problems[0]


def test_an_interrupted_run_is_incomplete_and_a_failure_stays_a_failure():
    assert judged(small_records(), interrupted=True)[0] == "INCOMPLETE"
    assert judged(with_kind("gate", "FAIL"), interrupted=True)[0] == "FAILED"


def test_an_error_outside_the_gates_fails_the_run():
    found, problems = judged(small_records(), errors=["m1_x.py could not be collected."])
    assert (found, problems) == ("FAILED", ["m1_x.py could not be collected."])


def test_failures_come_before_what_was_not_run():
    records = [*with_kind("gate", "NOT_RUN"), record("m1_x::test_y", BAD)]
    found, problems = judged(records)
    assert found == "FAILED"
    assert [text.split()[0] for text in problems] == ["FAIL", "NOT"]


def test_problems_name_the_fault_and_the_gate():
    missed = variant("fault", "off_by_one", "split", "Off by one.", "own", "m1_x::test_y", GOOD)
    _, problems = judged([*small_records(), missed])
    assert problems == ["MISSED m1_x::test_y accepts the fault off_by_one."]


@pytest.mark.parametrize(
    ("verdict", "allow", "interrupted", "status"),
    [
        ("PASSED", False, False, 0),
        ("FAILED", False, False, 1),
        ("FAILED", True, True, 1),
        ("INCOMPLETE", False, False, 6),
        ("INCOMPLETE", True, False, 0),
        ("INCOMPLETE", False, True, 2),
        ("INCOMPLETE", True, True, 2),
    ],
)
def test_exit_status(verdict, allow, interrupted, status):
    assert exit_status(verdict, allow, interrupted) == status


def test_an_unknown_verdict_has_no_exit_status():
    with pytest.raises(ValueError, match="unknown verdict 'OK'"):
        exit_status("OK")


def test_a_role_on_trial_that_no_gate_called_is_incomplete():
    records = [record("m1_toy::test_a", measurement("v", 1, equal=1), roles=("rope",))]
    assert run_verdict(records, 1, False, on_trial=["rope"])[0] == "PASSED"
    verdict, problems = run_verdict(records, 1, False, on_trial=["rope", "swiglu"])
    assert verdict == "INCOMPLETE"
    assert problems == ["No selected gate called the role swiglu, so it was not on trial."]


def test_a_milestone_that_is_asked_for_and_did_not_run_is_incomplete():
    records = [record("m1_toy::test_a", measurement("v", 1, equal=1))]
    assert run_verdict(records, 1, False, asked=["M1"])[0] == "PASSED"
    assert run_verdict(records, 1, False, asked=["M1", "M3"])[0] == "INCOMPLETE"
