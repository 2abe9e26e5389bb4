"""How fast the loader reads a folder: `python -m reference.data.loader_speed DIR`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from reference.data.folder_text import open_folder
from reference.data.loader import Loader
from reference.data.pipes import ended
from reference.options import whole_number

ROUNDS = 5
# What a 0.5B model consumes on one H200, measured with this project's own step (T 1024, bf16).
CONSUMED_TOKENS_S, WANTED = 117_000, 20


def tokens_a_second(loader: Loader) -> float:
    """Input tokens of one whole pass over the time it takes, its start included."""
    begin = time.perf_counter()
    num_tokens = sum(window.num_tokens for window in loader)
    return num_tokens / (time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each number of workers. SystemExit with 2 for a folder that is none."""
    from reference.stack import ROLES

    parser = argparse.ArgumentParser(prog="python -m reference.data.loader_speed")
    parser.add_argument("data", type=Path, metavar="DIR", help="a prepared folder")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--updates", type=whole_number, default=200, metavar="N", help="a pass")
    options = parser.parse_args(arguments)
    try:
        text = open_folder(options.data, SimpleNamespace(**ROLES))
        first = text.windows(0, options.updates)
        loaders = [
            Loader(text.training, replace(first.settings, num_workers=workers), text.stack)
            for workers in options.workers
        ]
    except ValueError as error:
        parser.error(str(error))
    found: list[list[float]] = [[] for _ in loaders]
    for _ in range(ROUNDS):  # by turns, so that the machine's mood meets all alike
        for speeds, loader in zip(found, loaders, strict=True):
            speeds.append(tokens_a_second(loader))
    print(f"windows of {text.row_tokens} tokens, {first.settings.rows_per_rank} an update; median "
          f"of {ROUNDS} passes of {options.updates} updates")  # fmt: skip
    for workers, speeds in zip(options.workers, found, strict=True):
        speed = median(speeds)
        print(f"{workers} workers: {speed / 1e6:6.2f} M tokens/s, {speed / CONSUMED_TOKENS_S:5.1f} "
              f"times what a 0.5B model consumes (wanted: {WANTED})")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
