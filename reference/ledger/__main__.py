"""Print the books of a planned run: `python -m reference.ledger --preset plan-1.15b`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from rich.console import Console

from reference.config import PRESETS, preset
from reference.ledger.book import PlannedRun, print_book

DEFAULT_CONTEXT = 4096
LARGEST = 10**18
WIDTH_WITHOUT_TERMINAL = 118


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 through SystemExit for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    config = preset(options.preset)
    run = PlannedRun(
        preset=options.preset,
        config=config,
        num_tokens=options.tokens,
        context_tokens=options.context or min(DEFAULT_CONTEXT, config.max_positions),
        num_rows=options.rows,
        num_microbatches=options.microbatches,
        num_ranks=options.ranks,
        last_window=options.last_window,
        peak_flops_per_s=options.tflops * 1e12,
        utilizations=tuple(options.utilization),
        lora_rank=options.lora_rank,
    )
    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    try:
        print_book(run, console)
    except ValueError as error:
        parser.error(str(error))
    return 0


def whole_number(text: str) -> int:
    """An exact positive integer from "23000000000", "23_000_000_000" or "23e9"."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write it as 23e9") from None
    if not (number.is_finite() and 1 <= number <= LARGEST) or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {LARGEST:g}")
    return int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference.ledger",
        description="Parameters, memory, FLOPs, time, communication, cache and windows of a run.",
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    add = parser.add_argument
    add("--tokens", type=whole_number, default=10 * 10**9, help="supervised tokens (10e9)")
    add("--ranks", type=whole_number, default=8, help="devices (8)")
    add("--rows", type=whole_number, default=8, help="rows of a microbatch on a rank (8)")
    add("--microbatches", type=whole_number, default=4, help="microbatches of a window (4)")
    add(
        "--context", type=whole_number, help=f"sequence length: tokens of a row ({DEFAULT_CONTEXT})"
    )
    add("--last-window", choices=("trim", "overshoot"), default="trim")
    add("--lora-rank", type=whole_number, help="train adapters of this rank alone, in a table more")
    add("--tflops", type=float, default=120.0, help="assumed TFLOP/s of a rank (120)")
    add(
        "--utilization",
        type=float,
        nargs="+",
        default=[1.0],
        help="assumed shares of --tflops that are reached (1: it is a sustained rate)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
