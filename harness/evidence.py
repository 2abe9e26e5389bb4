"""The evidence of a run: ``evidence.jsonl``, written line by line and never changed.

Kinds of lines: ``run`` (what was asked, of whom, where), ``gate``, ``fault`` and ``benign`` (one
gate on one implementation), ``selection`` (how many were selected), ``end`` (the verdict).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.chain import GENESIS, canonical, decode, first_problem, seal

EVIDENCE_FILE = "evidence.jsonl"


class EvidenceError(Exception):
    """The evidence cannot be written or read. The message says what to do."""


class EvidenceWriter:
    """Appends records to a new ``evidence.jsonl``.

    A line is in the file as a whole or not at all: a write that fails is taken back.

    Raises:
        EvidenceError: the folder cannot be made or written to, or holds evidence already.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.path = self.directory / EVIDENCE_FILE
        self.num_lines = 0
        self.head = GENESIS
        self._num_bytes = 0
        if os.path.exists(self.directory / "report.json"):
            raise EvidenceError(
                f"{self.directory} already holds the evidence of a run; choose another folder"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._file: int | None = os.open(self.path, flags, 0o644)
        except FileExistsError as error:
            if self.directory.is_dir():
                raise EvidenceError(
                    f"{self.directory} already holds the evidence of a run; choose another folder"
                ) from error
            raise _cannot("write evidence to", self.directory, error) from error
        except OSError as error:
            raise _cannot("write evidence to", self.directory, error) from error

    def append(self, record: dict[str, Any]) -> None:
        """Write one record.

        Raises:
            EvidenceError: the disk is full or the writer is closed; the file then ends with the
                line before.
            ValueError: the record is no JSON, or has no kind.
        """
        if self._file is None:
            raise EvidenceError(f"{self.path} is closed; nothing can be added to it")
        if not isinstance(record.get("kind"), str):
            raise ValueError(f"a record has a kind; got {record}")
        sealed = seal(record, self.num_lines, self.head)
        line = canonical(sealed).encode() + b"\n"
        before = (self.num_lines, self.head, self._num_bytes)
        try:
            _write_all(self._file, line)
            self.num_lines += 1
            self.head = sealed["hash"]
            self._num_bytes += len(line)
        except BaseException as error:  # Ctrl-C between two system calls, too
            self.num_lines, self.head, self._num_bytes = before
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, 0, os.SEEK_END)
            if isinstance(error, OSError):
                raise _cannot("write to", self.path, error) from error
            raise

    def close(self) -> None:
        """Bring everything to the disk. A second call does nothing."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            os.fsync(file)
        except OSError as error:
            raise _cannot("bring to the disk", self.path, error) from error
        finally:
            os.close(file)

    def __enter__(self) -> EvidenceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read(directory: Path | str) -> list[dict[str, Any]]:
    """The records of a folder, in order, with "index", "previous" and "hash".

    Raises:
        EvidenceError: no evidence, not readable, or a chain that is not sound.
    """
    lines = read_lines(directory)
    problem = first_problem(lines)
    if problem:
        raise EvidenceError(f"{Path(directory) / EVIDENCE_FILE} cannot be trusted. {problem}")
    return [decode(line) for line in lines]


def read_lines(directory: Path | str) -> list[bytes]:
    """The lines of a folder's evidence as they are, with their ends, unchecked.

    Raises:
        EvidenceError: no evidence or not readable.
    """
    path = Path(directory) / EVIDENCE_FILE
    try:
        with path.open("rb") as file:
            lines = file.readlines()
    except FileNotFoundError as error:
        raise EvidenceError(f"{directory} holds no {EVIDENCE_FILE}; name a run's folder") from error
    except OSError as error:
        raise _cannot("read", path, error) from error
    if not lines:
        raise EvidenceError(f"{path} is empty; the run ended before it began")
    return lines


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _cannot(what: str, path: Path, error: OSError) -> EvidenceError:
    return EvidenceError(f"cannot {what} {path}: {error.strerror or error}")
