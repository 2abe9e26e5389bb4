"""Windows of a folder are those that `pack` makes of its documents, and can be traced back."""

import tempfile
from itertools import pairwise, product

import pytest
import torch
from data_folders import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.data.account import account
from reference.data.labels import make_labels
from reference.data.manifest import DataError
from reference.data.pack import pack
from reference.data.policy import CHOICES, PackingPolicy, apply_policy
from reference.data.tokenizer import ByteTokenizer
from reference.data.windows import SplitWindows
from reference.loss import NO_TARGET

BYTES = ByteTokenizer()
# Nothing but EOS, one token and EOS, a window exactly (T = 7), several windows.
TEXTS = [b"", b"a", b"abcdef", b"0123456", b"ABCDEFGHIJKLMNOPQRSTU", b"", b"the end"]
SHARDS = [TEXTS[:3], TEXTS[3:4], TEXTS[4:]]
OTHER = [[b"another source, in a shard of its own"]]


def split_of(directory, policy, sources=(SHARDS,)):
    manifest = write_folder(
        directory, {"train": list(sources), "validation": [[[b"held out"]]]}, policy
    )
    return SplitWindows(directory, manifest, "train")


@pytest.mark.parametrize("tail", CHOICES["tail"])
@pytest.mark.parametrize("window_tokens", [1, 4, 7, 8, 40, 200])
def test_windows_of_a_folder_are_packed_rows(tmp_path, tail, window_tokens):
    if window_tokens == 200 and tail == "drop":
        return
    windows = split_of(tmp_path, PackingPolicy(window_tokens, tail=tail))
    want = pack(BYTES.encode_documents(TEXTS), window_tokens, tail)
    got = windows.read(torch.arange(windows.num_windows))
    for name in ("tokens", "documents", "positions"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_sources_have_streams_of_their_own(tmp_path):
    windows = split_of(tmp_path, PackingPolicy(7, tail="pad"), (SHARDS, OTHER))
    assert windows.sources == [0, 1] and windows.first_windows[1] == len(windows.targets[0])
    own = windows.read(torch.arange(windows.first_windows[1], windows.num_windows))
    want = pack(BYTES.encode_documents(OTHER[0]), 7, "pad")
    assert torch.equal(own.tokens, want.tokens)
    assert own.documents.max() == len(TEXTS)  # numbered through the split


@pytest.mark.parametrize("tail", CHOICES["tail"])
def test_a_window_is_traced_to_its_documents(tmp_path, tail):
    windows = split_of(tmp_path, PackingPolicy(11, tail=tail), (SHARDS, OTHER))
    texts = {
        (f"file {n}", row): t for n, s in enumerate([*SHARDS, *OTHER]) for row, t in enumerate(s)
    }
    rows = windows.read(torch.arange(windows.num_windows))
    for number in range(windows.num_windows):
        traced = []
        for piece in windows.locate(number):
            text = texts[piece.document.file, piece.document.row]
            assert (piece.document.num_bytes, piece.document.split) == (len(text), "train")
            tokens = BYTES.encode_document(text).tolist()
            traced += tokens[piece.first_token :][: piece.stop - piece.start]
        real = rows.documents[number] >= 0
        assert traced == rows.tokens[number][real].tolist()


def test_what_is_repeated_is_said_to_be(tmp_path):
    windows = split_of(tmp_path, PackingPolicy(60, tail="wrap"))
    pieces = windows.locate(windows.num_windows - 1)
    assert [piece.is_again for piece in pieces] == sorted(piece.is_again for piece in pieces)
    assert pieces[-1].is_again and pieces[-1].stop == 61


LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 8, 9, 15, 30]), min_size=1, max_size=7)


