"""A check records first and judges second, and cannot be written so that it never fails."""

import math

import pytest
import torch

from harness.checks import Check, CheckFailed, plain

NAN, INF = float("nan"), float("inf")


def recorded(value, **bound):
    check = Check()
    try:
        check("v", value, because="a reason", **bound)
    except CheckFailed:
        passed = False
    else:
        passed = True
    (measurement,) = check.measurements.values()
    assert measurement["passed"] is passed
    return measurement


@pytest.mark.parametrize(
    ("value", "bound", "passes"),
    [
        (1.0, {"at_most": 1.0}, True),
        (math.nextafter(1.0, 2), {"at_most": 1.0}, False),
        (1.0, {"at_least": 1.0}, True),
        (math.nextafter(1.0, 0), {"at_least": 1.0}, False),
        (0.9, {"within": (0.9, 1.1)}, True),
        (1.1, {"within": (0.9, 1.1)}, True),
        (math.nextafter(1.1, 2), {"within": (0.9, 1.1)}, False),
        (math.nextafter(0.9, 0), {"within": (0.9, 1.1)}, False),
        (3, {"equal": 3}, True),
        (3, {"equal": 4}, False),
        ([1, 2], {"equal": [1, 2]}, True),
        ([1, 2], {"equal": [2, 1]}, False),
        ([1, 2], {"equal": [1, 2, 3]}, False),
        ("bf16", {"equal": "bf16"}, True),
        (True, {"equal": 1}, False),
        (0, {"at_most": 0}, True),
    ],
)
def test_at_and_past_the_edge(value, bound, passes):
    assert recorded(value, **bound)["passed"] is passes


@pytest.mark.parametrize("bound", [{"at_most": 1}, {"at_least": -1}, {"within": (-1, 1)}])
@pytest.mark.parametrize("value", [NAN, INF, -INF, torch.tensor(NAN)])
def test_nan_and_infinity_never_pass(value, bound):
    assert recorded(value, **bound)["passed"] is False


def test_nan_is_equal_to_nothing():
    assert recorded(NAN, equal=1.0)["passed"] is False
    with pytest.raises(ValueError, match="NaN"):
        recorded(NAN, equal=NAN)


def test_a_failure_has_its_number():
    with pytest.raises(CheckFailed, match=r"norm: measured 2.0, must be at most 1 nats \(why\)"):
        Check()("norm", 2.0, at_most=1, because="why", unit="nats")


@pytest.mark.parametrize(
    "bound",
    [
        {},
        {"at_most": 1, "at_least": 0},
        {"at_most": INF},
        {"at_least": -INF},
        {"at_most": NAN},
        {"within": (0, INF)},
        {"within": (1, 0)},
        {"within": (0, 1, 2)},
        {"at_most": "1"},
        {"at_most": True},
        {"at_least": [1]},
    ],
    ids=str,
)
def test_a_bound_that_cannot_fail_is_refused(bound):
    with pytest.raises(ValueError, match="'v'"):
        Check()("v", 0.5, because="a reason", **bound)


def test_a_bound_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="a reason"):
        Check()("v", 0.5, at_most=1, because="")


@pytest.mark.parametrize("value", [None, torch.ones(2), torch.ones(0), {1: 2}, object()])
def test_only_one_number_string_or_list_is_a_measurement(value):
    with pytest.raises(ValueError, match="a measurement is"):
        Check()("v", value, equal=1, because="a reason")


def test_tensors_and_sizes_become_plain():
    assert plain(torch.tensor([2.5], dtype=torch.float64)) == 2.5
    assert plain(torch.ones(2, 3).shape) == [2, 3]
    assert plain(torch.tensor(7)) == 7 and isinstance(plain(torch.tensor(7)), int)


def test_the_worst_of_a_name_is_kept_with_the_count():
    check = Check()
    for value in (0.2, 0.9, 0.5):
        check("error", value, at_most=1.0, because="a reason")
    assert check.measurements["error"]["value"] == 0.9
    assert check.measurements["error"]["count"] == 3


def test_a_failure_outweighs_every_pass():
    check = Check()
    check("v", 1, equal=1, because="a reason")
    with pytest.raises(CheckFailed):
        check("v", 2, equal=1, because="a reason")
    check("v", 1, equal=1, because="a reason")
    assert check.measurements["v"]["passed"] is False
    assert check.measurements["v"]["count"] == 3


def test_a_series_needs_as_many_places_as_points():
    check = Check()
    check.series("loss", [3, 2])
    assert check.curves[0]["x"] == [1, 2]
    for y, x in (([], None), ([1, 2], [1])):
        with pytest.raises(ValueError, match="points"):
            check.series("loss", y, x)
