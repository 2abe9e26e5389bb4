"""Where a rank was or failed, in the frames of its program: those of torch say nothing more."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
BEGINNING = ("<string>", "harness/rank_process.py", "harness/candidates.py")  # of every rank
STARTING = ("torch/distributed/elastic", "torch/multiprocessing", "/multiprocessing/", *BEGINNING)
INTERNAL = re.compile(r"\n?Exception raised from .*(\n+frame #\d+: .*)+")  # of C++, in a message
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def traceback_of(error: BaseException) -> str:
    """As Python prints it, without frames of torch and of the standard library.

    All frames of an exception are left where none is of the program.
    """
    told = traceback.TracebackException.from_exception(error)
    for part in _chain(told):
        own = [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in part.stack
               if _is_own(frame.filename)]  # fmt: skip
        if own:
            part.stack = traceback.StackSummary.from_list(own)
    return without_internals("".join(told.format()))


def without_internals(text: str) -> str:
    """A text without the frames that torch's C++ puts into its messages."""
    return INTERNAL.sub("", text)


def _chain(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    yield told
    for part in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if part is not None:
            yield from _chain(part)


def program_stack(dumped: str) -> str:
    """What faulthandler dumped of all threads, in the frames of the program, the last call first.

    Without any of them, all frames but those in which every rank begins.
    """
    frames = [line for line in dumped.splitlines() if _is_own_frame(line)]
    if frames:
        return "the last call first:\n" + "".join(map(_with_source, frames))
    lines = dumped.splitlines(keepends=True)
    return "".join(line for line in lines if not any(file in line for file in STARTING))


def _is_own_frame(line: str) -> bool:
    match = FRAME.fullmatch(line)
    return match is not None and _is_own(match[1])


def _with_source(line: str) -> str:
    file, number, _ = FRAME.fullmatch(line).groups()  # type: ignore[union-attr]  # it was a frame
    source = linecache.getline(file, int(number)).strip()
    return f"{line}\n    {source}\n" if source else f"{line}\n"


def _is_own(file: str) -> bool:
    """Whether a file is the program's: the gate's, the candidate's, or a package's."""
    if file.startswith((TORCH, "<frozen ")) or file.endswith(BEGINNING):
        return False
    return "site-packages" in file or not file.startswith(LIBRARIES)
