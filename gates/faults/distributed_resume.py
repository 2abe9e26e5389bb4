"""Ranks that go on with another rank's random state, or at another place in the data."""

from __future__ import annotations

from dataclasses import replace

import torch

from gates.faults.checkpoint import load_changed
from gates.faults.resume import consumed, moved
from harness import benign, fault

RESUME, OTHER = "m6_resume::test_resume", "m6_resume::test_other_number"


def is_other_number(snapshot):
    return snapshot.world["world_size"] != snapshot.peers.world_size


@fault(role="save", caught_by=RESUME, seen_in="NVIDIA/Megatron-LM PR#6858, radixark/miles PR#3187")
def saves_the_random_state_once(reference):
    """The random state is taken for the same on all ranks; the first one's is written for all."""

    def save(root, snapshot, last, every):
        states = snapshot.peers.agree(
            f"random {snapshot.counters.optimizer_steps}",
            lambda: {name: state.tolist() for name, state in snapshot.random.items()},
        )
        first = {name: torch.tensor(s, dtype=torch.uint8) for name, s in states[0].items()}
        return reference.save(root, replace(snapshot, random=first), last, every)

    return save


@fault(role="load", caught_by=RESUME, seen_in="own")
def drops_the_random_states_of_ranks(reference):
    """With several ranks nobody's random state is restored."""

    def change(snapshot):
        return replace(snapshot, random={}) if snapshot.peers.world_size > 1 else snapshot

    return load_changed(reference, change)


@fault(
    role="load",
    caught_by=OTHER,
    seen_in="NVIDIA-NeMo/Megatron-Bridge PR#5637, PR#3503",
)
def takes_one_rank_s_share_of_the_position(reference):
    """Two ranks to one: the position counts what the first rank alone has read."""

    def change(snapshot):
        if not is_other_number(snapshot):
            return snapshot
        done = consumed(snapshot.data)
        return replace(snapshot, data=moved(snapshot.data, done // 2 - done))

    return load_changed(reference, change)


@fault(role="load", caught_by=OTHER, seen_in="NVIDIA-NeMo/Megatron-Bridge PR#3503")
def reads_from_the_beginning_on_another_number_of_ranks(reference):
    """What was consumed before is forgotten when the ranks are others."""

    def change(snapshot):
        if not is_other_number(snapshot):
            return snapshot
        return replace(snapshot, data=moved(snapshot.data, -consumed(snapshot.data)))

    return load_changed(reference, change)


@fault(role="load", caught_by=OTHER, seen_in="own")
def divides_the_tokens_by_the_ranks(reference):
    """The schedule goes on from the tokens of one rank."""

    def change(snapshot):
        if not is_other_number(snapshot):
            return snapshot
        counters = snapshot.counters
        tokens = counters.tokens_updated // snapshot.world["world_size"]
        return replace(snapshot, counters=replace(counters, tokens_updated=tokens))

    return load_changed(reference, change)


@benign(role="load", accepted_by=[RESUME, OTHER], because="a copy is equal")
def ranks_load_copies(reference):
    """What was loaded is copied once more."""

    def change(snapshot):
        copies = {name: tensor.clone() for name, tensor in snapshot.parameters.items()}
        return replace(snapshot, parameters=copies)

    return load_changed(reference, change)
