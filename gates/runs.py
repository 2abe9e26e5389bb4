"""Training runs that are watched, interrupted, and gone on with: what the gates of resume compare.

A run is told from another by its updates: the state before each, the tokens it read, and what it
recorded. Everything is compared bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from gates import snapshots, toys
from gates.toy_windows import RowWindows
from reference.data.loader import LoaderSettings
from reference.data.pack import Rows
from reference.data.training_text import Windows
from reference.resume import Checkpoints
from reference.schedule import Schedule
from reference.update import UpdateRecord, UpdateSettings
from reference.window import Window

NUM_UPDATES = 14
# 41 rows in windows of 3 x 4: four windows an epoch, the last of them with two microbatches.
NUM_ROWS, ROW_TOKENS = 41, 12
WINDOWS_PER_EPOCH, ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW = 4, 4, 3
# Warmup and decay meet, so that no two neighbouring updates have one learning rate.
TOTAL_TOKENS = 4 * NUM_ROWS * ROW_TOKENS
SETTINGS = UpdateSettings(
    Schedule(5e-3, TOTAL_TOKENS, TOTAL_TOKENS // 3, TOTAL_TOKENS - TOTAL_TOKENS // 3)
)
SIZES = ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW
SEED, RANDOM_SEED = 3, 4
NUM_WORKERS, AHEAD_WITHIN_S = 2, 10.0  # of a loader that reads ahead


class Interrupted(Exception):
    """What ends a run between two of its steps, as a crash would."""


@dataclass(frozen=True)
class Update:
    """One update: the state before it and the text it read by their parts, and its record."""

    before: dict[str, str]
    window: dict[str, str]
    record: UpdateRecord


@dataclass
class Run:
    """The updates of a run in order, how it ended, and the parameters it ended with.

    made_microbatches: those that a loader had made when the run was interrupted.
    """

    updates: list[Update] = field(default_factory=list)
    ended: str = "interrupted"
    parameters: dict[str, str] = field(default_factory=dict)
    made_microbatches: int = 0

    @property
    def was_ahead(self) -> bool:
        """More was made than the updates, and the one that was interrupted, had asked for."""
        return self.made_microbatches > MICROBATCHES_PER_WINDOW * (len(self.updates) + 1)


@dataclass(frozen=True)
class Text:
    """Rows and how windows are taken from them: everything that a new process needs.

    num_workers: of the loader that hands them out, as for a folder of data; 0: Windows do, as for a
    corpus.
    """

    rows: Rows
    num_workers: int = 0

    def windows(self, stack: Any) -> Any:
        """Fresh windows, at their beginning."""
        if self.num_workers == 0:
            return Windows(self.rows, SEED, NUM_UPDATES, *SIZES)
        settings = LoaderSettings(SEED, NUM_UPDATES, *SIZES, num_workers=self.num_workers)
        return stack.loader(RowWindows(self.rows), settings, stack)


def text(stack: Any, rng: torch.Generator, num_workers: int = 0) -> Text:
    """Random documents packed into rows that are all different."""
    documents, left = [], NUM_ROWS * ROW_TOKENS + 1
    while left:
        length = min(left, int(torch.randint(3, 20, (), generator=rng)))
        documents.append(torch.randint(toys.TINY.vocabulary_size, (length,), generator=rng))
        left -= length
    return Text(stack.pack(documents, ROW_TOKENS, "drop"), num_workers)


def with_dropout(stack: Any) -> Any:
    """The stack whose models drop a fifth of every layer's output, from the global generator."""

    def build_model(config: Any, inner: Any) -> Any:
        model = stack.build_model(config, inner)
        for layer in model.layers:
            layer.register_forward_hook(
                lambda module, inputs, y: F.dropout(y, 0.2, module.training)
            )
        return model

    return stack.replace({"build_model": build_model})


