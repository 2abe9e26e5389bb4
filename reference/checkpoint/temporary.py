"""Folders under a temporary name: made and locked by one writer, removed when it is dead."""

import fcntl
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reference.checkpoint import disk

PREFIX = "."
NAMES = ("step-*", "anomaly-*")  # of what is written under a temporary name
# A lock is seen by all processes of a host, not always by other hosts: theirs must be old besides.
FOREIGN_AGE_SECONDS = 24 * 3600.0
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def temporary_name(path: Path) -> Path:
    """A new name beside `path`: .NAME.HOST.RANDOM."""
    return path.with_name(f"{PREFIX}{path.name}.{_HOST}.{uuid.uuid4().hex}")


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target`, locked while the block runs and removed at its end.

    If the block renames it, nothing is left to remove.
    """
    folder, descriptor = _make_locked(target)
    try:
        yield folder
    finally:
        try:
            with suppress(OSError):  # what cannot be removed now is a leftover for the next save
                remove(folder)
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a folder and what is in it; nothing happens if there is none."""
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                remove(Path(entry.path))
            else:
                disk.unlink(Path(entry.path))
        disk.remove_folder(folder)


def remove_leftovers(root: Path) -> None:
    """Removes the temporary folders in `root` whose writers are dead.

    A writer is dead when nobody holds its folder's lock and it ran on this host, or the folder
    was not changed for FOREIGN_AGE_SECONDS. Where there are no locks nothing is removed.
    """
    for folder in sorted(path for name in NAMES for path in root.glob(f"{PREFIX}{name}.*.*")):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # another save removed it, or it is no folder
        try:
            age_seconds = time.time() - os.fstat(descriptor).st_mtime
            is_ours = folder.name.split(".")[-2] == _HOST
            if (is_ours or age_seconds > FOREIGN_AGE_SECONDS) and lock(descriptor):
                with suppress(OSError):  # of another user; no reason not to save
                    remove(folder)
        finally:
            os.close(descriptor)


def _make_locked(target: Path) -> tuple[Path, int]:
    while True:
        folder = temporary_name(target)
        disk.make_folder(folder)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another save took it for a leftover before it was locked
        lock(descriptor)
        if os.path.lexists(folder):
            return folder, descriptor
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Whether this process has the lock now; it ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another has it, or this file system has no locks
        return False
    return True
