"""Several ranks save one checkpoint, or none; each loads its part of one, or all refuse it alike.

The ranks are threads with a store in memory: what they say to each other is what processes say.
"""

import json
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import (
    IDENTITY,
    expected_of,
    hashed_again,
    names,
    on_each,
    peers,
    run_of,
    snapshot_of,
)

from reference.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    FolderTakenError,
    MissingRankError,
    digests,
    disk,
    latest,
    load,
    resumption,
    save,
)
from reference.checkpoint.shards import Box, Shard, whole, world_of
from reference.optimizer import AdamState

DEADLINE_S = 0.5


@pytest.mark.parametrize("error", [MemoryError("no 5 GiB"), RuntimeError("no kernel")], ids=str)
def test_whatever_a_rank_raises_ends_all_of_them_with_its_words(error):
    def work(rank):
        if rank.index == 1:
            raise error

    began = time.monotonic()
    found = on_each(lambda rank: rank.agree("capture", lambda: work(rank)), peers(2))
    assert time.monotonic() - began < 10
    assert {type(one) for one in found} == {RuntimeError}
    assert {str(one) for one in found} == {f"{type(error).__name__}: {error}"}


def fill_the_disk_of_rank_1(monkeypatch):
    real = disk.create

    def create(path):
        if "00001-of" in path.name:
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(disk, "create", create)


def rows(tensor, index, num_ranks):
    """The rows of one rank, as Shard(0) gives them: the last ranks may have none."""
    parts = torch.chunk(tensor, num_ranks)
    part = parts[index] if index < len(parts) else tensor[:0]
    start = sum(len(one) for one in parts[:index])
    return part.clone(), (start,) + (0,) * (tensor.ndim - 1)


def shards_of(snapshot, index, num_ranks):
    shards = {}
    for name, tensor in snapshot.parameters.items():
        part, offset = rows(tensor, index, num_ranks)
        is_written = part.numel() > 0
        shards[name] = Shard(Box(offset, tuple(part.shape)), is_written, index == 0)
    return shards


def shared_out(snapshot, ranks):
    """What each rank would have captured, its random state its own."""

    def part(tensor, index):
        return rows(tensor, index, len(ranks))[0]

    return [
        replace(
            snapshot,
            parameters={n: part(t, peer.index) for n, t in snapshot.parameters.items()},
            optimizer={
                name: AdamState(
                    adam.step, part(adam.first_moment, peer.index),
                    part(adam.second_moment, peer.index),
                )
                for name, adam in snapshot.optimizer.items()
            },
            random={"cpu": torch.full((8,), peer.index, dtype=torch.uint8)},
            world=world_of({}, peer),
            shards=shards_of(snapshot, peer.index, len(ranks)),
            peers=peer,
        )
        for peer in ranks
    ]  # fmt: skip


def wanted(snapshot, ranks):
    """What each rank expects that is to hold its rows."""
    return [
        replace(
            expected_of(),
            shards=shards_of(snapshot, peer.index, len(ranks)),
            world=world_of({}, peer),
            peers=peer,
        )
        for peer in ranks
    ]


@pytest.fixture(scope="module")
def snapshot():
    return snapshot_of(run_of(2))


@pytest.fixture
def saved(snapshot, tmp_path):
    """By three ranks; the 8 rows of most parameters are 3, 3 and 2 of them."""
    on_each(lambda part: save(tmp_path / "run", part), shared_out(snapshot, peers(3)))
    return latest(tmp_path / "run")


# --- what is saved comes back, on any number of ranks -----------------------------------------


def test_one_process_reads_what_ranks_saved(snapshot, saved):
    loaded = load(saved, expected_of())
    assert loaded.random == {} and loaded.world["world_size"] == 3
    want = replace(snapshot, random={}, world=loaded.world)
    assert digests(loaded) == digests(want)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9])
def test_any_number_of_ranks_reads_what_three_saved(snapshot, saved, num_ranks):
    ranks = peers(num_ranks)
    want = shared_out(snapshot, ranks)
    got = on_each(lambda expected: load(saved, expected), wanted(snapshot, ranks))
    for one, other in zip(got, want, strict=True):
        random = other.random if num_ranks == 3 else {}
        assert digests(one) == digests(replace(other, random=random, world=one.world))


