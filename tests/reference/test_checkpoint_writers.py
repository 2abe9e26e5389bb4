"""Several writers, what they leave when they die, and what is kept of what they wrote."""

import os
import signal
import threading
import time

import pytest
from checkpoint_runs import expected_of, fresh, names, python, run_of, snapshot_of, snapshots

from reference.checkpoint import FolderTakenError, digests, latest, load, save
from reference.checkpoint.commit import is_complete, retained
from reference.checkpoint.temporary import FOREIGN_AGE_SECONDS, temporary_folder


def test_of_two_writers_one_wins_and_the_other_is_told(tmp_path):
    one, other = snapshot_of(run_of(1)), snapshot_of(run_of(1))
    other.data["next_window"] = 99
    outcomes, together = [], threading.Barrier(2)

    def write(snapshot):
        together.wait()
        try:
            outcomes.append(save(tmp_path, snapshot))
        except FolderTakenError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(s,)) for s in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(outcome).__name__ for outcome in outcomes} == {"PosixPath", "FolderTakenError"}
    assert digests(load(latest(tmp_path), expected_of())) in (digests(one), digests(other))
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_is_not_overwritten(tmp_path):
    (snapshot,) = snapshots(1)
    save(tmp_path, snapshot)
    with pytest.raises(FolderTakenError, match="exists already"):
        save(tmp_path, snapshot)
    assert names(tmp_path) == ["step-00000001"]


def test_a_damaged_folder_of_that_name_is_kept_under_another(tmp_path):
    (snapshot,) = snapshots(1)
    folder = save(tmp_path, snapshot)
    (folder / "model.safetensors").write_bytes(b"short")
    assert latest(tmp_path) is None
    save(tmp_path, snapshot)
    damaged, whole = names(tmp_path)
    assert whole == "step-00000001" == latest(tmp_path).name
    assert (tmp_path / damaged / "model.safetensors").read_bytes() == b"short"


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "want"),
    [(1, 0, {7}), (2, 0, {6, 7}), (1, 3, {3, 6, 7}), (9, 0, {1, 2, 3, 4, 5, 6, 7}), (1, 1, None)],
)
def test_the_last_and_every_so_many_are_kept(keep_last, keep_every, want):
    steps = set(range(1, 8))
    assert retained(steps, keep_last, keep_every) == (want or steps)


def test_older_checkpoints_go_and_damaged_ones_do_not_count(tmp_path):
    first, second, third, fourth = snapshots(1, 2, 3, 4)
    for snapshot in (first, second, third):
        save(tmp_path, snapshot, keep_last=2, keep_every=0)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    (tmp_path / "step-00000003" / "state.json").unlink()
    save(tmp_path, fourth, keep_last=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (1, -1)])
def test_to_keep_none_is_refused(tmp_path, keep_last, keep_every):
    with pytest.raises(ValueError, match="keep_last must be >= 1"):
        save(tmp_path, snapshot_of(fresh()), keep_last, keep_every)


def test_what_another_writer_is_writing_stays(tmp_path):
    first, second = snapshots(1, 2)
    with temporary_folder(tmp_path / "step-00000005") as folder:
        save(tmp_path, first)
        assert folder.is_dir()
    save(tmp_path, second)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_another_host_left_stays_for_a_day(tmp_path):
    first, second = snapshots(1, 2)
    folder = tmp_path / ".step-00000005.otherhost.abc"
    folder.mkdir()
    save(tmp_path, first)
    assert folder.is_dir()
    long_ago = time.time() - FOREIGN_AGE_SECONDS - 60
    os.utime(folder, (long_ago, long_ago))
    save(tmp_path, second)
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    program = (
        "import os, signal, sys; from checkpoint_runs import run_of, snapshot_of;"
        "from reference.checkpoint import disk, save;"
        "disk.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL);"
        "save(sys.argv[1], snapshot_of(run_of(1)))"
    )
    assert python(program, tmp_path).returncode == -signal.SIGKILL
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".step-00000001.") and is_complete(tmp_path / leftover)
    assert latest(tmp_path) is None
    save(tmp_path, *snapshots(2))
    assert names(tmp_path) == ["step-00000002"]


def test_a_checkpoint_with_a_folder_in_it_goes_too(tmp_path):
    first, second = snapshots(1, 2)
    folder = save(tmp_path, first)
    (folder / "plots" / "late").mkdir(parents=True)
    (folder / "plots" / "loss.png").write_text("x")
    save(tmp_path, second, keep_last=1)
    assert names(tmp_path) == ["step-00000002"]
