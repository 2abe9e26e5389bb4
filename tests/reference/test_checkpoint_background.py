"""What is written in the background is the instant of its capture, and its errors are not lost."""

import threading
from functools import partial

import pytest
from checkpoint_runs import expected_of, run_of, snapshot_of, updated

from reference.checkpoint import BackgroundSaver, digests, latest, load, save, stall


def test_a_later_update_does_not_change_what_is_written(tmp_path):
    training, may_write = run_of(1), threading.Event()

    def slow(snapshot):
        may_write.wait(10)
        return save(tmp_path, snapshot)

    with BackgroundSaver(slow) as saver:
        want = digests(snapshot_of(training))
        saver.submit(snapshot_of(training))
        updated(training, 3)
        assert latest(tmp_path) is None
        may_write.set()
    assert digests(load(latest(tmp_path), expected_of())) == want


def test_one_is_written_at_a_time(tmp_path):
    training, events = run_of(1), []

    def logged(snapshot):
        step = snapshot.counters.optimizer_steps
        events.append(("begin", step))
        folder = save(tmp_path, snapshot)
        events.append(("end", step))
        return folder

    with BackgroundSaver(logged) as saver:
        for _ in range(3):
            saver.submit(snapshot_of(training))
            updated(training, 1)
        assert saver.wait() == tmp_path / "step-00000003" and saver.wait() is None
    assert events == [(what, step) for step in (1, 2, 3) for what in ("begin", "end")]


@pytest.mark.parametrize("asked", ["submit", "wait", "close"])
def test_an_error_is_raised_by_what_comes_next_and_once(tmp_path, asked):
    (tmp_path / "file").write_text("x")
    snapshot = snapshot_of(run_of(1))
    saver = BackgroundSaver(partial(save, tmp_path / "file"))
    saver.submit(snapshot)
    with pytest.raises(OSError, match="cannot save"):
        getattr(saver, asked)(*([snapshot] if asked == "submit" else []))
    saver.close()


def test_an_error_of_the_last_save_is_raised_at_the_end_of_the_block(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(OSError, match="cannot save"),
        BackgroundSaver(partial(save, tmp_path / "file")) as saver,
    ):
        saver.submit(snapshot_of(run_of(1)))


def ways_measured(capsys, *options):
    stall.main(["--preset", "bytes-0.09m", "--device", "cpu", "--tokens", "16", *options])
    lines = capsys.readouterr().out.splitlines()
    return [line.split(" stalls")[0].strip() for line in lines[1:]]


def test_every_way_of_saving_is_measured(capsys):
    assert ways_measured(capsys) == list(stall.WAYS)


def test_a_run_may_be_made_short(capsys):
    short = ["--ways", "blocking", "background", "--rounds", "1", "--layers", "1"]
    assert ways_measured(capsys, *short) == ["blocking", "background"]


def test_a_stall_is_what_the_updates_in_between_do_not_explain():
    seconds = iter([0.0, 10.0])
    left = iter([False, False, True])
    with pytest.MonkeyPatch.context() as context:
        context.setattr(stall.time, "perf_counter", lambda: next(seconds))
        found = stall.stall(lambda: lambda: next(left), lambda: None, update_seconds=4.0)
    assert found == stall.Stall(stalled_seconds=2.0, written_seconds=10.0, num_updates=2)