def test_ranks_read_what_one_process_saved(snapshot, tmp_path):
    folder, ranks = save(tmp_path, snapshot), peers(5)
    got = on_each(lambda expected: load(folder, expected), wanted(snapshot, ranks))
    for one, other in zip(got, shared_out(snapshot, ranks), strict=True):
        assert digests(one) == digests(replace(other, random={}, world=one.world))


def test_equal_copies_are_written_once(snapshot, tmp_path):
    def copy(peer):
        turns = {name: turn % 2 == peer.index for turn, name in enumerate(snapshot.parameters)}
        shards = {
            name: Shard(whole(tensor.shape), turns[name], turns[name])
            for name, tensor in snapshot.parameters.items()
        }
        return save(
            tmp_path, replace(snapshot, shards=shards, world=world_of({}, peer), peers=peer)
        )

    on_each(copy, peers(2))
    stored = [header(file).keys() for file in sorted(latest(tmp_path).glob("model*"))]
    assert len(stored) == 2 and not stored[0] & stored[1]
    assert stored[0] | stored[1] == snapshot.parameters.keys()
    got = load(latest(tmp_path), expected_of()).parameters
    assert all(torch.equal(got[name], tensor) for name, tensor in snapshot.parameters.items())


def header(file):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return {n: v for n, v in json.loads(data[8 : 8 + length]).items() if n != "__metadata__"}


