"""Wrong and right ways to hand out windows."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch

from gates.toy_windows import PER_EPOCH
from harness import benign, fault
from reference.data.loader import Loader
from reference.data.pack import Rows

ONCE = "m1_loader::test_once_an_epoch"
RESUMED = "m1_loader::test_resumed"
RANKS = "m1_loader::test_other_ranks"
REFUSED = "m1_loader::test_refused_position"
ORDERS = ("shuffled", "buffered")


def once(*cases):
    """The cases of test_once_an_epoch with these ranks and workers."""
    return [f"{ONCE}[{case}-{order}]" for case in cases for order in ORDERS]


class ChangedNumbers(Loader):
    """A loader whose windows of each update are `change(all updates from here on)`."""

    change = staticmethod(lambda loader, numbers: numbers)

    def _numbers(self):
        return islice(self.change(self, super()._numbers()), len(self))


class ChangedOrder:
    """An order whose place p is the place `change(p)` of another; a pure function of it."""

    def __init__(self, inner, change):
        self._inner, self._change = inner, change
        self.shares = inner.shares

    def rows(self, start, stop):
        places = [self._change(place) for place in range(start, stop)]
        return torch.cat([self._inner.rows(place, place + 1) for place in places])

    def num_targets(self, start, stop):
        places = [self._change(place) for place in range(start, stop)]
        return sum(self._inner.num_targets(place, place + 1) for place in places)


def changed_order(change):
    """A loader that reads the place change(place, its settings) for every place."""

    class Changed(Loader):
        def __init__(self, windows, settings, stack):
            super().__init__(windows, settings, stack)
            self._order = ChangedOrder(self._order, lambda place: change(place, settings))

    return Changed


# --- which windows ---------------------------------------------------------------------------


@fault(
    role="loader",
    caught_by=once("2-1", "3-2"),
    seen_in="huggingface/datasets#3423, #5360, lance-format/lance#2713",
)
def every_rank_reads_everything(reference):
    """The rank is not looked at: all ranks train on the same windows."""
    return lambda windows, settings, stack: Loader(windows, replace(settings, rank=0), stack)


@fault(
    role="loader",
    caught_by=once("1-3", "3-2"),
    seen_in="huggingface/datasets#3423, #5360, vahidk/tfrecord#78",
)
def every_worker_hands_out_everything(reference):
    """The workers do not share the updates: each of them hands out all."""

    class Repeated(ChangedNumbers):
        @staticmethod
        def change(loader, numbers):
            workers = max(loader.settings.num_workers, 1)
            return (chosen for chosen in numbers for _ in range(workers))

    return Repeated


@fault(role="loader", caught_by=ONCE, seen_in="metagene-ai/metagene-pretrain PR#18")
def looks_ahead_into_the_next_update(reference):
    """An update's last window is the next one's first, which comes again."""

    class Ahead(ChangedNumbers):
        @staticmethod
        def change(loader, numbers):
            updates = list(numbers)
            for update, following in zip(updates, [*updates[1:], updates[0]], strict=True):
                yield torch.cat([update[:-1], following[:1]])

    return Ahead


@fault(role="loader", caught_by=ONCE, seen_in="ml-explore/mlx-lm PR#1413, PR#1544")
def leaves_out_what_does_not_fill_an_update(reference):
    """The windows at an epoch's end that are fewer than an update are never read."""

    def change(place, settings):
        whole = PER_EPOCH // settings.rows_per_update * settings.rows_per_update
        return place // whole * PER_EPOCH + place % whole

    return changed_order(change)


@fault(role="loader", caught_by=ONCE, seen_in="huggingface/trl PR#6351, lancedb/lancedb#3705")
def goes_through_the_first_epoch_again(reference):
    """Every epoch has the order of the first."""
    return changed_order(lambda place, settings: place % PER_EPOCH)


# --- right ways ------------------------------------------------------------------------------


@benign(
    role="loader",
    accepted_by=[ONCE, RESUMED, RANKS, REFUSED],
    because="workers make windows ahead; they do not decide which",
)
def no_worker_whatever_was_asked(reference):
    """Makes every window when it is asked for."""
    return lambda windows, settings, stack: Loader(windows, replace(settings, num_workers=0), stack)


@benign(
    role="loader",
    accepted_by=[ONCE, RESUMED, RANKS],
    because="the windows of an update can be read in any order and put together",
)
def reads_window_by_window(reference):
    """Reads every window by itself, the last one first."""

    class Singly:
        def __init__(self, windows):
            self._windows = windows

        def __getattr__(self, name):
            return getattr(self._windows, name)

        def read(self, numbers):
            parts = [self._windows.read(number[None]) for number in numbers.flip(0)][::-1]
            names = ("tokens", "documents", "positions")
            return Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    return lambda windows, settings, stack: Loader(Singly(windows), settings, stack)
