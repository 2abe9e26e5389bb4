"""Windows know the next window that nobody has had."""

import pytest
import torch

from reference.data.pack import Rows
from reference.data.training_text import Windows

NUM_WINDOWS = 17  # three epochs of 5 windows (the fifth one short) and 2 windows more


def rows(first=0):
    tokens = (first + torch.arange(27))[:, None].expand(27, 4).contiguous()
    return Rows(tokens, torch.zeros(27, 4, dtype=torch.int32), torch.arange(4).repeat(27, 1))


def windows(seed=1, **others):
    return Windows(rows(), seed, NUM_WINDOWS, 3, 2, **others)


def ids(source):
    return [[int(row) for m in w.microbatches for row in m.input_ids[:, 0]] for w in source]


def test_the_state_is_the_next_window_that_was_not_handed_out():
    whole = ids(windows())
    assert len(whole) == NUM_WINDOWS
    for num_taken in range(NUM_WINDOWS + 1):
        first, second = windows(), windows()
        going = iter(first)
        head = [next(going) for _ in range(num_taken)]
        second.load_state_dict(first.state_dict())
        assert len(second) == NUM_WINDOWS - num_taken
        assert ids(head) + ids(second) == whole


def test_a_position_can_be_taken_again_and_again():
    whole, state, seen = ids(windows()), windows().state_dict(), []
    for num_taken in (3, 1, 2, 1, 6, 4):
        source = windows()
        source.load_state_dict(state)
        going = iter(source)
        seen += ids([next(going) for _ in range(num_taken)])
        state = source.state_dict()
    assert seen == whole


def test_the_end_of_an_epoch_is_the_start_of_the_next_one():
    source = windows()
    going = iter(source)
    for _ in range(5):
        next(going)
    state = source.state_dict()
    assert (state["epoch"], state["window"]) == (1, 0)


def test_a_pass_begins_at_the_loaded_position_however_often():
    source = windows()
    list(source)
    source.load_state_dict({**source.state_dict(), "epoch": 3, "window": 0})
    assert ids(source) == ids(source) == ids(windows())[15:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed 2, here 1"),
        ({"num_rows": 26}, "num_rows 26, here 27"),
        ({"rows_sha256": "0"}, "rows_sha256 0, here "),
        ({"rows_per_microbatch": 6}, "rows_per_microbatch 6, here 3"),
        ({"epoch": 1, "window": 5}, "no window 5 of epoch 1: an epoch has 5"),
        ({"epoch": 3, "window": 3}, "no window 3 of epoch 3"),
        ({"epoch": -1}, "no window"),
        ({"window": True}, "must be whole numbers"),
        ({"row": 1}, "a position has epoch, window, seed"),
    ],
)
def test_a_position_in_other_windows_is_refused(change, message):
    source = windows()
    with pytest.raises(ValueError, match=message):
        source.load_state_dict({**source.state_dict(), **change})
    assert len(source) == NUM_WINDOWS


def test_other_rows_have_another_hash():
    assert Windows(rows(), 0, 1).rows_sha256 != Windows(rows(1), 0, 1).rows_sha256
