"""M6. Ranks save one checkpoint or none, and any number of them gets all of it back."""

from __future__ import annotations

import pickle
import shutil

import pytest

from gates import rank_checkpoints, snapshots
from gates.m2_checkpoint import Planted, changed_byte
from harness import gate
from reference.checkpoint import latest
from reference.update import Counters

EXACT = "distributed anew, no bit changes: a checkpoint is of a run, not of so many ranks"
DEADLINE_S = rank_checkpoints.DEADLINE_S
PLACEMENTS = {
    2: ["sharded", "replicated"],
    4: ["sharded", "replicas of shards", "sharded twice"],
}


def differing(found, want):
    """The parts that differ, of a few; or the refusal."""
    return [found["refused"]] if "refused" in found else snapshots.differing(found, want)[:5]


@gate(
    claim="parameters, moments and steps that 1 process saved come back, bit for bit and tied as "
    "they were, on 2 ranks or on 2 and then 4, sharded or replicated, and from there on 1",
    roles=["save", "load"],
    not_claimed="tensor parallelism, whose placements are refused",
    source="pytorch/pytorch#108869, #126595, pytorch/torchtitan#811: 6 rows over 4 ranks are 2, 2, "
    "2 and none; NVIDIA-NeMo/Automodel PR#2511: the tie",
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_reshard(stack, ranks, world_size, head, rng, tmp_path, check):
    state = rank_checkpoints.state_of(stack, rng, tied=head == "tied")
    training = state.training(stack)
    want = rank_checkpoints.found_in(training)
    want["position"] = repr(rank_checkpoints.POSITION)
    rank_checkpoints.keep(stack, training, tmp_path / "1")
    source = tmp_path / "1"
    for size in (size for size in PLACEMENTS if size <= world_size):
        plan = [(name, tmp_path / f"{size} {name}") for name in PLACEMENTS[size]]
        results = ranks.run(rank_checkpoints.passed_on, state, source, plan, world_size=size)
        for rank, result in enumerate(results):
            for name, found in zip(PLACEMENTS[size], result, strict=True):
                check(f"what differs on rank {rank} of {size}, {name}",
                      differing(found, want), equal=[], because=EXACT)  # fmt: skip
        source = plan[-1][1]
    for folder in (tmp_path / f"{world_size} sharded", source):
        fresh = rank_checkpoints.blank(state).training(stack)
        found = rank_checkpoints.go_on(stack, fresh, folder)
        check(f"what differs on 1 process, from {folder.name}", differing(found, want), equal=[],
              because=EXACT)  # fmt: skip


@gate(
    claim="a rank that is missing or slow stops the save of all: nothing is published, and every "
    "rank that waited says which one it was, in time",
    roles=["save", "load"],
    not_claimed="ranks on hosts whose file systems see each other late",
    source="nvidia-cosmos/cosmos-rl PR#550: valid when the configuration is there, not when all "
    "ranks have finished",
)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["missing", "slow"])
def test_rank_that_waits(stack, ranks, world_size, how, rng, tmp_path, check):
    state = rank_checkpoints.state_of(stack, rng, tied=True)
    arguments = (state, tmp_path / "run", how)
    results = ranks.run(rank_checkpoints.saved_without, *arguments, world_size=world_size)
    last = f"rank {world_size - 1}"
    for rank, (told, seconds) in enumerate(results[:-1]):
        check(f"rank {rank} names {last}", last in told, equal=True,
              because="who has waited must know for whom")  # fmt: skip
        check(f"seconds until rank {rank} says so", seconds, at_most=5 * DEADLINE_S,
              because=f"a deadline of {DEADLINE_S:g} s, on a busy machine")  # fmt: skip
    told = {result[0] for result in results if result[0] != "missing"}
    check("sentences told", len(told), equal=1, because="all ranks agree on what has happened")
    published = latest(tmp_path / "run")
    check("published", published is not None and published.name, equal=False,
          because="a part of a checkpoint is none")  # fmt: skip


