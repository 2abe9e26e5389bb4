"""Ranks that go on with another rank's random state, or at another place in the data."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from gates.faults.checkpoint import load_changed
from gates.faults.resume import load_at
from harness import benign, fault
from reference.anomaly import AnomalyWatch, _write_window
from reference.checkpoint import capture, disk
from reference.checkpoint.commit import write_file as write_to_disk
from reference.checkpoint.description import named_tensors
from reference.checkpoint.files import FileRecord
from reference.checkpoint.shards import local
from reference.checkpoint.tensors import sha256
from reference.checkpoint.write import write_tensors
from reference.window import Window

RESUME, OTHER = "m6_resume::test_resume", "m6_resume::test_other_number"
BACKGROUND, ANOMALY = "m6_resume::test_background", "m6_resume::test_anomaly"


def is_other_number(snapshot):
    return snapshot.world["world_size"] != snapshot.peers.world_size


def load_elsewhere(reference, place):
    """On another number of ranks, a load that says place(windows consumed) windows were."""
    moved = load_at(reference, place)

    def load(directory, expected):
        saved = reference.load(directory, expected)
        return moved(directory, expected) if is_other_number(saved) else saved

    return load


@fault(role="save", caught_by=RESUME, seen_in="NVIDIA/Megatron-LM PR#6858, radixark/miles PR#3187")
def saves_the_random_state_once(reference):
    """The random state is taken for the same on all ranks; the first one's is written for all."""

    def save(root, snapshot, last, every):
        states = snapshot.peers.agree(
            f"random {snapshot.counters.optimizer_steps}",
            lambda: {name: state.tolist() for name, state in snapshot.random.items()},
        )
        first = {name: torch.tensor(s, dtype=torch.uint8) for name, s in states[0].items()}
        return reference.save(root, replace(snapshot, random=first), last, every)

    return save


@fault(role="load", caught_by=RESUME, seen_in="own")
def drops_the_random_states_of_ranks(reference):
    """With several ranks nobody's random state is restored."""

    def change(snapshot):
        return replace(snapshot, random={}) if snapshot.peers.world_size > 1 else snapshot

    return load_changed(reference, change)


@fault(
    role="load",
    caught_by=OTHER,
    seen_in="NVIDIA-NeMo/Megatron-Bridge PR#5637, PR#3503",
)
def takes_one_rank_s_share_of_the_position(reference):
    """Two ranks to one: the position counts what the first rank alone has read."""
    return load_elsewhere(reference, lambda consumed: consumed // 2)


@fault(role="load", caught_by=OTHER, seen_in="NVIDIA-NeMo/Megatron-Bridge PR#3503")
def reads_from_the_beginning_on_another_number_of_ranks(reference):
    """What was consumed before is forgotten when the ranks are others."""
    return load_elsewhere(reference, lambda consumed: 0)


@fault(role="load", caught_by=OTHER, seen_in="own")
def divides_the_tokens_by_the_ranks(reference):
    """The schedule goes on from the tokens of one rank."""

    def change(snapshot):
        if not is_other_number(snapshot):
            return snapshot
        counters = snapshot.counters
        tokens = counters.tokens_updated // snapshot.world["world_size"]
        return replace(snapshot, counters=replace(counters, tokens_updated=tokens))

    return load_changed(reference, change)


# --- beside training ---------------------------------------------------------------------------


def train_with(reference, target, replacement):
    """A train in which `replacement` stands in the place of `target`."""

    def train(config, stack, windows, *rest, **more):
        with mock.patch(target, replacement):
            return reference.train(config, stack, windows, *rest, **more)

    return train


@fault(role="train", caught_by=BACKGROUND, seen_in="own")
def saves_the_last_rank_s_parameters_as_they_are_later(reference):
    """All ranks but the last copy; its thread reads parameters that training goes on with."""

    def shared(training, *rest, **more):
        snapshot = capture(training, *rest, **more)
        if snapshot.peers.index < snapshot.peers.world_size - 1:
            return snapshot
        tensors, _ = named_tensors(training.model)
        live = {name: local(tensor).detach() for name, tensor in tensors.items()}
        return replace(snapshot, parameters=live)

    return train_with(reference, "reference.resume.capture", shared)


@fault(role="save", caught_by=BACKGROUND, seen_in="nvidia-cosmos/cosmos-rl PR#550")
def publishes_files_that_are_still_to_be_written(reference):
    """Ranks but the first make their files as long as they are to be, and write them later."""
    left = []

    def promised(folder, snapshot):
        def write_file(name, pieces):
            data = b"".join(pieces)
            file = folder / name
            if snapshot.peers.index == 0:
                file.write_bytes(data)
            else:
                file.write_bytes(bytes(len(data)))
                left.append((name, data))
            return FileRecord(len(data), sha256([data]))

        return write_tensors(snapshot, write_file)

    def save(root, snapshot, last, every):
        with mock.patch("reference.checkpoint.commit._write_tensors", promised):
            target = reference.save(root, snapshot, last, every)
        while left:
            name, data = left.pop()
            late = target.with_name(name)
            write_to_disk(late, [data])
            disk.rename(late, target / name)
        return target

    return save


@benign(role="save", accepted_by=BACKGROUND, because="how files reach the disk is its own affair")
def writes_in_a_way_of_its_own(reference):
    """The disk that the gate holds still is not the one that it writes to."""
    create = disk.create

    def save(*arguments):
        with mock.patch.object(disk, "create", create):
            return reference.save(*arguments)

    return save


@benign(role="train", accepted_by=BACKGROUND, because="it is slower, and no other checkpoint")
def saves_before_training_goes_on(reference):
    """What is to be saved beside training is saved at once."""

    def train(config, stack, windows, *rest, checkpoints=None, **more):
        blocking = checkpoints and replace(checkpoints, background=False)
        return reference.train(config, stack, windows, *rest, checkpoints=blocking, **more)

    return train


# --- an update that goes wrong -----------------------------------------------------------------


@fault(role="train", caught_by=ANOMALY, seen_in="own")
def keeps_the_window_of_the_first_rank_alone(reference):
    """The others' rows are there without their targets."""

    def first_alone(file, window):
        is_first = file.name.startswith("window-00000") or "-of-" not in file.name
        return _write_window(file, window if is_first else window.trim(0))

    return train_with(reference, "reference.anomaly._write_window", first_alone)


@fault(role="train", caught_by=ANOMALY, seen_in="own")
def keeps_no_anomaly_of_several_ranks(reference):
    """Ranks are not watched: there was no way to run their update again."""

    def one_alone(stack, training, *rest):
        return stack if training.group else AnomalyWatch(stack, training, *rest)

    return train_with(reference, "reference.resume.AnomalyWatch", one_alone)


@benign(role="train", accepted_by=ANOMALY, because="a window is its rows, however they are split")
def keeps_every_row_in_a_microbatch_of_its_own(reference):
    """The kept windows have as many microbatches as rows."""

    def split(file, window):
        rows = [m.rows(n, n + 1) for m in window.microbatches for n in range(m.num_rows)]
        return _write_window(file, Window(tuple(rows)))

    return train_with(reference, "reference.anomaly._write_window", split)


# --- right, in another way ---------------------------------------------------------------------


@benign(role="load", accepted_by=[RESUME, OTHER], because="a copy is equal")
def ranks_load_copies(reference):
    """What was loaded is copied once more."""

    def change(snapshot):
        copies = {name: tensor.clone() for name, tensor in snapshot.parameters.items()}
        return replace(snapshot, parameters=copies)

    return load_changed(reference, change)
