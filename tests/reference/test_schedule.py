"""A schedule that cannot be is refused by the name of its field."""

import math

import pytest

from reference.schedule import Schedule, learning_rate


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peak": -1.0}, "peak"),
        ({"peak": math.nan}, "peak"),
        ({"peak": math.inf}, "peak"),
        ({"total_tokens": 0}, "total_tokens"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"decay_tokens": -1}, "decay_tokens"),
        ({"warmup_tokens": 60, "decay_tokens": 41}, "exceed total_tokens = 100"),
        ({"final_fraction": 1.1}, "final_fraction"),
        ({"final_fraction": math.nan}, "final_fraction"),
    ],
)
def test_the_wrong_field_is_named(fields, name):
    with pytest.raises(ValueError, match=name):
        Schedule(**{"peak": 1.0, "total_tokens": 100, **fields})


def test_negative_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens_done must be >= 0"):
        learning_rate(-1, Schedule(1.0, 10))


def test_warmup_and_decay_may_touch():
    schedule = Schedule(1.0, 10, warmup_tokens=5, decay_tokens=5)
    assert [learning_rate(t, schedule) for t in (0, 4, 5, 6, 10)] == [0.0, 0.8, 1.0, 0.8, 0.0]


def test_tokens_beyond_float_precision_keep_the_ramp():
    total = 23 * 10**12
    schedule = Schedule(1.0, total, decay_tokens=total)
    assert learning_rate(total // 2, schedule) == pytest.approx(0.5, abs=1e-12)


def test_a_rate_is_a_plain_float():
    assert type(learning_rate(5, Schedule(1, 10))) is float
