"""How the commands of this room end when nobody reads on, as with `| head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

STATUS = 1  # as Python documents it, and as `rich` does for its tables


def ended(main: Callable[[], int]) -> int:
    """The exit status of main(); `STATUS`, without a word, if what it prints is not read.

    Source: the note on SIGPIPE in Python's documentation of `signal`.
    """
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return STATUS
    return status
