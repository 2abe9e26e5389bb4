"""Times on a GPU: device events, a cold and clean L2, and implementations that take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 2 * 2**30  # many times any L2; and so long to read that the host runs ahead


def times_ms(
    functions: Mapping[str, Callable[[], object]], rounds: int = 20, warm_up: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each call on the current CUDA device, `rounds` times each, in turns.

    In every round each function is called once, in an order that rotates, so that clocks and other
    work on the machine hit all alike. Before each call a buffer larger than the L2 is read, so that
    inputs come from memory and nothing waits to be written back. Device events bracket the call.

    Raises ValueError for no function or fewer than 1 round.
    """
    if not functions or rounds < 1:
        raise ValueError(f"times_ms needs functions and rounds >= 1, got {rounds} rounds of "
                         f"{len(functions)} functions")  # fmt: skip
    names = list(functions)
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    for name in names:
        for _ in range(warm_up):
            functions[name]()
    pairs: dict[str, list[tuple[torch.Event, torch.Event]]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start, stop = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            flush.amax()
            start.record()
            functions[name]()
            stop.record()
            pairs[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(stop) for start, stop in pairs[name]] for name in names}


def median_ms(
    functions: Mapping[str, Callable[[], object]], rounds: int = 20, warm_up: int = 3
) -> dict[str, float]:
    """The medians of `times_ms`."""
    return {name: statistics.median(t) for name, t in times_ms(functions, rounds, warm_up).items()}
