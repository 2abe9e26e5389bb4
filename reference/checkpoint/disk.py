"""Every operation on a disk that a crash can fall between.

Callers write `disk.rename(…)`, so that a test can put a function that counts, kills or fails in
its place.
"""

import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """Makes one folder; FileExistsError if there is something of that name."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Opens a file for writing and reading that must not exist yet; its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> int:
    """Writes the first bytes of `data`; how many."""
    return os.write(descriptor, data)


def read_back(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Reads what was written from byte `offset` on into `buffer`; how many bytes."""
    return os.preadv(descriptor, [buffer], offset)


def fsync(descriptor: int) -> None:
    """Waits until the file's (or folder's) content is on the device."""
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Gives `old` the name `new` at once; OSError if `new` is a folder with content."""
    os.rename(old, new)


def unlink(path: Path) -> None:
    """Removes one file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes one empty folder."""
    os.rmdir(path)
