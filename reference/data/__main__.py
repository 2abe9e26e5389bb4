"""`python -m reference.data prepare | inspect`."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while the libraries are imported, which would report it each in its own way."""
    os.write(sys.stderr.fileno(), b"stopped before anything was done\n")
    os._exit(130)


if __name__ == "__main__":  # worker processes import this file, too
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, _end)
    from reference.data.pipes import ended
    from reference.data.prepare_command import main

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(ended(main))
