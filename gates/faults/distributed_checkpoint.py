"""Checkpoints of ranks that lose a part, are published too soon, or are refused by one alone."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from unittest import mock

import torch

from gates.faults.checkpoint import EMBEDDING, HEAD, load_changed, save_changed
from harness import benign, fault
from reference.checkpoint import MissingRankError, disk
from reference.checkpoint.commit import step_name
from reference.checkpoint.peers import ALONE, Peers
from reference.checkpoint.shards import Box, Shard

FILE = "m6_checkpoint::"
RESHARD, WAITS = f"{FILE}test_reshard", f"{FILE}test_rank_that_waits"
SLOW = f"{WAITS}[slow-2]", f"{WAITS}[slow-3]"
KILLED, REFUSED = f"{FILE}test_killed_rank", f"{FILE}test_refused"


# --- parts that are lost on the way to another number of ranks ---------------------------------


@fault(
    role="load",
    caught_by=[f"{RESHARD}[tied-4]", f"{RESHARD}[untied-4]"],
    seen_in="pytorch/pytorch#108869, #126595, pytorch/torchtitan#811",
)
def gives_every_rank_the_whole_quotient(reference):
    """Rank r begins at row r * (rows // W), where it should be r * ceil(rows / W)."""

    def load(directory, expected):
        index, world_size = expected.peers.index, expected.peers.world_size
        shards = {}
        for name, shard in expected.shards.items():
            box, num_rows = shard.box, int(re.findall(r"\d+", expected.parameters[name])[1])
            start = 0 if box.shape[0] == num_rows else index * (num_rows // world_size)
            shards[name] = replace(shard, box=Box((start, *box.offset[1:]), box.shape))
        return reference.load(directory, replace(expected, shards=shards))

    return load


@fault(role="load", caught_by=RESHARD, seen_in="KempnerInstitute/KempnerForge PR#115")
def starts_the_moments_anew_on_other_ranks(reference):
    """Moments that were saved by another number of ranks are zeros."""

    def change(snapshot):
        if snapshot.world["world_size"] == snapshot.peers.world_size:
            return snapshot
        zeros = {
            name: replace(
                adam,
                first_moment=torch.zeros_like(adam.first_moment),
                second_moment=torch.zeros_like(adam.second_moment),
            )
            for name, adam in snapshot.optimizer.items()
        }
        return replace(snapshot, optimizer=zeros)

    return load_changed(reference, change)


@fault(role="save", caught_by=RESHARD, seen_in="own")
def every_rank_writes_its_own_count_of_steps(reference):
    """The step of a parameter is that of the first one: it is taken for a global number."""

    def change(snapshot):
        if snapshot.peers.world_size == 1:
            return snapshot
        step = next(iter(snapshot.optimizer.values())).step
        changed = {name: replace(adam, step=step) for name, adam in snapshot.optimizer.items()}
        return replace(snapshot, optimizer=changed)

    return save_changed(reference, change)


@fault(
    role="save",
    caught_by=[f"{RESHARD}[untied-2]", f"{RESHARD}[untied-4]"],
    seen_in="NVIDIA-NeMo/Automodel#2571, verl-project/verl#7834",
)
def builds_the_head_of_shards_from_the_embedding(reference):
    """Ranks leave the head out, and it is made of the embedding again."""

    def change(snapshot):
        parameters = dict(snapshot.parameters)
        if snapshot.peers.world_size > 1 and HEAD in parameters:
            parameters[HEAD] = parameters[EMBEDDING].clone()
        return replace(snapshot, parameters=parameters)

    return save_changed(reference, change)


@fault(
    role="load",
    caught_by=[f"{RESHARD}[tied-2]", f"{RESHARD}[tied-4]"],
    seen_in="NVIDIA-NeMo/Automodel PR#2511, facebookresearch/lingua PR#75",
)
def unties_the_shards(reference):
    """The configuration says tied; what ranks load has two tables and no tie."""

    def change(snapshot):
        if snapshot.peers.world_size == 1:
            return snapshot
        parameters = dict(snapshot.parameters)
        for name, first in snapshot.ties.items():
            parameters[name] = parameters[first].clone()
        return replace(snapshot, parameters=parameters, ties={})

    return load_changed(reference, change)


# --- published too soon, or in silence ---------------------------------------------------------


@fault(role="save", caught_by=WAITS, seen_in="nvidia-cosmos/cosmos-rl PR#550")
def is_complete_when_the_first_rank_is(reference):
    """The first rank writes its files and the configuration, publishes, and waits for nobody."""

    def save(root, snapshot, last, every):
        if snapshot.peers.index == 0:
            return reference.save(root, replace(snapshot, peers=ALONE), last, every)
        return root / step_name(snapshot.counters.optimizer_steps)

    return save


@fault(role="save", caught_by=WAITS, seen_in="own")
def says_only_that_time_is_over(reference):
    """Which rank it was is for the reader of all logs to find out."""

    def save(root, snapshot, last, every):
        try:
            return reference.save(root, snapshot, last, every)
        except MissingRankError as error:
            raise TimeoutError("the barrier timed out") from error

    return save


@fault(role="save", caught_by=WAITS, seen_in="own")
def waits_as_long_as_it_takes(reference):
    """The deadline is not the one that was asked for."""

    def save(root, snapshot, last, every):
        peers = replace(snapshot.peers, deadline_s=6 * snapshot.peers.deadline_s)
        return reference.save(root, replace(snapshot, peers=peers), last, every)

    return save


@fault(
    role="save",
    caught_by=f"{KILLED}[second-rank-writes]",
    seen_in="nvidia-cosmos/cosmos-rl PR#550",
)
def publishes_the_folder_before_the_shards_are_in_it(reference):
    """The folder has its last name from the start, and what is in the old one goes first."""

    def save(root, snapshot, last, every):
        if snapshot.peers.world_size > 1 and snapshot.peers.index == 0:
            for folder in sorted(root.glob("step-*")):
                (folder / "manifest.json").unlink()
        return reference.save(root, snapshot, last, every)

    return save


@fault(
    role="save",
    caught_by=[f"{KILLED}[first-rank-before-it-publishes]", f"{KILLED}[second-rank-writes]"],
    seen_in="howervoo/speechturn#15",
)
def leaves_what_dead_ranks_left(reference):
    """Temporary folders of ranks that were killed stay for ever."""

    def save(root, snapshot, last, every):
        with mock.patch("reference.checkpoint.commit.remove_leftovers", lambda root: None):
            return reference.save(root, snapshot, last, every)

    return save


@fault(role="save", caught_by=f"{KILLED}[first-rank-after-it-published]", seen_in="own")
def publishes_when_the_old_one_is_gone(reference):
    """Ranks make room first: the old checkpoints go before the new one is there."""

    def save(root, snapshot, last, every):
        if snapshot.peers.world_size > 1 and snapshot.peers.index == 0:
            for folder in sorted(root.glob("step-*"))[:-1]:
                for file in list(folder.iterdir()):
                    disk.unlink(file)
                folder.rmdir()
        return reference.save(root, snapshot, last, every)

    return save


# --- refusals of one rank ----------------------------------------------------------------------


@dataclass(frozen=True)
class Deaf(Peers):
    """A rank that goes by what it has seen itself."""

    def agree(self, topic, work):
        return [work()] * self.world_size


@fault(role="load", caught_by=REFUSED, seen_in="own")
def refuses_by_itself(reference):
    """Each rank looks at its share of the files, and goes on if that is right."""

    def load(directory, expected):
        peers = expected.peers
        deaf = Deaf(peers.index, peers.world_size, peers.store, peers.deadline_s)
        return reference.load(directory, replace(expected, peers=deaf))

    return load


@fault(role="load", caught_by=REFUSED, seen_in="own")
def refuses_shards_without_a_name(reference):
    """Ranks agree that something is wrong; what it is, nobody says."""

    def load(directory, expected):
        try:
            return reference.load(directory, expected)
        except ValueError:
            raise ValueError("the checkpoint is damaged") from None

    return load


# --- right, in another way ---------------------------------------------------------------------

SAVED = [RESHARD, *SLOW, f"{KILLED}[second-rank-writes]", REFUSED]


@benign(role="save", accepted_by=SAVED, because="who waits for the thread sees no difference")
def ranks_save_in_a_thread(reference):
    """The files are written by a thread that the caller waits for."""

    def save(root, snapshot, last, every):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(reference.save, root, snapshot, last, every).result()

    return save


@benign(
    role="save",
    accepted_by=[*SLOW, REFUSED],
    because="equal copies are equal, whoever writes them",
)
def the_first_rank_writes_all_copies(reference):
    """Ranks that hold the same do not take turns."""

    def save(root, snapshot, last, every):
        is_first = snapshot.peers.index == 0
        shards = {name: Shard(shard.box, is_first, is_first)
                  for name, shard in snapshot.shards.items()}  # fmt: skip
        return reference.save(root, replace(snapshot, shards=shards), last, every)

    return save