# Which rank is killed, before which of its operations, and what is found then.
KILLS = {
    "second-rank-writes": (1, "fsync", 2, "old"),
    "first-rank-before-it-publishes": (0, "rename", 1, "old"),
    "first-rank-after-it-published": (0, "unlink", 1, "new"),
}


@gate(
    claim="one rank killed in the middle of a save leaves the old checkpoint or the new, whole, "
    "and the next save goes through",
    roles=["save", "load"],
    not_claimed="every operation: m2_atomic, on one process",
    source="issue 5; nvidia-cosmos/cosmos-rl PR#550",
)
@pytest.mark.parametrize("case", KILLS)
def test_killed_rank(stack, ranks, case, rng, tmp_path, check):
    root, (rank, operation, number, which) = tmp_path / "run", KILLS[case]
    state = rank_checkpoints.state_of(stack, rng, tied=True)
    old = state.training(stack)
    for step in (5, 6):  # the next save is to remove the first
        old.counters = Counters(optimizer_steps=step)
        rank_checkpoints.keep(stack, old, root)
    outcome = ranks.run(
        rank_checkpoints.killed_at, state, root, rank, operation, number, world_size=2,
        may_fail=True,
    )  # fmt: skip
    check("the rank was killed", "SIGKILL" in str(outcome.ends[rank]), equal=True,
          because="it does so itself")  # fmt: skip
    step = {"old": 6, "new": 7}[which]
    newest = latest(root)
    check("newest", newest is not None and newest.name, equal=f"step-{step:08d}",
          because="before the rename it is the old one, after it the new one")  # fmt: skip
    fresh = rank_checkpoints.blank(state).training(stack)
    found = rank_checkpoints.go_on(stack, fresh, root)
    want = rank_checkpoints.found_in(state.training(stack) if which == "new" else old)
    want["position"] = repr(rank_checkpoints.POSITION)
    check("what differs in it", differing(found, want), equal=[], because="it is whole")
    later = state.training(stack)
    later.counters = Counters(optimizer_steps=8)
    rank_checkpoints.keep(stack, later, root)
    left = sorted(path.name for path in root.iterdir())
    check("what is there after the next save", left, equal=[f"step-{step:08d}", "step-00000008"],
          because="what the dead one left is removed")  # fmt: skip


def missing(folder, file):
    file.unlink()


def pickled(folder, file):
    file.write_bytes(pickle.dumps(Planted(folder.parent / "executed")))


DAMAGES = {"missing": missing, "changed byte": changed_byte, "pickle": pickled}


@gate(
    claim="a file of any rank that is missing, changed or a pickle is refused by all ranks, in one "
    "sentence that names it",
    roles=["save", "load"],
    not_claimed="when tensors are allocated: tests/reference/test_checkpoint_ranks.py",
    source="issue 5, point 3; one rank that refuses while the others go on waits for ever",
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_refused(stack, ranks, world_size, rng, tmp_path, check):
    state = rank_checkpoints.state_of(stack, rng, tied=True)
    ranks.run(rank_checkpoints.saved_whole, state, tmp_path / "run", world_size=world_size)
    saved, folders, files = latest(tmp_path / "run"), {}, {}
    for damage, apply in DAMAGES.items():
        for index, file in enumerate(sorted(saved.glob("*.safetensors"))):
            name = f"{damage} {file.name}"
            folder = shutil.copytree(saved, tmp_path / f"{damage} {index}")
            apply(folder, folder / file.name)
            folders[name], files[name] = folder, file.name
    check("damaged files", len(folders), at_least=3, because="each rank has one at least")
    results = ranks.run(rank_checkpoints.refused_by, state, folders, world_size=2)
    parted = [name for name in folders if len({told[name] for told in results}) > 1]
    check("damage of which ranks told different things", parted, equal=[],
          because="all refuse, or all go on")  # fmt: skip
    passed = [name for name, file in files.items() if file not in results[0][name]]
    check("damage whose file was not named", passed, equal=[], because="one must know which")
    executed = [name for name, folder in folders.items() if (folder.parent / "executed").exists()]
    check("pickles that were executed", executed, equal=[], because="weights are data")