@given(
    lengths=LENGTHS.filter(any),
    window_tokens=st.integers(1, 9),
    words=st.sampled_from(list(product(*(CHOICES[k] for k in ("eos", "boundary", "tail"))))),
)
@settings(max_examples=300, deadline=None)
def test_the_account_is_that_of_the_labels(lengths, window_tokens, words):
    policy = PackingPolicy(window_tokens, eos=words[0], boundary=words[1], tail=words[2])
    documents = [torch.tensor([*range(n - 1), 256][-n:] if n else []).long() for n in lengths]
    said = account(lengths, policy)
    assert said.num_missing == 0 and said.num_tokens == sum(lengths)
    if said.num_rows == 0:
        assert said.num_targets == 0
        return
    rows = pack(documents, window_tokens, policy.tail)
    labels = apply_policy(rows, policy, 256, make_labels).labels
    assert int((labels != NO_TARGET).sum()) == said.num_targets
    assert int((rows.documents < 0).sum()) == said.num_padding
    assert rows.num_rows == said.num_rows


@given(
    shards=st.lists(st.lists(st.integers(0, 18), min_size=1, max_size=5), min_size=1, max_size=3),
    window_tokens=st.integers(1, 12),
    tail=st.sampled_from(CHOICES["tail"]),
)
@settings(max_examples=40, deadline=None)
def test_any_documents_in_any_shards_are_packed_rows(shards, window_tokens, tail):
    texts = [[bytes(range(length)) for length in lengths] for lengths in shards]
    whole = [text for part in texts for text in part]
    policy = PackingPolicy(window_tokens, tail=tail, boundary="predict")
    if not account([len(text) + 1 for text in whole], policy).num_targets:
        return
    want = pack(BYTES.encode_documents(whole), window_tokens, tail)
    with tempfile.TemporaryDirectory() as folder:
        windows = split_of(folder, policy, (texts,))
        got = windows.read(torch.arange(windows.num_windows))
        traced = [windows.locate(number) for number in range(windows.num_windows)]
    for name in ("tokens", "documents", "positions"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for row, pieces in enumerate(traced):
        assert pieces[-1].stop == int((got.documents[row] >= 0).sum())
        assert all(a.stop == b.start for a, b in pairwise(pieces))


def test_a_split_without_a_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no window of 500 tokens in train has a target"):
        split_of(tmp_path, PackingPolicy(500))


def test_a_window_that_is_not_there_is_refused(tmp_path):
    windows = split_of(tmp_path, PackingPolicy(7))
    for number in (-1, windows.num_windows):
        with pytest.raises(ValueError, match=f"no window {number}; there are"):
            windows.read(torch.tensor([number]))
        with pytest.raises(ValueError, match=f"no window {number}"):
            windows.locate(number)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_tokens": 0}, "whole number >= 1, got 0"),
        ({"window_tokens": 2.0}, "whole number >= 1, got 2.0"),
        ({"tail": "fold"}, "no tail policy 'fold'; choose one of drop, pad, wrap"),
        ({"eos": "drop"}, "no eos policy 'drop'"),
    ],
)
def test_a_policy_that_is_none_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PackingPolicy(**{"window_tokens": 8, **fields})


def test_a_policy_goes_through_json():
    policy = PackingPolicy(8, tail="wrap", eos="ignore", positions="continue")
    assert PackingPolicy.from_json(policy.to_json()) == policy
    with pytest.raises(ValueError, match="a packing policy has attention, boundary, eos"):
        PackingPolicy.from_json({"window_tokens": 8})


def test_rows_of_another_length_than_the_policy_says_are_refused():
    rows = pack(BYTES.encode_documents(TEXTS), 7, "pad")
    with pytest.raises(ValueError, match="rows of 7 inputs, the policy has windows of 8"):
        apply_policy(rows, PackingPolicy(8), 256, make_labels)


def test_a_shard_whose_table_is_of_other_tokens_is_refused(tmp_path):
    manifest = write_folder(tmp_path, {"train": [SHARDS], "validation": []}, PackingPolicy(7))
    tables = [tmp_path / shard.documents_file for shard in manifest.shards[:2]]
    tables[0].write_bytes(tables[1].read_bytes())
    with pytest.raises(DataError, match="does not cover the"):
        SplitWindows(tmp_path, manifest, "train")
