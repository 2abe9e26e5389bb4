"""Ranks keep an update that went wrong with the windows of all, and one process runs it again.

Some ranks are threads with a store in memory: what they say to each other is what processes say.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import names, on_each, peers, run_of, snapshot_of
from launched_ranks import launched

from reference.anomaly import NOT_FINITE, Anomaly, keep, read
from reference.checkpoint import FolderTakenError, MissingRankError, disk, latest, save
from reference.checkpoint.shards import Shard, whole, world_of
from reference.checkpoint.temporary import temporary_name
from reference.train_command import main
from reference.window import Microbatch, Window

ANOMALY = Anomaly(NOT_FINITE, "a reason", float("nan"), 2.0)
PARTS = ("input_ids", "labels", "positions", "documents")


# --- two processes, as the launcher starts them ------------------------------------------------


def replayed(capsys, folder):
    """(exit status, loss, norm, which tensor was not finite first, without its microbatch)."""
    capsys.readouterr()
    status = main(["replay", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    words = next(line for line in lines if line.startswith("loss ")).split()
    first = [line.partition("finite first: ")[2] for line in lines if "finite first" in line]
    place = first[0].partition(":")[0].rpartition(", ")[2] if first else ""
    return status, float(words[1]), float(words[9]), place, lines


def rows_of(window):
    return sorted(
        tuple(part[row].tolist() for part in (m.input_ids, m.labels, m.positions))
        for m in window.microbatches for row in range(m.num_rows)
    )  # fmt: skip


# A rate at which the gradients of the second update overflow.
OVERFLOWS = ["--corpus", "python-docs", "--corpus-bytes", "60000", "--row-tokens", "32",
             "--updates", "3", "--learning-rate", "1e25"]  # fmt: skip


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert main([*OVERFLOWS, "--checkpoints", str(folder)]) == 0
    (kept,) = folder.glob("anomaly-*")
    return kept


@pytest.mark.parametrize("name", ["reference", "ddp", "fsdp2"])
def test_two_ranks_keep_what_one_process_keeps_and_it_replays_alike(
    name, of_one_process, tmp_path, capsys
):
    ran = launched(*OVERFLOWS, "--checkpoints", tmp_path, "--distribute", name)
    assert ran.returncode == 0, ran.stderr
    (kept,) = tmp_path.glob("*anomaly-*")
    assert kept.name == of_one_process.name
    one, two = read(of_one_process), read(kept)
    assert rows_of(two.window) == rows_of(one.window)
    assert two.anomaly.loss_nats == pytest.approx(one.anomaly.loss_nats, rel=1e-5)
    status, loss, _, place, _ = replayed(capsys, of_one_process)
    got = replayed(capsys, kept)
    assert got[0] == status == 1 and got[3] == place != ""
    assert got[1] == pytest.approx(loss, rel=1e-5)
    assert got[1] == pytest.approx(two.anomaly.loss_nats, rel=1e-5)
    assert "kept by 2 ranks" in "\n".join(got[4])


FULL = """
import os
from reference.checkpoint import disk
from reference.train_command import main
real = disk.create
def create(path):
    if os.environ["RANK"] == "1" and "window-" in path.name:
        raise OSError(28, "No space left on device")
    return real(path)
