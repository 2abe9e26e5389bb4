"""Packing, shuffling and windows, by hand; the properties for all inputs are gate m1_packing."""

from dataclasses import replace

import pytest
import torch

from reference.data.batches import batches, shuffle
from reference.data.labels import make_labels
from reference.data.pack import Rows, one_document_a_row, pack


def documents(*lengths: int) -> list[torch.Tensor]:
    """Documents of these lengths whose tokens count on from 10."""
    starts = [10 + sum(lengths[:index]) for index in range(len(lengths))]
    return [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]


def test_pack_by_hand():
    rows = pack(documents(3, 4), row_tokens=4, tail="pad")
    assert rows.tokens.tolist() == [[10, 11, 12, 13, 14], [14, 15, 16, 16, 16]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, -1, -1]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert rows.num_rows == 2 and rows.row_tokens == 4
    dtypes = (rows.tokens.dtype, rows.documents.dtype, rows.positions.dtype)
    assert dtypes == (torch.int64, torch.int32, torch.int64)


def test_drop_leaves_out_the_last_targets():
    rows = pack(documents(3, 4), row_tokens=4, tail="drop")
    assert rows.tokens.tolist() == [[10, 11, 12, 13, 14]]


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_stream_that_fills_its_rows_has_no_tail(tail):
    rows = pack(documents(4, 5), row_tokens=4, tail=tail)
    assert rows.tokens.tolist() == [[10, 11, 12, 13, 14], [14, 15, 16, 17, 18]]
    assert (rows.documents >= 0).all()


def test_one_token_alone_is_kept_without_a_target():
    rows = pack(documents(1), row_tokens=2, tail="pad")
    assert rows.documents.tolist() == [[0, -1, -1]]


def test_an_empty_document_takes_no_room_and_keeps_its_number():
    rows = pack(documents(2, 0, 1), row_tokens=2, tail="pad")
    assert rows.documents.tolist() == [[0, 0, 2]]


@pytest.mark.parametrize(
    ("given", "row_tokens", "tail", "message"),
    [
        ([], 4, "pad", "no documents"),
        (documents(0, 0), 4, "pad", "no row"),
        (documents(3), 4, "drop", "no row"),
        (documents(3), 0, "pad", "row_tokens is 0"),
        (documents(3), 4, "fold", "pad, drop"),
        ([torch.zeros(2, 2).long()], 4, "pad", "document 1"),
        ([torch.zeros(2).int()], 4, "pad", "int32"),
    ],
)
def test_bad_requests_say_what_is_wrong(given, row_tokens, tail, message):
    with pytest.raises(ValueError, match=message):
        pack(given, row_tokens, tail)


def test_one_document_a_row_by_hand():
    rows = one_document_a_row(documents(2, 4), row_tokens=3, num_bytes=[1, 3])
    assert rows.tokens.tolist() == [[10, 11, 11, 11], [12, 13, 14, 15]]
    assert rows.documents.tolist() == [[0, 0, -1, -1], [1, 1, 1, 1]]
    assert rows.positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    labels = make_labels(rows.tokens, rows.documents, "inside")
    assert labels.tolist() == [[11, -100, -100, -100], [13, 14, 15, -100]]


@pytest.mark.parametrize("length", [0, 5])
def test_a_document_that_does_not_fit_a_row_of_its_own_is_refused(length):
    with pytest.raises(ValueError, match=f"document 2 has {length} tokens"):
        one_document_a_row(documents(2, length), row_tokens=3)


def test_sizes_for_other_documents_are_refused():
    with pytest.raises(ValueError, match="1 sizes for 2"):
        one_document_a_row(documents(2, 2), row_tokens=3, num_bytes=[1])


def test_rows_of_different_shapes_are_refused():
    rows = pack(documents(9), row_tokens=4, tail="pad")
    with pytest.raises(ValueError, match=r"Rows\.positions"):
        replace(rows, positions=rows.positions[:1])
    with pytest.raises(ValueError, match=r"Rows\.num_bytes"):
        replace(rows, num_bytes=torch.zeros(9))
    with pytest.raises(ValueError, match=r"Rows\.tokens"):
        Rows(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 1))


def test_shuffle_is_a_permutation_that_changes_with_seed_and_epoch():
    orders = [shuffle(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert shuffle(50, 0, 1).tolist() == orders[1]


def test_shuffle_takes_a_negative_seed_but_no_negative_epoch():
    assert sorted(shuffle(3, -5, 0).tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match="epoch -1"):
        shuffle(3, 0, -1)


def test_batches_keep_the_order_and_every_rest():
    rows = pack(documents(57), row_tokens=4, tail="pad")  # 14 rows
    order = shuffle(14, 0, 0)
    windows = list(batches(rows, order, make_labels, "inside", 3, 2))
    sizes = [[microbatch.num_rows for microbatch in window.microbatches] for window in windows]
    assert sizes == [[3, 3], [3, 3], [2]]
    microbatches = [microbatch for window in windows for microbatch in window.microbatches]
    inputs = torch.cat([microbatch.input_ids for microbatch in microbatches])
    labels = torch.cat([microbatch.labels for microbatch in microbatches])
    assert torch.equal(inputs, rows.tokens[order, :-1])
    assert torch.equal(labels, rows.tokens[order, 1:])  # one document: all targets
    assert sum(window.num_targets for window in windows) == 56


def test_batches_carry_the_bytes_of_the_source():
    rows = one_document_a_row(documents(2, 4, 3), row_tokens=3, num_bytes=[10, 20, 40])
    (window,) = batches(rows, torch.tensor([2, 0, 1]), make_labels, "inside", 2, 2)
    assert [microbatch.num_bytes for microbatch in window.microbatches] == [50, 20]


@pytest.mark.parametrize(
    ("order", "rows_per_microbatch", "per_window", "message"),
    [
        ([0], 0, 1, "rows_per_microbatch is 0"),
        ([0], 1, 0, "microbatches_per_window is 0"),
        ([2], 1, 1, "rows 2 to 2 of 2"),
        ([-1], 1, 1, "rows -1 to -1 of 2"),
        ([], 1, 1, "at least one row"),
    ],
)
def test_batches_refuse_at_the_call(order, rows_per_microbatch, per_window, message):
    rows = pack(documents(9), row_tokens=4, tail="pad")
    with pytest.raises(ValueError, match=message):
        batches(rows, torch.tensor(order), make_labels, "inside", rows_per_microbatch, per_window)
