"""Updates from a split: which windows, in which order, on which rank; made ahead by workers.

The order is a pure function of the seed and a place, and a worker only makes the windows of places
that it is told. So the position is how much was handed out, whatever workers have made beyond it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from reference.data.pack import Rows
from reference.data.policy import PackingPolicy
from reference.window import Window

AHEAD_PER_WORKER = 2


class PackedWindows(Protocol):
    """As SplitWindows: windows [T + 1] of several sources, numbered through."""

    policy: PackingPolicy
    eos: int
    sha256: str
    targets: list[Tensor]
    first_windows: list[int]

    def read(self, numbers: Tensor) -> Rows: ...


@dataclass(frozen=True)
class LoaderSettings:
    """num_updates: of a run. A rank's update is microbatches_per_window microbatches of
    rows_per_microbatch windows; all ranks together take consecutive ones. weights: as in
    Interleaving; buffer_rows: as in buffered_shuffle, None: each epoch is shuffled as a whole.
    num_workers: threads that make windows ahead; 0: they are made when they are asked for.

    Raises ValueError for a size below 1, num_workers below 0, a rank that is not there.
    """

    seed: int
    num_updates: int
    rows_per_microbatch: int
    microbatches_per_window: int
    weights: Sequence[float] | None = None
    buffer_rows: int | None = None
    rank: int = 0
    num_ranks: int = 1
    num_workers: int = 1

    def __post_init__(self) -> None:
        sizes = ("num_updates", "rows_per_microbatch", "microbatches_per_window", "num_ranks")
        for name in (*sizes, *(["buffer_rows"] if self.buffer_rows is not None else [])):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}, must not be negative")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"no rank {self.rank} of {self.num_ranks}")

    @property
    def rows_per_rank(self) -> int:
        """Rows of an update on one rank."""
        return self.rows_per_microbatch * self.microbatches_per_window

    @property
    def rows_per_update(self) -> int:
        """Rows of an update on all ranks."""
        return self.rows_per_rank * self.num_ranks


@dataclass(frozen=True)
class Sampled:
    """Why a row is where it is: its source got `share` of the targets, and is in this epoch of its
    windows. source: index into `targets`; window: its number in the split.
    """

    source: int
    share: float
    epoch: int
    window: int


class Loader:
    """The updates of a run, to be gone through from its position on, again and again.

    A new pass, and load_state_dict, end the pass before, which then raises RuntimeError. The same
    position is right on every rank, for any number of workers, and, since it counts the rows of all
    ranks, for another number of ranks or rows of an update too.

    stack: brings shuffle, buffered_shuffle, interleave, apply_policy and make_labels.
    Attributes: wait_s, the seconds for which the newest pass was waited for; pass_s, from when its
    first window was asked for to when the last one was, or the end was seen.
    """

    def __init__(self, windows: PackedWindows, settings: LoaderSettings, stack: Any) -> None:
        self.windows, self.settings = windows, settings
        self._stack = stack
        shuffle = stack.shuffle
        if settings.buffer_rows is not None:
            shuffle = partial(_in_buffer, stack.buffered_shuffle, settings.buffer_rows)
        self._order = stack.interleave(windows.targets, settings.weights, settings.seed, shuffle)
        self._start = self._next = (0, 0)  # updates and rows that were handed out
        self._newest = 0
        self.wait_s = self.pass_s = 0.0

    def __len__(self) -> int:
        """Updates of a pass."""
        return self.settings.num_updates - self._start[0]

    @property
    def num_targets(self) -> int:
        """Supervised tokens of a pass, on all ranks."""
        first = self._start[1]
        stop = first + len(self) * self.settings.rows_per_update
        total: int = self._order.num_targets(first, stop)
        return total

    @property
    def waiting(self) -> str:
        """How long the newest pass was waited for, in words."""
        share = self.wait_s / max(self.pass_s, 1e-9)
        return f"waited for data: {self.wait_s:.3f} s of {self.pass_s:.1f} s, {share:.2%}"

    def __iter__(self) -> Iterator[Window]:
        self._newest += 1
        self._next = self._start
        self.wait_s = self.pass_s = 0.0
        return self._pass(self._newest)

    def state_dict(self) -> dict[str, int | str]:
        """The next update that the newest pass has not handed out, and of what.

        window: updates done; row: rows done, of all ranks.
        """
        return {"window": self._next[0], "row": self._next[1], **self._belongs_to()}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """The next pass begins where `state` says.

        Raises ValueError, and stays as it was, for the state of other windows or another order, and
        for a place that is not there.
        """
        own = self._belongs_to()
        if state.keys() != {"window", "row", *own}:
            raise ValueError(f"a position has window, row, {', '.join(own)}; got {dict(state)}")
        wrong = [f"{key} {state[key]}, here {own[key]}" for key in own if own[key] != state[key]]
        if wrong:
            raise ValueError(f"the position belongs to other windows: {'; '.join(wrong)}")
        window, row = state["window"], state["row"]
        if type(window) is not int or type(row) is not int:
            raise ValueError(f"window and row must be whole numbers, got {window!r}, {row!r}")
        if not 0 <= window <= self.settings.num_updates or row < 0 or (row == 0) != (window == 0):
            raise ValueError(
                f"no update {window} at row {row}; {self.settings.num_updates} are asked for"
            )
        self._newest += 1
        self._start = self._next = window, row

    def sampled(self, place: int) -> Sampled:
        """Why the row at this place of the order, counted over all ranks, is there."""
        source, epoch, row = self._order.rows(place, place + 1)[0].tolist()
        window = self.windows.first_windows[source] + row
        return Sampled(source, self._order.shares[source], epoch, window)

    def _belongs_to(self) -> dict[str, int | str]:
        weights = self.settings.weights
        return {
            "seed": self.settings.seed,
            "weights": "of the targets" if weights is None else " ".join(map(repr, weights)),
            "buffer_rows": self.settings.buffer_rows or 0,
            "windows_sha256": self.windows.sha256,
        }

    def _pass(self, number: int) -> Iterator[Window]:
        begin = time.perf_counter()
        updates = self._made_ahead() if self.settings.num_workers else self._made_when_asked()
        while True:
            asked = time.perf_counter()
            if number != self._newest:
                raise RuntimeError("this pass was ended by a newer one or by load_state_dict")
            window = next(updates, None)
            now = time.perf_counter()
            self.wait_s, self.pass_s = self.wait_s + now - asked, now - begin
            if window is None:
                return
            done, row = self._next
            self._next = done + 1, row + self.settings.rows_per_update
            yield window

    def _made_when_asked(self) -> Iterator[Window]:
        return (self._made(numbers) for numbers in self._numbers())

    def _made_ahead(self) -> Iterator[Window]:
        num_workers = self.settings.num_workers
        pool = ThreadPoolExecutor(num_workers, thread_name_prefix="windows")
        ahead: deque[Future[Window]] = deque()
        try:
            for numbers in self._numbers():
                ahead.append(pool.submit(self._made, numbers))
                if len(ahead) > AHEAD_PER_WORKER * num_workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _numbers(self) -> Iterator[Tensor]:
        """For each update the numbers of this rank's windows."""
        chosen = self.settings
        done, row = self._start
        firsts = torch.tensor(self.windows.first_windows)
        for _ in range(done, chosen.num_updates):
            begin = row + chosen.rank * chosen.rows_per_rank
            rows = self._order.rows(begin, begin + chosen.rows_per_rank)
            yield firsts[rows[:, 0]] + rows[:, 2]
            row += chosen.rows_per_update

    def _made(self, numbers: Tensor) -> Window:
        stack, windows = self._stack, self.windows
        return Window(
            tuple(
                stack.apply_policy(
                    windows.read(part), windows.policy, windows.eos, stack.make_labels
                )
                for part in torch.split(numbers, self.settings.rows_per_microbatch)
            )
        )


def _in_buffer(
    buffered_shuffle: Any, buffer_rows: int, num_rows: int, seed: int, epoch: int
) -> Tensor:
    order: Tensor = buffered_shuffle(num_rows, seed, epoch, buffer_rows)
    return order
