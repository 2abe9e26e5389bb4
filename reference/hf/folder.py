"""A folder that appears whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderTakenError(ValueError):
    """There is a file or a folder with content where a new folder was to appear."""


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` to write into; it gets the name `directory` when the block ends.

    If the block raises, the folder is removed and nothing appears. An empty folder of that name is
    replaced. Raises FolderTakenError if there is a file or a folder with content, also one that
    another process put there in the meantime: of two writers one wins, and both end whole.
    """
    refuse_content(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        refuse_content(directory)
        try:
            os.rename(temporary, directory)
        except OSError as error:
            refuse_content(directory)
            raise error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_content(directory: Path) -> None:
    """FolderTakenError if `directory` is a file or a folder with content."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise FolderTakenError(f"{directory} exists already; choose another name or remove it")


def refuse_place(directory: Path) -> None:
    """ValueError unless `new_folder(directory)` could write there now: asked before long work."""
    try:
        with new_folder(directory):
            raise _NotYet
    except _NotYet:
        return
    except OSError as error:
        raise ValueError(f"cannot write a folder {directory}: {error.strerror or error}") from error


class _NotYet(Exception):
    """Ends the block of `new_folder`, so that it removes what it made."""