def test_torch_reads_the_files_too(snapshot, saved):
    got = {name: torch.full_like(tensor, 9.0) for name, tensor in snapshot.parameters.items()}
    dcp.load(got, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(torch.equal(got[name], tensor) for name, tensor in snapshot.parameters.items())


def test_how_a_run_goes_on_is_said():
    one, two = {"world_size": 1, "mesh": None}, {"world_size": 2, "mesh": None}
    assert resumption(two, dict(two)) == "exact"
    assert resumption(two, one).startswith("functional: 2 ranks saved it, 1 go on")
    assert "mesh or placement" in resumption({**two, "mesh": {"('data',)": [2]}}, two)


# --- all or none, and all are told the same ----------------------------------------------------


def test_a_rank_that_does_not_come_is_named_and_nothing_is_published(snapshot, tmp_path):
    parts = shared_out(snapshot, peers(3, DEADLINE_S))
    start = time.monotonic()
    told = on_each(lambda part: save(tmp_path, part), parts[:2])
    assert time.monotonic() - start < 4 * DEADLINE_S
    assert {type(error) for error in told} == {MissingRankError}
    assert len({str(error) for error in told}) == 1 and "rank 2 of 3" in str(told[0])
    late = on_each(lambda part: save(tmp_path, part), parts[2:])
    assert "rank 2 of 3" in str(late[0]) and names(tmp_path) == [] and latest(tmp_path) is None


def test_a_rank_that_is_too_slow_is_named_and_nothing_is_published(snapshot, tmp_path, monkeypatch):
    parts, real = shared_out(snapshot, peers(3, DEADLINE_S)), disk.fsync
    slow = threading.local()

    def save_one(part):
        slow.is_here = part.peers.index == 1
        return save(tmp_path, part)

    def fsync(descriptor):
        time.sleep(2 * DEADLINE_S if getattr(slow, "is_here", False) else 0)
        real(descriptor)

    monkeypatch.setattr(disk, "fsync", fsync)
    told = on_each(save_one, parts)
    assert {type(error) for error in told} == {MissingRankError}, told
    assert len({str(error) for error in told}) == 1 and "rank 1 of 3" in str(told[0])
    assert latest(tmp_path) is None


def test_the_disk_of_one_rank_is_the_reason_of_all(snapshot, tmp_path, monkeypatch):
    fill_the_disk_of_rank_1(monkeypatch)
    told = on_each(lambda part: save(tmp_path, part), shared_out(snapshot, peers(3)))
    assert {str(error) for error in told} == {str(told[0])} and "No space left" in str(told[0])
    assert all(error.errno == 28 for error in told) and names(tmp_path) == []


def test_a_step_that_is_taken_is_refused_by_all(snapshot, saved):
    told = on_each(lambda part: save(saved.parent, part), shared_out(snapshot, peers(3)))
    assert {type(error) for error in told} == {FolderTakenError}


def test_ranks_at_two_instants_are_refused_by_all(snapshot, tmp_path):
    parts = shared_out(snapshot, peers(2))
    parts[1] = replace(parts[1], data={"epoch": 1, "next_window": 8})
    told = on_each(lambda part: save(tmp_path, part), parts)
    assert {str(e) for e in told} == {"ranks 0 and 1 are not at one instant: other data"}
    assert latest(tmp_path) is None


# --- beside training ---------------------------------------------------------------------------


def test_two_saves_of_one_step_do_not_mix_whichever_a_rank_begins_first(snapshot, tmp_path):
    """As when an anomaly is kept while the checkpoint of the same step is written in a thread."""
    ranks = peers(2)
    parts = shared_out(snapshot, ranks)
    others = [replace(part, data={"epoch": 1, "next_window": 8}) for part in parts]

    def both(part, other):
        is_first = part.peers.index == 0
        one, two = [(tmp_path / "a", part), (tmp_path / "b", other)][:: 1 if is_first else -1]
        with ThreadPoolExecutor(1) as executor:
            begun = executor.submit(save, *one)
            time.sleep(0.2)
            save(*two)
            begun.result()

    assert on_each(both, parts, others) == [None, None]
    for folder, part in (("a", parts[0]), ("b", others[0])):
        assert load(latest(tmp_path / folder), expected_of()).data == part.data


def test_an_error_in_the_background_is_raised_on_all_ranks_by_the_same_call(
    snapshot, tmp_path, monkeypatch
):
    fill_the_disk_of_rank_1(monkeypatch)

    def submitted(part):
        with BackgroundSaver(partial(save, tmp_path)) as saver:
            saver.submit(part)
            try:
                saver.submit(part)
            except OSError as error:
                return str(error)

    told = on_each(submitted, shared_out(snapshot, peers(3)))
    assert len(set(told)) == 1 and "No space left" in told[0] and names(tmp_path) == []


# --- damage ------------------------------------------------------------------------------------


def changed(file):
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", ["model", "optimizer", "random"])
@pytest.mark.parametrize("damage", [changed, lambda file: file.unlink()])
def test_damage_to_any_rank_is_refused_by_all_before_a_tensor_is_made(
    snapshot, saved, rank, kind, damage, monkeypatch
):
    file = next(saved.glob(f"{kind}-{rank:05d}*"))
    damage(file)
    wants = wanted(snapshot, peers(2))

    def empty(*arguments, **options):
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(torch, "empty", empty)
    told = on_each(lambda expected: load(saved, expected), wants)
    assert {type(error) for error in told} == {CheckpointError}
    assert len({str(error) for error in told}) == 1 and file.name in str(told[0])


def test_a_shard_that_lacks_a_row_is_refused(snapshot, saved):
    """As a rank would write it that lost rows, with hashes that are right."""
    state = saved / "state.json"
    content = json.loads(state.read_bytes())
    content["tensors"]["model-00002-of-00003.safetensors"]["norm.weight"][2] = [7]
    state.write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")
    hashed_again(saved, "state.json")
    told = on_each(lambda expected: load(saved, expected), wanted(snapshot, peers(2)))
    assert {str(e) for e in told} == {str(told[0])} and "does not hold all of norm" in str(told[0])


def test_another_tokenizer_is_refused_by_all(snapshot, saved):
    wants = [
        replace(e, identity={**IDENTITY, "tokenizer": "x"}) for e in wanted(snapshot, peers(2))
    ]
    told = on_each(lambda expected: load(saved, expected), wants)
    assert {type(e) for e in told} == {CheckpointError} and "tokenizer" in str(told[0])
    assert len({str(e) for e in told}) == 1
