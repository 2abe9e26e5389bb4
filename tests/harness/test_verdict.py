"""Claims about verdicts: what passes a bound, and what a gate amounts to."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_evidence import measurement

from harness.verdict import (
    gate_verdict,
    is_as_required,
    margin,
    measurement_passes,
    outcome,
)

NAN, INF = math.nan, math.inf
ORDERED = [{"at_most": 1.0}, {"at_least": -1.0}, {"within": [-1.0, 1.0]}]


def next_up(value):
    return math.nextafter(value, INF)


def next_down(value):
    return math.nextafter(value, -INF)


# --- one measurement -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (1.0, {"at_most": 1.0}),
        (0.5, {"at_least": 0.5}),
        (0.1, {"within": [0.1, 0.2]}),
        (0.2, {"within": (0.1, 0.2)}),
        (3, {"equal": 3.0}),
        (10**30, {"equal": 10**30}),
        ("abc", {"equal": "abc"}),
        ([1, [2.0, "x"]], {"equal": (1, (2, "x"))}),
        (True, {"equal": True}),
        (INF, {"equal": INF}),
        (-(10**400), {"at_most": 0.5}),
    ],
)
def test_a_value_at_the_edge_passes(value, bound):
    assert measurement_passes(value, bound) is True


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (next_up(1.0), {"at_most": 1.0}),
        (next_down(0.5), {"at_least": 0.5}),
        (next_down(0.1), {"within": [0.1, 0.2]}),
        (next_up(0.2), {"within": [0.1, 0.2]}),
        (next_up(3.0), {"equal": 3}),
        (10**30 + 1, {"equal": 1e30}),
        ("abc", {"equal": "abd"}),
        ([1, 2], {"equal": [1, 2, 3]}),
        ([1, 2], {"equal": [2, 1]}),
        ("1", {"equal": 1}),
        (1, {"equal": [1]}),
    ],
)
def test_a_value_past_the_edge_fails(value, bound):
    assert measurement_passes(value, bound) is False


@pytest.mark.parametrize("bound", [*ORDERED, {"equal": 1.0}])
def test_nan_never_passes(bound):
    assert not measurement_passes(NAN, bound)


def test_nan_in_a_list_equals_nothing():
    assert not measurement_passes([1.0, NAN], {"equal": [1.0, 2.0]})


@pytest.mark.parametrize("bound", ORDERED)
@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinity_passes_no_order(value, bound):
    assert not measurement_passes(value, bound)


def test_true_is_not_one():
    assert not measurement_passes(1, {"equal": True})
    assert not measurement_passes(True, {"equal": 1})


@pytest.mark.parametrize(
    "bound",
    [
        {},
        {"at_most": 1, "at_least": 0},
        {"below": 1},
        {"at_most": NAN},
        {"at_most": INF},
        {"at_least": -INF},
        {"at_most": "1"},
        {"at_most": True},
        {"within": [2, 1]},
        {"within": [0]},
        {"within": [-INF, 0]},
        {"within": 3},
        {"equal": NAN},
        {"equal": [1, [NAN]]},
    ],
)
def test_a_bound_that_decides_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="bound"):
        measurement_passes(0.0, bound)
    with pytest.raises(ValueError, match="bound"):
        margin(0.0, bound)


@pytest.mark.parametrize("value", ["0", True, [0.0]])
def test_an_order_needs_a_number(value):
    with pytest.raises(ValueError, match="at_most bounds a number"):
        measurement_passes(value, {"at_most": 1})


# --- margins ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bound", "expected"),
    [
        (0.25, {"at_most": 1.0}, 0.75),
        (0.0, {"at_most": 1.0}, 1.0),
        (-5.0, {"at_most": 1.0}, 1.0),
        (3.0, {"at_most": 1.0}, -2.0),
        (1.0, {"at_least": 0.5}, 0.5),
        (0.5, {"at_least": 0.5}, 0.0),
        (0.25, {"at_least": 0.5}, -1.0),
        (-3.0, {"at_most": -1.5}, 0.5),
        (-0.5, {"at_least": -2.0}, 0.75),
        (4.0, {"at_least": -2.0}, 1.0),
        (0.5, {"within": [0.0, 1.0]}, 1.0),
        (0.25, {"within": [0.0, 1.0]}, 0.5),
        (1.0, {"within": [0.0, 1.0]}, 0.0),
        (1.5, {"within": [0.0, 1.0]}, -1.0),
    ],
)
def test_margin_is_the_unused_share_of_the_bound(value, bound, expected):
    assert margin(value, bound) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (1, {"equal": 1}),
        (0.0, {"at_most": 0}),
        (1.0, {"within": [1, 1]}),
        (NAN, {"at_most": 1}),
        (INF, {"at_least": 1}),
        (-1.0, {"at_least": 1}),
        (1.0, {"at_most": -1}),
    ],
)
def test_margin_is_none_where_a_share_means_nothing(value, bound):
    assert margin(value, bound) is None


FINITE = st.floats(-1e150, 1e150)


@given(value=FINITE, limit=FINITE, kind=st.sampled_from(["at_most", "at_least"]))
def test_a_negative_margin_never_stands_beside_a_pass(value, limit, kind):
    found = margin(value, {kind: limit})
    if found is not None and found < 0:
        assert not measurement_passes(value, {kind: limit})
    if found is not None and found > 1e-12:
        assert measurement_passes(value, {kind: limit})


# --- one gate --------------------------------------------------------------------------------

GOOD, BAD = measurement("a", 0.5, at_most=1), measurement("b", 2.0, at_most=1)


def test_a_gate_that_measured_nothing_is_an_error():
    assert gate_verdict([]) == "ERROR"


def test_a_gate_passes_only_if_every_measurement_does():
    assert gate_verdict([GOOD, GOOD]) == "PASS"
    assert gate_verdict([GOOD, BAD]) == "FAIL"
    assert gate_verdict([BAD, GOOD]) == "FAIL"


def test_a_failed_measurement_cannot_be_skipped_away():
    assert gate_verdict([BAD], not_run="no GPU") == "FAIL"


def test_a_crash_is_an_error_whatever_was_measured():
    assert gate_verdict([BAD], error="RuntimeError") == "ERROR"
    assert gate_verdict([GOOD], error="RuntimeError") == "ERROR"


def test_a_gate_that_cannot_run_is_not_run():
    assert gate_verdict([], not_run="no GPU") == "NOT_RUN"


def test_a_passed_flag_that_is_no_bool_does_not_pass():
    assert gate_verdict([{**GOOD, "passed": 1}]) == "FAIL"


@pytest.mark.parametrize(
    ("kind", "verdict", "word", "right"),
    [
        ("gate", "PASS", "PASS", True),
        ("gate", "FAIL", "FAIL", False),
        ("gate", "ERROR", "ERROR", False),
        ("gate", "NOT_RUN", "NOT RUN", False),
        ("fault", "FAIL", "CAUGHT", True),
        ("fault", "PASS", "MISSED", False),
        ("fault", "ERROR", "CRASHED", False),
        ("fault", "NOT_RUN", "NOT RUN", False),
        ("benign", "PASS", "ACCEPTED", True),
        ("benign", "FAIL", "FALSE ALARM", False),
        ("benign", "ERROR", "CRASHED", False),
        ("benign", "NOT_RUN", "NOT RUN", False),
    ],
)
def test_a_fault_must_fail_and_everything_else_must_pass(kind, verdict, word, right):
    made = {"kind": kind, "verdict": verdict}
    assert outcome(made) == word
    assert is_as_required(made) is right
