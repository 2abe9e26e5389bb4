"""The loader of a folder: an exact position, refusals by name, and no waiting that is not seen."""

import json
import time
from itertools import islice
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch
from data_folders import write_folder

from reference.data.loader import AHEAD_PER_WORKER, Loader, LoaderSettings
from reference.data.order import Interleaving, buffered_shuffle
from reference.data.policy import PackingPolicy
from reference.data.windows import SplitWindows
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
SOURCES = [
    [[b"a document of the first source", b"", b"and another"], [b"in a second shard " * 9]],
    [[b"of the second source " * 5, b"x"]],
]


@pytest.fixture
def windows(tmp_path):
    folder = {"train": SOURCES, "validation": [[[b"held out"]]]}
    manifest = write_folder(tmp_path, folder, PackingPolicy(9, tail="pad"))
    return SplitWindows(tmp_path, manifest, "train")


def loader(windows, **fields):
    sizes = {"seed": 1, "num_updates": 20, "rows_per_microbatch": 2, "microbatches_per_window": 2}
    return Loader(windows, LoaderSettings(**{**sizes, **fields}), STACK)


def inputs(window):
    return torch.cat([microbatch.input_ids for microbatch in window.microbatches])


def same(mine, theirs):
    return all(torch.equal(inputs(a), inputs(b)) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_pass_is_the_same_for_any_number_of_workers(windows, num_workers):
    assert same(loader(windows, num_workers=0), loader(windows, num_workers=num_workers))


def test_each_update_says_what_the_order_says(windows):
    one = loader(windows, weights=(0.25, 0.75))
    for number, window in enumerate(one):
        for row, got in enumerate(inputs(window)):
            sampled = one.sampled(4 * number + row)
            assert sampled.share == (0.25, 0.75)[sampled.source]
            want = windows.read(torch.tensor([sampled.window])).tokens[0, :-1]
            assert torch.equal(got, want)
            names = {piece.document.source for piece in windows.locate(sampled.window)}
            assert names == {f"source {sampled.source}"}


def test_the_position_is_of_what_was_handed_out(windows):
    whole = list(loader(windows))
    one = loader(windows, num_workers=3)
    assert len(list(islice(one, 5))) == 5
    state = json.loads(json.dumps(one.state_dict()))
    assert (state["window"], state["row"]) == (5, 20)
    other = loader(windows, num_workers=0)
    other.load_state_dict(state)
    assert len(other) == 15 and same(other, whole[5:])
    assert same(other, whole[5:])  # a pass begins where the state said, again and again


def test_workers_make_updates_before_they_are_asked_for(windows, monkeypatch):
    read, made = windows.read, Semaphore(0)

    def counted(numbers):
        made.release()
        return read(numbers)

    monkeypatch.setattr(windows, "read", counted)
    going = iter(loader(windows, num_workers=2))
    next(going)
    # In two microbatches each: the update that was handed out, and two more for each worker.
    assert all(made.acquire(timeout=10) for _ in range(2 * (1 + 2 * AHEAD_PER_WORKER)))


def test_a_loaded_position_ends_the_pass_before(windows):
    one = loader(windows, num_workers=2)
    old = iter(one)
    next(old)
    one.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="ended by a newer one or by load_state_dict"):
        next(old)
    assert len(list(one)) == 19


def test_a_finished_pass_has_nothing_left(windows):
    one = loader(windows)
    assert len(list(one)) == 20
    two = loader(windows)
    two.load_state_dict(one.state_dict())
    assert len(two) == 0 and list(two) == [] and two.num_targets == 0


def test_a_new_pass_ends_the_one_before(windows):
    one = loader(windows)
    old = iter(one)
    next(old)
    next(iter(one))
    with pytest.raises(RuntimeError, match="ended by a newer one"):
        next(old)


def test_targets_are_counted_without_reading(windows):
    one = loader(windows)
    assert one.num_targets == sum(window.num_targets for window in one)


