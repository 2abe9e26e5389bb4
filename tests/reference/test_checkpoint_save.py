"""A folder that exists is a whole checkpoint; a save that does not end changes nothing."""

import errno
import os
from functools import partial

import pytest
from checkpoint_runs import (
    IDENTITY,
    SETTINGS,
    expected_of,
    names,
    python,
    run_of,
    snapshots,
)

from reference.checkpoint import capture, digests, disk, latest, load, save
from reference.checkpoint.load import LocalFolder

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "fsync",
    "rename",
    "unlink",
    "remove_folder",
)


class Killed(BaseException):
    """What stands for the end of the process."""


def kill_at(monkeypatch, number):
    """From the `number`-th operation on, every operation ends the process; returns their list."""
    done = []

    def operation(real, *arguments):
        done.append(real.__name__)
        if len(done) >= number:
            raise Killed
        return real(*arguments)

    for name in OPERATIONS:
        monkeypatch.setattr(disk, name, partial(operation, getattr(disk, name)))
    return done


def test_nothing_there_is_no_checkpoint(tmp_path):
    assert latest(tmp_path / "absent") is None and latest(tmp_path) is None


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    (snapshot,) = snapshots(3)
    folder = save(tmp_path / "a" / "b", snapshot)
    assert folder == tmp_path / "a" / "b" / "step-00000003" == latest(tmp_path / "a" / "b")
    assert digests(load(folder, expected_of())) == digests(snapshot)


def test_a_killed_save_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    """At every operation; and the save after it works and leaves no leftovers."""
    first, second, third = snapshots(1, 2, 3)
    outcomes = set()
    for number in range(1, 1000):
        root = tmp_path / str(number)
        save(root, first, keep_last=1)
        with monkeypatch.context() as context:
            done = kill_at(context, number)
            try:
                save(root, second, keep_last=1)
            except Killed:
                is_over = False
            else:
                is_over = True
        loaded = load(latest(root), expected_of())
        outcomes.add(loaded.counters.optimizer_steps)
        assert digests(loaded) in (digests(first), digests(second))
        save(root, third, keep_last=1)
        assert names(root) == ["step-00000003"]
        if is_over:
            break
    assert is_over and outcomes == {1, 2}
    assert set(done) == set(OPERATIONS) and done.count("write") > 20


@pytest.mark.parametrize("operation", ["make_folder", "create", "write", "fsync", "rename"])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, operation):
    first, second = snapshots(1, 2)
    save(tmp_path, first)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(disk, operation, full)
        with pytest.raises(OSError, match=r"cannot save .*step-00000002.*No space left") as caught:
            save(tmp_path, second)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["step-00000001"]
    assert digests(load(latest(tmp_path), expected_of())) == digests(first)


def test_a_real_limit_on_the_size_of_files_leaves_nothing(tmp_path):
    program = (
        "import resource, sys; from checkpoint_runs import run_of, snapshot_of;"
        "from reference.checkpoint import save; snapshot = snapshot_of(run_of(1));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); save(sys.argv[1], snapshot)"
    )
    result = python(program, tmp_path)
    assert result.returncode == 1 and "File too large" in result.stderr, result.stderr
    assert names(tmp_path) == []


def test_a_write_of_fewer_bytes_than_asked_goes_on(tmp_path, monkeypatch):
    (snapshot,) = snapshots(1)
    monkeypatch.setattr(disk, "write", lambda descriptor, data: os.write(descriptor, data[:100]))
    folder = save(tmp_path, snapshot)
    assert digests(load(folder, expected_of())) == digests(snapshot)


def test_bytes_that_were_lost_on_the_way_are_noticed_before_publication(tmp_path, monkeypatch):
    (snapshot,) = snapshots(1)

    def lying(descriptor, data):
        return os.write(descriptor, bytes(len(data)))

    monkeypatch.setattr(disk, "write", lying)
    with pytest.raises(ValueError):
        save(tmp_path, snapshot)
    assert names(tmp_path) == []


def test_a_file_in_place_of_the_folder_is_said(tmp_path):
    (snapshot,) = snapshots(1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot save .*File exists"):
        save(tmp_path / "file", snapshot)
    with pytest.raises(OSError, match=r"cannot save .*Not a directory"):
        save(tmp_path / "file" / "below", snapshot)


def test_what_is_no_whole_checkpoint_is_passed_over(tmp_path):
    first, second = snapshots(1, 2)
    save(tmp_path, first)
    whole = save(tmp_path, second)
    (whole / "manifest.json").unlink()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-000000010").mkdir()
    (tmp_path / "step-00000011").write_text("x")
    assert latest(tmp_path) == tmp_path / "step-00000001"


def test_a_note_in_a_checkpoint_does_not_make_it_incomplete(tmp_path):
    """Or it would be passed over, and training would go on from an older one."""
    first, second = snapshots(1, 2)
    save(tmp_path, first)
    folder = save(tmp_path, second)
    (folder / "notes.txt").write_text("x")
    (folder / "plots").mkdir()
    assert latest(tmp_path) == folder
    with pytest.raises(ValueError, match=r"holds notes\.txt, plots, which manifest\.json does not"):
        load(folder, expected_of())


def test_what_cannot_be_read_now_is_not_passed_over(tmp_path, monkeypatch):
    """Or training would go on from an older one, or begin anew, because of a passing trouble."""
    first, second = snapshots(1, 2)
    save(tmp_path, first)
    folder = save(tmp_path, second)

    def troubled(self, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalFolder, "open", troubled)
    with pytest.raises(OSError, match="Input/output error"):
        latest(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, second)
    assert folder.is_dir()
    with pytest.raises(ValueError, match=r"cannot be read: .*Input/output error"):
        load(folder, expected_of())


def test_a_position_that_would_be_too_large_to_load_is_not_saved(tmp_path):
    training = run_of(1)
    snapshot = capture(training, SETTINGS, {"buffer": "x" * 2**24}, IDENTITY)
    with pytest.raises(ValueError, match="at most 16777216 are read"):
        save(tmp_path, snapshot)
    assert names(tmp_path) == []
