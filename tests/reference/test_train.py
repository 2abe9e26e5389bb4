"""The loop and its command: short runs do not look finished, bad input is named."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference import train as module
from reference.config import preset
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import main, train
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--updates", "0"], "'0' is no whole number of at least 1"),
        (["--updates", "1.5"], "'1.5' is no whole number"),
        (["--corpus", "tales"], "invalid choice"),
        (["--device", "abacus"], "'abacus' cannot be used here"),
        (["--preset", "chargpt-smoke"], "chargpt-smoke has 49 tokens and 32 positions"),
        (["--learning-rate", "-1"], "peak"),
    ],
)
def test_bad_input_is_named_and_exits_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("corpus", sorted(module.CORPORA))
def test_the_command_ends_with_the_held_out_loss(corpus, capsys, monkeypatch):
    monkeypatch.setattr(module, "PYTHON_BYTES", 200_000)
    assert main(["--corpus", corpus, "--updates", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("2 updates, ")
    assert "held-out loss " in captured.out and captured.out.count("\n") == 1


def test_the_command_trains_in_bfloat16_with_float32_parameters(monkeypatch):
    kept = []
    real = module.train

    def keep(*arguments, **options):
        kept.append(real(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(module, "train", keep)
    assert main(["--updates", "2", "--compute-dtype", "bfloat16"]) == 0
    (result,) = kept
    assert result.model.config.compute_dtype == torch.bfloat16
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
    assert {s.first_moment.dtype for s in result.optimizer_state.values()} == {torch.float32}
