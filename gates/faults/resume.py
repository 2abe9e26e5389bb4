"""Wrong ways to go on: at another place in the data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from gates import runs
from gates.faults.checkpoint import load_changed
from harness import benign, fault
from reference.data.loader import AHEAD_PER_WORKER

GATE = "m2_resume::test_resume"


def cases(*names):
    return [f"{GATE}[{name}]" for name in names]


def load_at(reference, place):
    """A load that says place(windows consumed) windows were consumed."""

    def change(snapshot):
        consumed = snapshot.data["epoch"] * runs.WINDOWS_PER_EPOCH + snapshot.data["window"]
        epoch, window = divmod(place(consumed), runs.WINDOWS_PER_EPOCH)
        return replace(snapshot, data={**snapshot.data, "epoch": epoch, "window": window})

    return load_changed(reference, change)


def train_changed(reference, change):
    """A train on what change(stack, windows, resumed) makes of its stack and windows."""

    def train(config, stack, windows, *rest, checkpoints=None):
        resumed = checkpoints is not None and checkpoints.resume
        changed, source = change(stack, windows, resumed)
        return reference.train(config, changed, source, *rest, checkpoints=checkpoints)

    return train


@fault(
    role="load",
    caught_by=cases("mid-epoch", "epoch-end"),
    seen_in="paiml/entrenar#294, KempnerInstitute/KempnerForge#51",
)
def reads_the_data_from_its_beginning(reference):
    """The cursor of the data is not saved: the resumed run begins with the first window."""
    return load_at(reference, lambda consumed: 0)


@fault(role="load", caught_by=cases("mid-epoch"), seen_in="huggingface/accelerate PR#4071, #2016")
def resumes_in_the_order_of_the_first_epoch(reference):
    """The right place in the wrong permutation: the epoch is counted from 0 again."""
    return load_at(reference, lambda consumed: consumed % runs.WINDOWS_PER_EPOCH)


@fault(
    role="load",
    caught_by=cases("epoch-end"),
    seen_in="verl-project/verl#7401, meta-pytorch/data#1437",
)
def skips_the_epoch_after_a_save_at_its_end(reference):
    """A save behind an epoch's last window resumes behind the next epoch."""
    whole = runs.WINDOWS_PER_EPOCH
    return load_at(reference, lambda done: done if done % whole else done + whole)


@fault(
    role="load",
    caught_by=cases("mid-epoch"),
    seen_in="modelscope/ms-swift#10099",
)
def counts_microbatches_as_windows(reference):
    """Skips as many windows of the epoch as microbatches were consumed in it."""
    whole = runs.WINDOWS_PER_EPOCH

    def place(done):
        epoch, window = divmod(done, whole)
        return epoch * whole + (window * runs.MICROBATCHES_PER_WINDOW) % whole

    return load_at(reference, place)


@fault(role="load", caught_by=cases("mid-epoch", "accumulation"), seen_in="own")
def reads_the_last_window_again(reference):
    """The position is that of the window in hand, not of the next one."""
    return load_at(reference, lambda consumed: consumed - 1)


class Inner:
    """Windows around windows: what a loader that keeps its own count is made of."""

    def __init__(self, windows):
        self.windows = windows

    def __len__(self):
        return len(self.windows)

    def __iter__(self):
        return iter(self.windows)

    def state_dict(self):
        return self.windows.state_dict()

    def load_state_dict(self, state):
        self.windows.load_state_dict(state)


def moved(state, num_windows):
    """A loader's position so many windows further on."""
    window = state["window"] + num_windows
    rows = runs.ROWS_PER_MICROBATCH * runs.MICROBATCHES_PER_WINDOW
    return {**state, "window": window, "row": window * rows}


@fault(role="train", caught_by=cases("twice"), seen_in="huggingface/datasets#8308, PR#8295")
def counts_from_the_last_resume(reference):
    """After a resume the position counts the windows since then: the second one goes back."""

    class Forgetful(Inner):
        begun = 0

        def state_dict(self):
            return moved(super().state_dict(), -self.begun)

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.begun = state["window"]

    return train_changed(reference, lambda stack, windows, _: (stack, Forgetful(windows)))


@fault(role="train", caught_by=cases("twice"), seen_in="meta-pytorch/data PR#1251")
def reports_a_stale_position_until_every_worker_has_worked(reference):
    """Fewer windows after a resume than workers, and the position is still the one loaded."""

    class Stale(Inner):
        loaded = None

        def state_dict(self):
            now = super().state_dict()
            if self.loaded is None:
                return now
            is_stale = now["window"] - self.loaded["window"] < runs.NUM_WORKERS
            return self.loaded if is_stale else now

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.loaded = dict(state)

    return train_changed(reference, lambda stack, windows, _: (stack, Stale(windows)))


@fault(
    role="train", caught_by=cases("workers", "twice"), seen_in="KempnerInstitute/KempnerForge#57"
)
def saves_the_position_of_the_workers(reference):
    """The position is that of the next window to be prepared: those that wait are lost."""

    class Ahead(Inner):
        def state_dict(self):
            state = super().state_dict()
            ahead = AHEAD_PER_WORKER * self.windows.settings.num_workers
            return moved(state, min(ahead, runs.NUM_UPDATES - state["window"]))

    return train_changed(reference, lambda stack, windows, _: (stack, Ahead(windows)))


@fault(
    role="train",
    caught_by=cases("mid-epoch", "workers"),
    seen_in="huggingface/datasets PR#8408, #7901",
)
def loses_what_its_shuffle_buffer_holds(reference):
    """Windows go through a buffer of three and out in random order; the buffer is not saved."""

    class Buffered(Inner):
        def __iter__(self):
            generator, source = torch.Generator().manual_seed(0), super().__iter__()
            buffer = list(itertools.islice(source, 3))
            while buffer:
                index = int(torch.randint(len(buffer), (), generator=generator))
                chosen = buffer.pop(index)
                buffer += list(itertools.islice(source, 1))
                yield chosen

    return train_changed(reference, lambda stack, windows, _: (stack, Buffered(windows)))


@fault(role="train", caught_by=cases("accumulation"), seen_in="own")
def goes_on_behind_the_first_microbatch(reference):
    """The first window after a resume lacks the microbatch that the killed run had done."""

    def change(stack, windows, resumed):
        class Rest(Inner):
            def __iter__(self):
                for index, window in enumerate(super().__iter__()):
                    is_first = resumed and index == 0
                    yield type(window)(window.microbatches[1:]) if is_first else window

        return stack, Rest(windows)

    return train_changed(reference, change)


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="train",
    accepted_by=[GATE, "m2_atomic::test_killed_at_random"],
    because="slow, but every window that was consumed is passed over, and no other",
)
def reads_again_what_was_consumed(reference):
    """The position is a count; after a resume so many windows are made and thrown away."""

    class Replaying(Inner):
        skipped = 0

        def __len__(self):
            return super().__len__() - self.skipped

        def __iter__(self):
            self.handed_out = self.skipped
            for window in itertools.islice(super().__iter__(), self.skipped, None):
                self.handed_out += 1
                yield window

        def state_dict(self):
            return {"consumed": getattr(self, "handed_out", self.skipped)}

        def load_state_dict(self, state):
            self.skipped = state["consumed"]

    return train_changed(reference, lambda stack, windows, _: (stack, Replaying(windows)))
