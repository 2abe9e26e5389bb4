"""Window and Microbatch: shapes are checked, splitting and trimming lose nothing by accident."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.loss import NO_TARGET
from reference.window import Microbatch, Window


def microbatch(num_rows=3, num_tokens=4, documents=True, num_bytes=None):
    shape = (num_rows, num_tokens)
    ids = torch.arange(num_rows * num_tokens).view(shape)
    labels = ids.clone()
    labels[:, -1] = NO_TARGET
    places = torch.arange(num_tokens).expand(shape)
    owners = torch.arange(num_rows).int()[:, None].expand(shape) if documents else None
    return Microbatch(ids, labels, places, owners, num_bytes)


def test_counts_are_of_positions_and_of_labels():
    window = Window((microbatch(3), microbatch(2)))
    assert (window.num_rows, window.num_tokens, window.num_targets) == (5, 20, 15)


@pytest.mark.parametrize("name", ["labels", "positions", "documents"])
def test_differing_shapes_are_refused(name):
    good = microbatch()
    fields = {
        "input_ids": good.input_ids,
        "labels": good.labels,
        "positions": good.positions,
        "documents": good.documents,
    }
    fields[name] = fields[name][:, :-1]
    with pytest.raises(ValueError, match=rf"Microbatch\.{name} has shape"):
        Microbatch(**fields)


def test_one_dimension_is_refused():
    row = torch.arange(4)
    with pytest.raises(ValueError, match=r"must be \[rows, tokens\]"):
        Microbatch(row, row, row)


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="at least one Microbatch"):
        Window(())


@given(num_rows=st.integers(1, 12), data=st.data())
def test_a_split_keeps_all_rows_in_order_and_nearly_equal(num_rows, data):
    k = data.draw(st.integers(1, num_rows))
    window = Window((microbatch(num_rows),))
    parts = window.split(k).microbatches
    counts = [part.num_rows for part in parts]
    assert len(parts) == k and max(counts) - min(counts) <= 1
    for name in ("input_ids", "labels", "positions", "documents"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(window.microbatches[0], name))


def test_a_split_goes_across_microbatches():
    window = Window((microbatch(3), microbatch(2))).split(1)
    assert [m.num_rows for m in window.microbatches] == [5]


@pytest.mark.parametrize("k", [0, -1, 4])
def test_a_split_into_more_parts_than_rows_is_refused(k):
    with pytest.raises(ValueError, match="cannot be split into"):
        Window((microbatch(3),)).split(k)


def test_rows_of_different_lengths_do_not_split():
    with pytest.raises(ValueError, match=r"different lengths \[4, 5\]"):
        Window((microbatch(2, 4), microbatch(2, 5))).split(2)


def test_documents_for_some_microbatches_only_do_not_split():
    with pytest.raises(ValueError, match="documents are given for some"):
        Window((microbatch(), microbatch(documents=False))).split(2)


def test_the_bytes_of_a_part_are_not_made_up():
    window = Window((microbatch(4, num_bytes=12),))
    assert window.split(1).microbatches[0].num_bytes == 12
    assert [m.num_bytes for m in window.split(2).microbatches] == [None, None]


@given(kept=st.integers(0, 15))
def test_trim_keeps_the_first_targets_and_every_input(kept):
    window = Window((microbatch(3), microbatch(2)))
    trimmed = window.trim(kept)
    targets, left = (
        torch.cat([m.labels[m.labels != NO_TARGET] for m in each.microbatches])
        for each in (window, trimmed)
    )
    assert torch.equal(left, targets[:kept])
    assert trimmed.num_tokens == window.num_tokens
    for old, new in zip(window.microbatches, trimmed.microbatches, strict=True):
        assert torch.equal(old.input_ids, new.input_ids)


def test_trim_leaves_the_original_alone():
    window = Window((microbatch(),))
    window.trim(1)
    assert window.num_targets == 9


@pytest.mark.parametrize("kept", [-1, 10])
def test_trim_to_more_than_there_is_is_refused(kept):
    with pytest.raises(ValueError, match="cannot trim a window of 9 targets"):
        Window((microbatch(),)).trim(kept)


def test_to_moves_every_tensor():
    moved = Window((microbatch(), microbatch(documents=False))).to("meta")
    for part in moved.microbatches:
        tensors = (part.input_ids, part.labels, part.positions, part.documents)
        assert {t.device.type for t in tensors if t is not None} == {"meta"}


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
def test_shares_together_are_the_rows_of_the_window(num_shares):
    window = rows_of([[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10]], [[11, 12], [13, 14], [15, 16]])
    shares = [window.share(index, num_shares) for index in range(num_shares)]
    assert {len(share.microbatches) for share in shares} == {3}
    dealt = {}
    for index, share in enumerate(shares):
        rows = [r for m in share.microbatches for r in m.rows(0, m.num_rows).input_ids.tolist()
                if int((m.labels != NO_TARGET).sum())]  # fmt: skip
        dealt |= {index + num_shares * place: row for place, row in enumerate(rows)}
    assert [dealt[index] for index in range(8)] == [[2 * i + 1, 2 * i + 2] for i in range(8)]
    assert sum(share.num_targets for share in shares) == window.num_targets
    assert sum(share.num_tokens for share in shares) == window.num_tokens


def test_a_share_without_a_row_goes_through_one_and_reads_nothing():
    share = rows_of([[1, 2], [3, 4]]).share(2, 3)
    assert share.microbatches[0].input_ids.tolist() == [[1, 2]]
    for same in (share, share.to("cpu"), share.trim(0), share.split(1)):
        assert (same.num_rows, same.num_targets, same.num_tokens) == (1, 0, 0)


def test_rows_that_are_read_and_one_that_is_not_are_not_mixed():
    share = rows_of([[1, 2], [3, 4]], [[5, 6]]).share(1, 2)
    with pytest.raises(ValueError, match="split the window and share it out afterwards"):
        share.split(1)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_share_that_does_not_exist_is_refused(index):
    with pytest.raises(ValueError, match="does not exist"):
        rows_of([[1, 2]]).share(index, 2)


def rows_of(*microbatches):
    """A window in which every token is a target."""
    ids = [torch.tensor(rows) for rows in microbatches]
    return Window(tuple(Microbatch(i, i, torch.arange(2).expand_as(i)) for i in ids))
