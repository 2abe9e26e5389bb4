"""One update: what is refused, what a skipped window leaves, what a record says."""

import math
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import preset
from reference.model import build_model
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.update import Counters, TrainState, UpdateSettings, accumulate, update_window
from reference.window import Microbatch, Window

STACK = SimpleNamespace(**ROLES)
SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=100))


def fresh(**changes):
    shape = {"model_width": 16, "feed_forward_width": 16, "num_layers": 1, **changes}
    model = build_model(replace(preset("bytes-0.09m"), **shape), STACK)
    return TrainState(model, STACK.param_groups(model, 0.1))


def window(seed=0, num_rows=2):
    ids = torch.randint(257, (num_rows, 8), generator=torch.Generator().manual_seed(seed))
    return Window((Microbatch(ids, ids.roll(-1, 1), torch.arange(8).expand(num_rows, 8)),))


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ValueError, match="group must be None"):
        accumulate(fresh().model, window(), object())


def test_a_record_carries_its_own_counters():
    training = fresh()
    records = [update_window(training, window(seed), STACK, SETTINGS) for seed in range(3)]
    assert [r.counters.optimizer_steps for r in records] == [1, 2, 3]
    assert training.counters == records[-1].counters == Counters(48, 48, 48, 3)
    with pytest.raises(FrozenInstanceError):
        records[0].counters.tokens_read = 0


def test_the_mean_is_the_sum_over_the_count():
    record = update_window(fresh(), window(), STACK, SETTINGS)
    assert record.loss_nats == record.nll_sum / record.num_targets
    assert record.loss_nats == pytest.approx(math.log(257), abs=0.1)


def test_a_window_without_targets_says_so():
    record = update_window(fresh(), window().trim(0), STACK, SETTINGS)
    assert record.skipped == "no targets in the window"
    assert math.isnan(record.loss_nats) and math.isnan(record.grad_norm)
    assert record.learning_rate == 0.0


def test_a_first_window_without_targets_makes_no_optimizer_state():
    training = fresh()
    update_window(training, window().trim(0), STACK, SETTINGS)
    assert training.optimizer_state == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_named_and_skipped(value):
    training = fresh()
    training.model.norm.weight.data[0] = value
    before = [p.detach().clone() for p in training.model.parameters()]
    record = update_window(training, window(), STACK, SETTINGS)
    assert record.skipped is not None and record.skipped.startswith("gradient norm is")
    for old, new in zip(before, training.model.parameters(), strict=True):
        assert torch.equal(old, new.detach()) or old.isnan().any()


def test_updates_go_down_on_the_same_window():
    training = fresh()
    losses = [update_window(training, window(), STACK, SETTINGS).loss_nats for _ in range(8)]
    assert losses == sorted(losses, reverse=True)


def test_an_untied_and_a_bfloat16_model_are_updated_too():
    training = fresh(tied_head=False, compute_dtype=torch.bfloat16)
    before = [p.detach().clone() for p in training.model.parameters()]
    update_window(training, window(), STACK, SETTINGS)
    moved = [
        not torch.equal(old, new.detach())
        for old, new in zip(before, training.model.parameters(), strict=True)
    ]
    assert all(moved)
