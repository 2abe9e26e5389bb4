"""Runs of several ranks that are killed, gone on with, or go wrong: what every rank does."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gates import runs
from gates.distributed import targeted_rows
from reference.checkpoint import CheckpointError, disk, latest
from reference.checkpoint.files import require_written
from reference.checkpoint.load import LocalFolder
from reference.distribute import named_parameters
from reference.window import Window

HELD_S = 1.0
NUM_BEFORE = 3  # updates before the one that goes wrong
SPOILED = "layers.0.self_attn.v_proj.weight"


def whole_and_killed(
    rank: Any, stack: Any, source: runs.Text, folder: Path, saved: int
) -> tuple[runs.Run, runs.Run]:
    """A run that is left alone, and one that ends an update behind its save."""
    watched = runs.with_dropout(stack)
    alone = runs.train(watched, source, rank.device, rank=rank)
    return alone, killed_run(rank, watched, source, folder, saved)


def killed_run(rank: Any, stack: Any, source: runs.Text, folder: Path, saved: int) -> runs.Run:
    """A run that ends an update behind its save."""
    keeper = runs.checkpoints(folder, saved)
    return runs.train(stack, source, rank.device, keeper, saved + 1, rank=rank)


def resumed_run(rank: Any, stack: Any, source: runs.Text, folder: Path, every: int) -> runs.Run:
    """The run in `folder`, in new processes, to its end."""
    keeper = runs.checkpoints(folder, every, resume=True)
    return runs.train(runs.with_dropout(stack), source, rank.device, keeper, rank=rank)


def whole_and_held(
    rank: Any, stack: Any, source: runs.Text, folder: Path, saved: int
) -> tuple[runs.Run, runs.Run, list[str]]:
    """As whole_and_killed, saved beside training. The disk of the last rank stands still until one
    more update is done and HELD_S are over: the names of what is published then and not whole. (A
    save with a disk of its own is not held, and may be done.)
    """
    watched = runs.with_dropout(stack)
    alone = runs.train(watched, source, rank.device, rank=rank)
    is_held, real = rank.index == rank.world_size - 1, disk.create
    may_write = threading.Event()
    records: list[Any] = []
    published: list[str] = []

    def create(path: Path) -> int:
        if is_held:
            may_write.wait(3 * HELD_S)  # a save that training waits for is slow, but not wrong
        return real(path)

    def update_window(*arguments: Any) -> Any:
        records.append(watched.update_window(*arguments))
        if len(records) == saved + 1:
            time.sleep(HELD_S)
            newest = latest(folder)
            if is_held and newest and not is_whole(newest):
                published.append(newest.name)
            may_write.set()
        return records[-1]

    beside = watched.replace({"update_window": update_window})
    keeper = runs.checkpoints(folder, saved, background=True)
    with mock.patch.object(disk, "create", create):
        killed = runs.train(beside, source, rank.device, keeper, saved + 1, rank=rank)
    return alone, killed, published


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that the manifest names is there as it says."""
    try:
        require_written(LocalFolder(checkpoint))
    except (CheckpointError, OSError):
        return False
    return True


def gone_wrong(
    rank: Any, stack: Any, source: runs.Text, folder: Path, how: str, device: Any = None
) -> tuple[runs.Run, list[str]]:
    """A run until an update that goes wrong, and the rows with targets that this rank read in it.

    how: "norm", the gradient norm is said to be inf; "overflow", a parameter has become so large
    that the operator it is given to overflows. rank: None for one process, which gives its device.
    """
    rows: list[list[str]] = []

    def accumulate(model: Any, window: Window, *rest: Any) -> Any:
        rows.append(targeted_rows(window))
        if how == "overflow" and len(rows) == NUM_BEFORE + 1:
            with torch.no_grad():
                dict(named_parameters(model))[SPOILED].fill_(3e38)
        return stack.accumulate(model, window, *rest)

    def clip_grad_norm(*arguments: Any) -> Tensor:
        norm: Tensor = stack.clip_grad_norm(*arguments)
        is_wrong = how == "norm" and len(rows) == NUM_BEFORE + 1
        return torch.full_like(norm, torch.inf) if is_wrong else norm

    spoiled = stack.replace({"accumulate": accumulate, "clip_grad_norm": clip_grad_norm})
    keeper, where = runs.checkpoints(folder, 100), device if rank is None else rank.device
    run = runs.train(spoiled, source, where, keeper, NUM_BEFORE + 1, rank=rank)
    return run, rows[NUM_BEFORE]
