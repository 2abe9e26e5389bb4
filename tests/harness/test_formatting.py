"""Claims about numbers, bounds and margins as a reader sees them."""

import math

import pytest

from harness.formatting import TIMES, duration, measured, number, share


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7615616512, "7,615,616,512"),
        (20.0, "20"),
        (0.123456, "0.1235"),
        (12345.678, "12,346"),
        (1234567.0, "1.235e6"),
        (3.2e-15, "3.2e-15"),
        (-2.5, "-2.5"),
        (math.nan, "NaN"),
        (-math.inf, "-infinity"),
        (True, "true"),
    ],
)
def test_numbers_are_short_and_integers_exact(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "bound", "texts"),
    [
        (0.02000001, {"at_most": 0.02}, ("0.02000001", "≤ 0.02")),
        (0.02, {"at_most": 0.02}, ("0.02", "≤ 0.02")),
        (1 + 2**-52, {"within": [1 - 1e-12, 1 + 1e-12]}, ("1 + 2.22e-16", "in 1 ± 1e-12")),
        (0.985, {"within": [1 - 1e-12, 1 + 1e-12]}, ("0.985", "in 1 ± 1e-12")),
        (0.4, {"within": [0.1, 0.9]}, ("0.4", "in 0.1 … 0.9")),
        (math.nan, {"within": [1 - 1e-12, 1 + 1e-12]}, ("NaN", "in 1 ± 1e-12")),
        ([1, 2], {"equal": [1, 3]}, ("[1, 2]", "= [1, 3]")),
        (
            list(range(100)),
            {"equal": [*range(50), 0, *range(51, 100)]},
            ("entry 50: 50", "= entry 50: 0"),
        ),
        ("a", {"equal": "b"}, ("a", "= b")),
    ],
)
def test_a_value_never_looks_like_a_bound_it_is_not(value, bound, texts):
    assert measured(value, bound) == texts


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (None, "exact"),
        (1.0, "> 99 % left"),
        (0.5, "50 % left"),
        (0.031, "3.1 % left"),
        (0.0, "at the bound"),
        (1e-9, "< 0.1 % left"),
        (-0.01, "just past the bound"),
        (-2.0, f"3 {TIMES} the bound"),
    ],
)
def test_a_margin_in_words(margin, text):
    assert share(margin) == text


def test_durations():
    assert [duration(s) for s in (0.0123, 7.53, 61, 4000)] == [
        "0.012 s",
        "7.5 s",
        "1 min 01 s",
        "1 h 06 min",
    ]