def test_an_error_of_a_worker_is_raised_where_its_window_was_due(windows, monkeypatch):
    read, asked = windows.read, []
    monkeypatch.setattr(windows, "read", lambda numbers: asked.append(numbers) or read(numbers))
    in_turn = iter(loader(windows, num_workers=0))
    next(in_turn), next(in_turn)
    num_before = len(asked)
    next(in_turn)
    of_the_third = asked[num_before]

    def broken(numbers):
        if torch.equal(numbers, of_the_third):
            raise OSError("the disk is gone")
        return read(numbers)

    monkeypatch.setattr(windows, "read", broken)
    one, handed_out = loader(windows, num_workers=2), 0
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in one:
            handed_out += 1
    assert handed_out == one.state_dict()["window"] == 2


def test_waiting_is_measured(windows, monkeypatch):
    read = windows.read

    def slow(numbers):
        time.sleep(0.01)
        return read(numbers)

    monkeypatch.setattr(windows, "read", slow)
    one = loader(windows, num_workers=0, num_updates=5)
    for _ in one:
        time.sleep(0.02)
    assert 0.1 <= one.wait_s <= 0.15 + one.wait_s / 2  # 10 reads of 10 ms
    assert one.pass_s >= one.wait_s + 5 * 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed 2, here 1"),
        ({"weights": "0.5 0.5"}, "weights 0.5 0.5, here of the targets"),
        ({"buffer_rows": 7}, "buffer_rows 7, here 0"),
        ({"windows_sha256": "0"}, "windows_sha256 0, here "),
        ({"window": 21}, "no update 21 at row 0; 20 are asked for"),
        ({"window": -1}, "no update -1"),
        ({"row": 4}, "no update 0 at row 4"),
        ({"row": 4.0, "window": 1}, "must be whole numbers"),
        ({"extra": 1}, "a position has window, row, seed"),
    ],
)
def test_a_position_that_is_none_of_these_windows_is_refused(windows, change, message):
    one = loader(windows)
    before = one.state_dict()
    with pytest.raises(ValueError, match=message):
        one.load_state_dict({**before, **change})
    assert one.state_dict() == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_updates": 0}, "num_updates is 0"),
        ({"rows_per_microbatch": 0}, "rows_per_microbatch is 0"),
        ({"buffer_rows": 0}, "buffer_rows is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"rank": 2, "num_ranks": 2}, "no rank 2 of 2"),
        ({"weights": (1.0,)}, "weights must be 2 finite numbers above 0"),
        ({"weights": (1.0, 0.0)}, "weights must be 2 finite numbers above 0"),
        ({"weights": (1.0, float("nan"))}, "weights must be 2 finite numbers above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(windows, fields, message):
    with pytest.raises(ValueError, match=message):
        loader(windows, **fields)


def test_a_source_without_targets_is_refused():
    with pytest.raises(ValueError, match=r"every source needs targets; the sources have \[3, 0\]"):
        Interleaving([torch.tensor([3]), torch.tensor([0, 0])], None, 0, ROLES["shuffle"])
    with pytest.raises(ValueError, match="every source needs targets"):
        Interleaving([], None, 0, ROLES["shuffle"])
    with pytest.raises(ValueError, match="places must be 0 <= start <= stop, got 3 and 2"):
        Interleaving([torch.tensor([3])], None, 0, ROLES["shuffle"]).rows(3, 2)


def test_a_far_place_is_found_without_going_there():
    targets = [torch.full((1000,), 7), torch.full((10,), 3)]
    order = Interleaving(targets, (0.9, 0.1), 0, ROLES["shuffle"])
    far = order.rows(10**9, 10**9 + 5)
    assert torch.equal(far, order.rows(10**9 - 3, 10**9 + 5)[3:])


def test_a_buffer_of_one_keeps_the_order():
    assert buffered_shuffle(9, 0, 0, 1).tolist() == list(range(9))
    with pytest.raises(ValueError, match="buffer_rows 0 must be at least 1"):
        buffered_shuffle(9, 0, 0, 0)
