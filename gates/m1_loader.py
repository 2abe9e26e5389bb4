"""M1. The loader: every window once an epoch over ranks and workers, and resumed exactly."""

from __future__ import annotations

import itertools
import json

import pytest

from gates import toy_windows
from gates.toy_windows import (
    ALL_TARGETS,
    PER_EPOCH,
    SEED,
    TARGETS,
    ToyWindows,
    labels_of,
    numbers_of,
)
from harness import gate

ACCIDENT = "36 windows have 3.7e41 orders: an equal one is no accident"


def epochs_of(numbers):
    return [numbers[begin : begin + PER_EPOCH] for begin in (0, PER_EPOCH)]


@gate(
    claim="over all ranks and workers, every window comes once an epoch, with all of its targets",
    roles=["loader", "apply_policy", "interleave", "shuffle"],
    not_claimed="ranks that are real processes",
    source="huggingface/datasets#3423, #5360; lance-format/lance#2713: every worker, or rank, "
    "reads everything; metagene-ai/metagene-pretrain PR#18: looked at ahead, used twice",
)
@pytest.mark.parametrize("buffer_rows", [None, 8], ids=["shuffled", "buffered"])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 0), (1, 3), (2, 1), (3, 2)])
def test_once_an_epoch(stack, num_ranks, num_workers, buffer_rows, check):
    windows = ToyWindows(TARGETS)
    num_updates = -(-2 * PER_EPOCH // (5 * num_ranks))  # which 5 does not divide
    ranks = [
        stack.loader(
            windows,
            toy_windows.settings(
                num_updates=num_updates,
                rows_per_microbatch=5,
                microbatches_per_window=1,
                rank=rank,
                num_ranks=num_ranks,
                num_workers=num_workers,
                buffer_rows=buffer_rows,
            ),
            stack,
        )
        for rank in range(num_ranks)
    ]
    updates = [list(loader) for loader in ranks]
    sizes = [len(made) for made in updates]
    check("updates", sizes, equal=[num_updates] * num_ranks, because="as many as asked for")
    in_order = [window for update in zip(*updates, strict=True) for window in update]
    numbers = [number for window in in_order for number in numbers_of(window)]
    teaching = {i for i, count in enumerate(ALL_TARGETS) if count}
    for epoch in epochs_of(numbers):
        check("windows read twice", PER_EPOCH - len(set(epoch)), equal=0, because="once an epoch")
        lost = len(teaching - set(epoch))
        check("windows that are not read", lost, equal=0, because="once an epoch")
    same = epochs_of(numbers)[0] == epochs_of(numbers)[1]
    check("the second epoch has the first's order", same, equal=False, because=ACCIDENT)
    found = sum(len(labels_of(window)) for window in in_order)
    wanted = sum(ALL_TARGETS[number] for number in numbers)
    check("targets", found - wanted, equal=0, because="all of each window's")
    said = ranks[0].num_targets
    check("num_targets", said - wanted, equal=0, because="the schedule is planned by it")


# After how many updates each save comes; an epoch is 9 updates of 4.
SAVES = {
    "mid-epoch": [4],
    "second epoch": [13],
    "epoch end": [9],
    "twice": [7, 1],
    "three times": [2, 11, 1],
}


def read(loader, num_updates):
    """The windows of the next updates; None: of all that are left."""
    return [numbers_of(window) for window in itertools.islice(loader, num_updates)]


@gate(
    claim="a pass that is saved and gone on with gives the windows that one never stopped gives",
    roles=["loader", "interleave"],
    not_claimed="a new process (m1_new_process), a whole training run (m2_resume)",
    source="paiml/entrenar#294; huggingface/accelerate PR#4071; huggingface/datasets#8308 (the "
    "second resume), PR#8408 (the buffer); verl-project/verl#7401 (at an epoch's end)",
)
@pytest.mark.parametrize("buffer_rows", [None, 8], ids=["shuffled", "buffered"])
@pytest.mark.parametrize("case", SAVES)
def test_resumed(stack, case, buffer_rows, check):
    def loader(num_workers):
        chosen = toy_windows.settings(num_workers=num_workers, buffer_rows=buffer_rows)
        return stack.loader(ToyWindows(TARGETS), chosen, stack)

    want = read(loader(0), None)
    current = loader(3)
    got: list[list[int]] = []
    for num_updates, num_workers in zip(SAVES[case], (1, 0, 2), strict=False):
        got += read(current, num_updates)
        state = json.dumps(current.state_dict())  # as a checkpoint keeps it
        current = loader(num_workers)  # another number each time
        current.load_state_dict(json.loads(state))
    got += read(current, None)
    check("updates", len(got), equal=len(want), because="none is skipped, none is added")
    wrong = sum(a != b for a, b in zip(got, want, strict=True))
    check("updates that differ", wrong, equal=0, because="integers, exact")


@gate(
    claim="a pass goes on with another number of ranks where it was, nothing lost or repeated",
    roles=["loader"],
    not_claimed="that updates are of the same size as before",
    source="NVIDIA-NeMo/Megatron-Bridge PR#5637: two ranks' places become that of rank 0",
)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_other_ranks(stack, before, after, check):
    def ranks(num_ranks):
        chosen = {"num_ranks": num_ranks, "num_updates": 6}
        return [
            stack.loader(ToyWindows(TARGETS), toy_windows.settings(rank=rank, **chosen), stack)
            for rank in range(num_ranks)
        ]

    def together(loaders, num_updates):
        updates = zip(*(read(loader, num_updates) for loader in loaders), strict=True)
        return [number for update in updates for numbers in update for number in numbers]

    first = ranks(before)
    got = together(first, 2)
    state = json.dumps(first[0].state_dict())
    others = [json.dumps(loader.state_dict()) != state for loader in first]
    check("positions that differ", sum(others), equal=0, because="one position for all ranks")
    second = ranks(after)
    for loader in second:
        loader.load_state_dict(json.loads(state))
    got += together(second, None)
    num_rows = 4 * (2 * before + 4 * after)
    alone = toy_windows.settings(num_updates=num_rows // 4)
    updates = read(stack.loader(ToyWindows(TARGETS), alone, stack), None)
    want = [number for update in updates for number in update]
    check("windows", len(got), equal=num_rows, because="6 updates")
    wrong = sum(a != b for a, b in zip(got, want, strict=True))
    check("windows out of order", wrong, equal=0, because="the position counts all ranks' rows")


OTHERS = {
    "seed": ({"seed": SEED + 1}, TARGETS, "toy"),
    "weights": ({"weights": (0.5, 0.5)}, TARGETS, "toy"),
    "buffer_rows": ({"buffer_rows": 9}, TARGETS, "toy"),
    "windows_sha256": ({}, TARGETS, "other windows"),
}


@gate(
    claim="a position of another order, or of other windows, is refused, naming what differs",
    roles=["loader"],
    not_claimed="that a manifest's hash is that of its shards (m0_manifest)",
    source="a place in one order is another place in another: huggingface/accelerate PR#4071",
)
@pytest.mark.parametrize("case", OTHERS)
def test_refused_position(stack, case, check):
    fields, targets, sha256 = OTHERS[case]
    own = stack.loader(ToyWindows(TARGETS), toy_windows.settings(), stack)
    read(own, 3)
    other = stack.loader(ToyWindows(targets, sha256), toy_windows.settings(**fields), stack)
    try:
        other.load_state_dict(own.state_dict())
        outcome = "accepted"
    except ValueError as error:
        outcome = f"refused, naming {case}" if case in str(error) else f"refused: {error}"
    check("outcome", outcome, equal=f"refused, naming {case}", because="it is another place there")