def train(
    stack: Any,
    source: Text,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
    stop_after: float = math.inf,
    inside_accumulation: bool = False,
    rank: Any = None,
) -> Run:
    """A run from fresh objects, as a new process would begin it, and what there was to see.

    rank: of those that train it together, each with a random state of its own.
    stop_after: updates that are applied before the run is interrupted: at the beginning of the next
    one, or inside_accumulation behind the first of its microbatches.
    """
    seed = RANDOM_SEED if checkpoints is None or not checkpoints.resume else 99
    torch.manual_seed(seed if rank is None else 10 * seed + rank.index)
    run = Run()
    watched = _watching(stack, run, stop_after, inside_accumulation)
    windows = source.windows(watched)
    config = replace(toys.TINY, num_layers=1)
    arguments = (config, watched, windows, SETTINGS, SEED, device, None, "overshoot", False)
    more = {} if checkpoints is None else {"checkpoints": checkpoints}
    if rank is not None:
        mesh = init_device_mesh(device.type, (rank.world_size,), mesh_dim_names=("data",))
        more["mesh"] = mesh
    try:
        result = stack.train(*arguments, **more)
    except Interrupted:
        return run
    except Exception as error:  # how a resume on trial ends is a result here, and it is reported
        run.ended = f"{type(error).__name__}: {error}"
        return run
    run.ended = "finished"
    run.parameters = snapshots.parts(dict(result.model.named_parameters()))
    return run


def _watching(stack: Any, run: Run, stop_after: float, inside_accumulation: bool) -> Any:
    made: list[None] = []  # appended to by several threads

    def apply_policy(*arguments: Any) -> Any:
        microbatch = stack.apply_policy(*arguments)
        made.append(None)
        return microbatch

    def interrupt() -> None:
        """When the workers of a loader are ahead; on a busy machine they may not be yet."""
        deadline = time.monotonic() + AHEAD_WITHIN_S
        run.made_microbatches = len(made)
        while made and not run.was_ahead and time.monotonic() < deadline:
            time.sleep(0.01)
            run.made_microbatches = len(made)
        raise Interrupted

    def update_window(training: Any, window: Window, inner: Any, settings: Any) -> UpdateRecord:
        if len(run.updates) >= stop_after and not inside_accumulation:
            interrupt()
        before = snapshots.of_training(training)
        record: UpdateRecord = stack.update_window(training, window, inner, settings)
        run.updates.append(Update(before, snapshots.parts(window), record))
        return record

    def accumulate(model: Any, window: Window, group: Any, loss_scale: float = 1.0) -> Any:
        if len(run.updates) >= stop_after:
            stack.accumulate(model, Window(window.microbatches[:1]), group, loss_scale)
            interrupt()
        return stack.accumulate(model, window, group, loss_scale)

    return stack.replace(
        {"update_window": update_window, "accumulate": accumulate, "apply_policy": apply_policy}
    )


def compare(check: Callable[..., None], resumed: Run, whole: Run, num_done: int) -> None:
    """Holds the resumed updates against those of the whole run behind its first `num_done`."""
    check("how the resumed run ended", resumed.ended, equal="finished",
          because="nothing stands in the way of going on")  # fmt: skip
    want, got = whole.updates[num_done:], resumed.updates
    check("updates made by the resumed run", len(got), equal=len(want),
          because=f"{NUM_UPDATES} are asked for, {num_done} were saved")  # fmt: skip
    check("updates to compare", len(want), at_least=5,
          because="some faults show at the third update only")  # fmt: skip
    differing = snapshots.differing(got[0].before, want[0].before)
    check("parts of the state that differ before the first resumed update", differing,
          equal=[], because=BITWISE)  # fmt: skip
    check_updates(check, "resumed", got, want)
    check("parameters that differ at the end",
          snapshots.differing(resumed.parameters, whole.parameters), equal=[],
          because=BITWISE)  # fmt: skip


BITWISE = "the same machine does the same sums in the same order: no bit may differ"


def check_updates(
    check: Callable[..., None], which: str, got: list[Update], want: list[Update]
) -> None:
    """Numbers of the updates, from 1, in which two runs of equal length differ, all to be none."""
    pairs = list(zip(got, want, strict=True))

    def numbers(differ: Callable[[Update, Update], bool]) -> list[int]:
        return [number for number, pair in enumerate(pairs, 1) if differ(*pair)]

    check(f"{which} updates that read other tokens", numbers(lambda a, b: a.window != b.window),
          equal=[], because="no window is read twice, none is left out")  # fmt: skip
    for name in ("learning_rate", "loss_nats", "grad_norm", "counters"):
        check(
            f"{which} updates with another {name.replace('_', ' ')}",
            numbers(lambda a, b, name=name: getattr(a.record, name) != getattr(b.record, name)),
            equal=[],
            because=BITWISE,
        )
    check(f"{which} updates from another state", numbers(lambda a, b: a.before != b.before),
          equal=[], because=BITWISE)  # fmt: skip


def checkpoints(
    directory: Path, every: int, resume: bool = False, background: bool = False
) -> Checkpoints:
    """Saves every so many updates, keeps the last two."""
    return Checkpoints(directory, every, keep_last=2, resume=resume, background=background)