disk.create = create
raise SystemExit(main())
"""


def test_a_disk_of_one_rank_that_is_full_ends_both_with_the_same_error(tmp_path):
    program = tmp_path / "full.py"
    program.write_text(FULL)
    start = time.monotonic()
    ran = launched(*OVERFLOWS, "--checkpoints", tmp_path / "run", program=[program])
    assert time.monotonic() - start < 120
    assert ran.returncode != 0
    errors = {line for line in ran.stderr.splitlines() if line.startswith("error: ")}
    assert len(errors) == 1, ran.stderr
    assert "anomaly-0000000" in str(errors) and "No space left on device" in str(errors)
    assert not list((tmp_path / "run").glob("*anomaly-*"))


# --- threads -----------------------------------------------------------------------------------


def copies(ranks):
    """The same state on every rank, which take turns to write it."""
    snapshot = snapshot_of(run_of(2))

    def of_rank(peer):
        turns = {name: turn % len(ranks) == peer.index
                 for turn, name in enumerate(snapshot.parameters)}  # fmt: skip
        shards = {name: Shard(whole(tensor.shape), turns[name], turns[name])
                  for name, tensor in snapshot.parameters.items()}  # fmt: skip
        return replace(snapshot, shards=shards, world=world_of({}, peer), peers=peer)

    return [of_rank(peer) for peer in ranks]


def windows(num_ranks):
    """For each rank two microbatches; in all of them no token is like another."""
    ids = torch.arange(num_ranks * 2 * 6).view(num_ranks, 2, 2, 3)
    return [
        Window(tuple(Microbatch(part, part + 100, part + 200, (part + 300).int()) for part in rank))
        for rank in ids
    ]


def kept_by(folder, num_ranks=3, deadline_s=30.0, num_coming=None):
    arguments = copies(peers(num_ranks, deadline_s)), windows(num_ranks)
    return on_each(
        lambda before, window: keep(folder, before, window, ANOMALY, save),
        *(each[:num_coming] for each in arguments),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_windows_of_all_ranks_are_kept_in_rank_order(num_ranks, tmp_path):
    assert kept_by(tmp_path / "anomaly-00000002", num_ranks) == [None] * num_ranks
    kept = read(tmp_path / "anomaly-00000002")
    want = [m for window in windows(num_ranks) for m in window.microbatches]
    assert kept.num_microbatches == (2,) * num_ranks
    for got, microbatch in zip(kept.window.microbatches, want, strict=True):
        for part in PARTS:
            assert torch.equal(getattr(got, part), getattr(microbatch, part))
    assert latest(tmp_path / "anomaly-00000002").name == "step-00000002"


def test_rows_that_stand_in_for_those_of_other_ranks_are_not_kept(tmp_path):
    """Three ranks share two microbatches of two rows, so that one has no row in each."""
    window = Window(
        tuple(Microbatch(m := torch.arange(6 * n, 6 * n + 6).view(2, 3), m, m) for n in (0, 1))
    )
    shares = [window.share(rank, 3) for rank in range(3)]
    on_each(
        lambda before, share: keep(tmp_path / "anomaly-00000002", before, share, ANOMALY, save),
        copies(peers(3)), shares,
    )  # fmt: skip
    kept = read(tmp_path / "anomaly-00000002")
    assert kept.num_microbatches == (2, 1, 1)
    assert rows_of(kept.window) == rows_of(window)
    assert kept.window.num_tokens == sum(share.num_tokens for share in shares) == 12


@pytest.mark.parametrize(
    "file", ["model-00001", "random-00002", "window-00000", "window-00002", "anomaly.json"]
)
def test_what_one_rank_cannot_write_is_the_reason_of_all_and_nothing_is_left(
    file, tmp_path, monkeypatch
):
    real = disk.create

    def create(path):
        if path.name.startswith(file):
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(disk, "create", create)
    told = kept_by(tmp_path / "anomaly-00000002")
    assert len({str(error) for error in told}) == 1 and {error.errno for error in told} == {28}
    assert "cannot keep" in str(told[0]) and "No space left" in str(told[0])
    assert names(tmp_path) == []


def test_a_rank_that_does_not_come_is_named_and_nothing_is_left(tmp_path):
    told = kept_by(tmp_path / "anomaly-00000002", deadline_s=0.5, num_coming=2)
    assert {type(error) for error in told} == {MissingRankError}
    assert "rank 2 of 3" in str(told[0]) and names(tmp_path) == []


def test_a_folder_that_is_there_is_refused_by_all_and_stays(tmp_path):
    kept_by(tmp_path / "anomaly-00000002")
    report = (tmp_path / "anomaly-00000002" / "anomaly.json").read_bytes()
    told = kept_by(tmp_path / "anomaly-00000002")
    assert {type(error) for error in told} == {FolderTakenError}
    assert (tmp_path / "anomaly-00000002" / "anomaly.json").read_bytes() == report
    assert names(tmp_path) == ["anomaly-00000002"]


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-4])


def changed(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", [Path.unlink, cut_short, changed])
def test_a_window_of_any_rank_that_is_not_what_was_kept_is_refused(damage, rank, tmp_path):
    kept_by(tmp_path / "anomaly-00000002", 2)
    damage(tmp_path / "anomaly-00000002" / f"window-{rank:05d}-of-00002.safetensors")
    with pytest.raises(ValueError, match="is no kept anomaly"):
        read(tmp_path / "anomaly-00000002")


def test_a_state_that_was_saved_otherwise_than_it_was_is_seen(tmp_path, capsys):
    """As a save would leave it that loses the moments."""

    def loses(root, snapshot, *keep_last):
        return save(root, replace(snapshot, optimizer={}), *keep_last)

    folder = tmp_path / "anomaly-00000002"
    on_each(
        lambda before, window: keep(folder, before, window, ANOMALY, loses),
        copies(peers(2)), windows(2),
    )  # fmt: skip
    with pytest.raises(SystemExit):
        main(["replay", str(folder)])
    assert "optimizer" in capsys.readouterr().err


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    left = temporary_name(tmp_path / "anomaly-00000001")
    left.mkdir()
    (left / "window.safetensors").write_bytes(b"half")
    kept_by(tmp_path / "anomaly-00000002", 2)
    assert names(tmp_path) == ["anomaly-00000002"]
