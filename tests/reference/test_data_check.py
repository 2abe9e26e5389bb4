"""Evaluation text in the written shards is found, document by document."""

import os
import resource

import numpy as np
import pytest
from data_folders import write_folder
from prepared import lines, prepared, text_folder, texts

from reference.data import checking
from reference.data.checking import check_shards, distinct
from reference.data.contamination import ContaminationSettings
from reference.data.manifest import require_uncontaminated
from reference.data.policy import PackingPolicy
from reference.data.shards import open_documents
from reference.data.tokenizer import ByteTokenizer
from reference.data.work import Workers

LEAKED = b"one text that was held out and is trained on all the same, word by word, to its end"
OTHERS = [
    b"number %d of the texts that are trained on, none of them held out" % i for i in range(9)
]
HELD_OUT = [b"a text of which nothing was ever seen before in any of all those others", LEAKED]


@pytest.fixture
def folder(tmp_path):
    return text_folder(tmp_path / "source")


def checked(folder, train, **changed):
    splits = {"train": train, "validation": [[HELD_OUT]]}
    manifest = write_folder(folder / "data", splits, PackingPolicy(8))
    for name, (old, new) in changed.items():
        file = folder / "data" / "train" / f"{name}.bin"
        file.write_bytes(file.read_bytes().replace(old, new))
    return check_shards(
        folder, folder / "data", manifest.shards, ByteTokenizer(), "uint16",
        ContaminationSettings(), Workers(1), lambda _: None,
    )  # fmt: skip


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 1, 4), (1, 0, 9)])
def test_a_document_of_both_splits_is_found_in_whatever_shard_it_stands(place, tmp_path):
    source, shard, row = place
    train = [[OTHERS[:3], OTHERS[3:7]], [OTHERS[7:] + [b"x"] * 7]]
    found = checked(tmp_path / "apart", train)
    assert (found["num_shared_documents"], found["num_overlapping_documents"]) == (0, 0)
    train[source][shard] = [*train[source][shard][:row], LEAKED, *train[source][shard][row:]]
    found = checked(tmp_path / "leaked", train)
    assert (found["num_shared_documents"], found["num_overlapping_documents"]) == (1, 1)
    # The second row of the first source's validation shard, in the words of inspect and trace.
    assert found["worst"][0] == {"overlap": 1.0, "source": 0, "file": "file 3", "row": 1}
    assert [one["overlap"] for one in found["worst"]] == [1.0, 0.0]
    assert found["overlaps"] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_pieces_of_any_size_hold_every_document(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "PIECE_TOKENS", 100)
    found = checked(tmp_path, [[OTHERS, [*OTHERS, LEAKED]]])
    assert (found["num_train_documents"], found["num_validation_documents"]) == (19, 2)
    assert found["num_shared_documents"] == 1


def test_text_that_does_not_come_back_from_a_shard_is_counted(tmp_path):
    changed = {"shard-00000": (b"n\0u\0m\0", b"s\0u\0m\0")}
    found = checked(tmp_path, [[OTHERS]], **changed)
    assert found["num_decoded_differently"] == 9


def test_a_skipped_check_is_unfinished_and_training_would_refuse(folder, tmp_path):
    manifest = prepared(tmp_path / "out", folder, check_contamination=False)
    with pytest.raises(ValueError, match="contamination check is 'unfinished'"):
        require_uncontaminated(tmp_path / "out", manifest)
    require_uncontaminated(tmp_path / "all", prepared(tmp_path / "all", folder))


def test_quoted_text_is_counted_as_overlap(tmp_path):
    own = texts(60, num_words=60)
    quoting = [f"{text} {own[i]}" for i, text in enumerate(texts(60, seed=1, num_words=60))]
    (tmp_path / "rows.jsonl").write_bytes(lines({"text": text} for text in [*own, *quoting]))
    manifest = prepared(tmp_path / "out", tmp_path / "rows.jsonl")
    found = manifest.contamination
    splits = {}
    for shard in manifest.shards:
        for row in open_documents(tmp_path / "out", shard)["row"].to_pylist():
            splits[row] = shard.split
    torn = [i for i in range(60) if splits[i] != splits[60 + i]]
    whole = [i for i in torn if splits[i] == "validation"]  # all of its text is quoted in training
    assert whole and found["overlaps"][-1] == len(whole)
    half = len(torn) - len(whole)  # 48 of its 108 runs are those of the text in training
    assert sum(found["overlaps"][4:5]) == half
    assert found["num_shared_documents"] == 0 and found["num_decoded_differently"] == 0


def test_runs_of_many_pieces_are_merged_range_by_range(tmp_path):
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, 2**64, 5_000, np.uint64, endpoint=False)
    edges = np.array([0, 2**58 - 1, 2**58, 2**64 - 1], np.uint64)
    parts = [np.unique(np.concatenate([edges, drawn[k : k + 2_000]])) for k in (0, 1_000, 3_000)]
    files = [tmp_path / f"{number}.npy" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        np.save(file, part)
    ranges = list(distinct(files))
    assert max(map(len, ranges)) < 200
    assert np.array_equal(np.concatenate(ranges), np.unique(np.concatenate(parts)))
    assert not sum(map(len, distinct([])))


def test_there_may_be_more_pieces_than_a_process_may_open(tmp_path):
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = [tmp_path / f"{number}.npy" for number in range(100)]
    for number, file in enumerate(files):
        np.save(file, np.array([number], np.uint64))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        found = np.concatenate(list(distinct(files)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert found.tolist() == list(range(100))
