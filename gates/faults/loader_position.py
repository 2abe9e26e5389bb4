"""Wrong ways to say where a loader is, and to go on from there."""

from __future__ import annotations

from gates.faults.loader import ORDERS, RANKS, REFUSED, RESUMED
from gates.toy_windows import PER_EPOCH
from harness import fault
from reference.data.loader import AHEAD_PER_WORKER, Loader


def resumed(*cases):
    """The cases of test_resumed with these saves."""
    return [f"{RESUMED}[{case}-{order}]" for case in cases for order in ORDERS]


def saved_as(change):
    """A loader that says it is at change(itself, state)."""

    class Saved(Loader):
        def state_dict(self):
            return change(self, super().state_dict())

    return Saved


def resumed_at(change):
    """A loader that goes on at change(itself, state) for a state."""

    class Resumed(Loader):
        def load_state_dict(self, state):
            super().load_state_dict(change(self, state))

    return Resumed


def at(loader, state, window):
    """The state at another update."""
    return {**state, "window": window, "row": window * loader.settings.rows_per_update}


@fault(
    role="loader",
    caught_by=RESUMED,
    seen_in="paiml/entrenar#294, KempnerInstitute/KempnerForge#51",
)
def loads_no_position(reference):
    """The position is read and not used: every resume begins at the first window."""
    return resumed_at(lambda loader, state: at(loader, state, 0))


@fault(
    role="loader",
    caught_by=resumed("second epoch", "epoch end", "three times"),
    seen_in="huggingface/accelerate PR#4071, #2016",
)
def skips_in_a_new_first_epoch(reference):
    """The right place of an epoch, in the order of the first."""

    class FirstEpoch(Loader):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self._start = self._next = (self._start[0], self._start[1] % PER_EPOCH)

    return FirstEpoch


@fault(
    role="loader",
    caught_by=resumed("twice", "three times"),
    seen_in="huggingface/datasets#8308, PR#8295",
)
def counts_since_the_last_resume(reference):
    """The position counts the updates since the pass began: a second resume goes back."""
    return saved_as(lambda loader, state: at(loader, state, state["window"] - loader._start[0]))


@fault(
    role="loader",
    caught_by=[f"{RESUMED}[{case}-buffered]" for case in ("mid-epoch", "second epoch", "twice")],
    seen_in="huggingface/datasets PR#8408, #7901",
)
def restarts_the_buffer(reference):
    """The buffer is filled anew: what it held is not handed out any more."""

    class Restarted(Loader):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            window, row = self._start
            self._start = self._next = (window, row + (self.settings.buffer_rows or 0))

    return Restarted


@fault(
    role="loader",
    caught_by=[RESUMED, "m2_resume::test_resume[workers]", "m2_resume::test_resume[twice]"],
    seen_in="own",
)
def counts_what_workers_made(reference):
    """The position is that of the workers, who are ahead: what waits in the queue is lost."""

    def ahead(loader, state):
        made = state["window"] + AHEAD_PER_WORKER * loader.settings.num_workers
        return at(loader, state, min(made, loader.settings.num_updates))

    return saved_as(ahead)


@fault(
    role="loader",
    caught_by=resumed("mid-epoch", "second epoch", "twice"),
    seen_in="meta-pytorch/data PR#1251, KempnerInstitute/KempnerForge#57",
)
def counts_whole_rounds_of_workers(reference):
    """The position is kept when each worker had its turn: a save in between is behind."""

    def whole_rounds(loader, state):
        workers = max(loader.settings.num_workers, 1)
        return at(loader, state, state["window"] // workers * workers)

    return saved_as(whole_rounds)


@fault(
    role="loader",
    caught_by=resumed("epoch end"),
    seen_in="verl-project/verl#7401, meta-pytorch/data#1437",
)
def finds_the_epoch_exhausted(reference):
    """A position at an epoch's end goes on behind the next epoch."""

    class Skips(Loader):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            window, row = self._start
            if row % PER_EPOCH == 0:
                self._start = self._next = (window, row + PER_EPOCH)

    return Skips


@fault(role="loader", caught_by=RESUMED, seen_in="own")
def hands_out_the_last_update_again(reference):
    """The position is that of the update in hand, which may have been trained on."""
    return saved_as(lambda loader, state: at(loader, state, state["window"] - 1))


@fault(
    role="loader",
    caught_by=[f"{RANKS}[2-1]", f"{RANKS}[3-2]"],
    seen_in="NVIDIA-NeMo/Megatron-Bridge PR#5637, PR#3503",
)
def counts_the_rows_of_rank_0(reference):
    """The position counts one rank's rows: those of the others are read again."""
    return saved_as(
        lambda loader, state: {**state, "row": state["row"] // loader.settings.num_ranks}
    )


@fault(role="loader", caught_by=[f"{RANKS}[2-1]", f"{RANKS}[3-2]"], seen_in="own")
def every_rank_has_a_position_of_its_own(reference):
    """The position holds where the rank's own rows begin: one file cannot serve all."""

    def own_row(loader, state):
        return {**state, "row": state["row"] + loader.settings.rank}

    return saved_as(own_row)


@fault(role="loader", caught_by=REFUSED, seen_in="own")
def takes_any_position(reference):
    """Whatever a position belongs to, it is taken as one of these windows."""
    return resumed_at(lambda loader, state: {**state, **loader._belongs_to()})
