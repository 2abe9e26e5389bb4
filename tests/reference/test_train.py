"""The loop: short runs do not look finished, and it goes on from the model it is given."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import preset
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import initial_model, train
from reference.update import UpdateSettings
from reference.window import Microbatch, Window

STACK = SimpleNamespace(**ROLES)
SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=1000))
CONFIG = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=1)


def windows(number):
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        ids = torch.randint(257, (1, 10), generator=generator)
        yield Window((Microbatch(ids, ids, torch.arange(10)[None]),))


def test_windows_that_end_too_early_are_an_error():
    with pytest.raises(ValueError, match=r"ended after 20 applied targets, before.* = 21"):
        train(CONFIG, STACK, windows(2), SETTINGS, total_tokens=21)


def test_no_window_is_drawn_beyond_the_total():
    source = windows(5)
    result = train(CONFIG, STACK, source, SETTINGS, total_tokens=20)
    assert len(result.records) == 2 and len(list(source)) == 3


def test_an_unknown_last_window_is_refused():
    with pytest.raises(ValueError, match='"trim" or "overshoot", got \'drop\''):
        train(CONFIG, STACK, windows(1), SETTINGS, last_window="drop")


def test_a_total_below_one_is_refused():
    with pytest.raises(ValueError, match="total_tokens must be >= 1"):
        train(CONFIG, STACK, windows(1), SETTINGS, total_tokens=0)


def test_the_seed_makes_the_parameters_and_nothing_else_changes():
    torch.manual_seed(7)
    first = train(CONFIG, STACK, windows(1), SETTINGS, seed=1)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))
    second = train(CONFIG, STACK, windows(1), SETTINGS, seed=1)
    third = train(CONFIG, STACK, windows(1), SETTINGS, seed=2)
    assert first.records == second.records != third.records


def test_a_run_writes_nothing_where_there_is_no_terminal():
    written = io.StringIO()
    with redirect_stderr(written):
        train(CONFIG, STACK, windows(2), SETTINGS, progress=True)
    assert written.getvalue() == ""


def test_it_goes_on_from_the_model_that_the_stack_hands_out():
    start = initial_model(CONFIG, STACK, seed=5)
    before = [parameter.detach().clone() for parameter in start.parameters()]
    stack = SimpleNamespace(**{**ROLES, "build_model": lambda config, stack: start})
    result = train(CONFIG, stack, windows(2), SETTINGS, seed=1)
    assert result.model is start
    assert not all(map(torch.equal, before, start.parameters()))
    again = train(CONFIG, STACK, windows(2), SETTINGS, seed=5)
    assert again.records == result.records


def test_frozen_parameters_stay_and_have_no_optimizer_state():
    start = initial_model(CONFIG, STACK, seed=5)
    start.embed_tokens.requires_grad_(False)
    before = start.embed_tokens.weight.detach().clone()
    stack = SimpleNamespace(**{**ROLES, "build_model": lambda config, stack: start})
    result = train(CONFIG, stack, windows(2), SETTINGS)
    assert torch.equal(start.embed_tokens.weight, before)
    assert start.embed_tokens.weight not in result.optimizer_state
