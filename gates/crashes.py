"""A call in a process of its own that is killed, stopped, or refused by its disk at any operation.

The process is a fork: it runs what the gate holds, faults included, and its death leaves on the
disk what a crash leaves. Operations are counted below the code on trial: by Python's audit events
(files opened for writing, renamed, removed; folders made, removed), by os.fsync and os.write, and
for writes from other languages by the kernel's limit of a file's size.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 60
EVENTS = {
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.mkdir": "mkdir",
    "os.truncate": "truncate",
    "os.link": "link",
    "os.symlink": "symlink",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Outcome:
    """How a process ended, what it did to its disk in order, and which files reached the disk.

    ended: "returned", "killed", or "raised KIND: words". synced: (device, inode) of every file and
    folder that was synced, with the number of the operation. The last two are known only of a
    process that came to its end.
    """

    ended: str
    operations: list[str] = field(default_factory=list)
    synced: dict[tuple[int, int], int] = field(default_factory=dict)


class Process:
    """One forked call. `interfere(number, operation)` runs right before each operation."""

    def __init__(
        self,
        action: Callable[[], Any],
        interfere: Callable[[int, str], None] = lambda number, operation: None,
        largest_file_bytes: int | None = None,
        killed_by_the_limit: bool = False,
    ) -> None:
        self._reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._reading)
                if largest_file_bytes is not None:
                    _limit(largest_file_bytes, killed_by_the_limit)
                _report(writing, _ended(action, interfere))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)

    def kill(self) -> None:
        """SIGKILL, now."""
        os.kill(self.pid, signal.SIGKILL)

    def wait_until_stopped(self) -> bool:
        """Whether it stopped itself (SIGSTOP); False if it ended before."""
        status = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        """SIGCONT, after a stop."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> Outcome:
        """How it ended. Raises RuntimeError for an end that nobody asked for."""
        timer = threading.Timer(TIMEOUT_S, self.kill)
        timer.start()
        with os.fdopen(self._reading) as pipe:
            told = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        hung = not timer.is_alive()
        timer.cancel()
        if hung:
            raise RuntimeError(f"the forked process did not end within {TIMEOUT_S} s")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ):
            return Outcome("killed")
        if status or not told:
            raise RuntimeError(f"the forked process ended with wait status {status}")
        ended = json.loads(told)
        synced = {(device, inode): number for device, inode, number in ended.pop("synced")}
        return Outcome(**ended, synced=synced)


def run(action: Callable[[], Any], **how: Any) -> Outcome:
    """The call in a forked process, to its end."""
    return Process(action, **how).wait()


def killed_at(at: int) -> Callable[[int, str], None]:
    """SIGKILL right before operation number `at`, that is right after the one before."""
    return _at(at, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_at(at: int) -> Callable[[int, str], None]:
    """SIGSTOP right before operation number `at`."""
    return _at(at, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def full_at(at: int) -> Callable[[int, str], None]:
    """Operation number `at` finds the disk full."""
    return _at(at, lambda: _refuse(errno.ENOSPC))


def read_only(number: int, operation: str) -> None:
    """Every operation finds the disk read-only."""
    _refuse(errno.EROFS)


def _at(at: int, act: Callable[[], None]) -> Callable[[int, str], None]:
    return lambda number, operation: act() if number == at else None


def _refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _limit(largest_file_bytes: int, kills: bool) -> None:
    """Writing beyond this many bytes of a file raises OSError, or kills the process there."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, hard))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)


def _ended(action: Callable[[], Any], interfere: Callable[[int, str], None]) -> Outcome:
    sys.dont_write_bytecode = True  # a compiled file would be an operation
    torch.set_num_threads(1)  # threads of a pool do not survive a fork
    operations: list[str] = []
    synced: dict[tuple[int, int], int] = {}
    is_over = False

    def note(operation: str) -> None:
        if not is_over:
            operations.append(operation)
            interfere(len(operations) - 1, operation)

    _watch(note, operations, synced)
    try:
        action()
    except Exception as error:  # whatever is raised is a result here, and it is reported
        return Outcome(f"raised {type(error).__name__}: {error}", operations, synced)
    finally:
        is_over = True  # an audit hook stays for the life of the process
    return Outcome("returned", operations, synced)


def _watch(
    note: Callable[[str], None], operations: list[str], synced: dict[tuple[int, int], int]
) -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            note(EVENTS[event])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            note("open")

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(descriptor: int, *arguments: Any) -> Any:
            note(name)
            done = function(descriptor, *arguments)
            if name == "fsync":
                status = os.fstat(descriptor)
                synced[status.st_dev, status.st_ino] = len(operations) - 1
            return done

        return note_and_call

    sys.addaudithook(audit)
    os.fsync = noting("fsync", os.fsync)
    os.fdatasync = noting("fsync", os.fdatasync)
    os.write = noting("write", os.write)


def _report(pipe: int, outcome: Outcome) -> None:
    synced = [[*key, number] for key, number in outcome.synced.items()]
    told = {"ended": outcome.ended, "operations": outcome.operations, "synced": synced}
    with os.fdopen(pipe, "w") as file:
        json.dump(told, file)


def turns(operations: list[str]) -> list[int]:
    """Numbers of the operations, of several writes in a row only of the first and the last.

    In between only the length of one file differs.
    """
    before, behind = [None, *operations], [*operations[1:], None]
    triples = zip(before, operations, behind, strict=False)
    return [
        at for at, (one, two, three) in enumerate(triples) if not one == two == three == "write"
    ]


def identity(path: Path) -> tuple[int, int]:
    """(device, inode): what a rename keeps."""
    status = path.stat()
    return status.st_dev, status.st_ino


def contents(root: Path) -> dict[str, int]:
    """Every file below a folder and its size."""
    return {str(path.relative_to(root)): path.stat().st_size for path in _files(root)}


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())
