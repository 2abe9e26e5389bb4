"""The loss scale moves as torch's GradScaler moves it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.loss_scale import LARGEST, LossScaleState, LossScaling, next_loss_scale


@given(
    finite=st.lists(st.booleans(), max_size=30),
    interval=st.integers(1, 4),
    initial=st.sampled_from([1.0, 2.0**16, 2.0**126]),
    growth=st.sampled_from([1.0, 2.0, 3.0]),
)
def test_it_moves_as_torch_moves_it(finite, interval, initial, growth):
    scaling = LossScaling(initial, growth, 0.25, interval)
    state = LossScaleState(scaling.initial)
    scale, tracker = torch.tensor(initial), torch.tensor(0, dtype=torch.int32)
    for was_finite in finite:
        state = next_loss_scale(state, scaling, was_finite)
        found_inf = torch.tensor(0.0 if was_finite else 1.0)
        torch._amp_update_scale_(scale, tracker, found_inf, growth, 0.25, interval)
        assert state.scale == pytest.approx(float(scale), rel=1e-5)  # ours is a float64
        assert state.good_updates == int(tracker)
    assert state.skipped_updates == finite.count(False)


def test_the_scale_stays_in_float32():
    state = next_loss_scale(LossScaleState(LARGEST), LossScaling(interval=1), True)
    assert state.scale == LARGEST


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"initial": 0.0}, "initial"),
        ({"initial": math.inf}, "initial"),
        ({"initial": math.nan}, "initial"),
        ({"growth": 0.5}, "growth"),
        ({"backoff": 1.0}, "backoff"),
        ({"backoff": 0.0}, "backoff"),
        ({"interval": 0}, "interval"),
    ],
)
def test_what_would_not_work_is_refused(changed, name):
    with pytest.raises(ValueError, match=name):
        LossScaling(**changed)
