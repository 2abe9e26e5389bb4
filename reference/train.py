"""The training loop: windows in, a trained model and its records out.

`python -m reference.train --corpus language --updates 300` trains on text that needs no download.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from reference.distribute import DistributionSettings, data_group
from reference.group import rank_in
from reference.optimizer import AdamState
from reference.resume import Checkpoints, Keeper
from reference.update import Counters, TrainState, UpdateRecord, UpdateSettings
from reference.window import Window


@dataclass(frozen=True)
class TrainResult:
    """The trained model, one record a window in order, the last counters, the optimizer state.

    records: of a resumed run, from the next window on. stopped: `Checkpoints.stop` ended it.
    """

    model: nn.Module
    records: list[UpdateRecord]
    counters: Counters
    optimizer_state: dict[nn.Parameter, AdamState]
    stopped: bool = False


def train(
    config: Any,
    stack: Any,
    windows: Iterable[Window],
    settings: UpdateSettings,
    seed: int = 0,
    device: torch.device | str = "cpu",
    total_tokens: int | None = None,
    last_window: str = "overshoot",
    progress: bool = False,
    checkpoints: Checkpoints | None = None,
    mesh: Any = None,
    distribution: DistributionSettings | None = None,
) -> TrainResult:
    """Builds the model of `config` and applies every window to it with `stack.update_window`.

    To go on from weights that exist, give a stack whose `build_model` hands out their model.

    seed: as in initial_model.
    total_tokens: end when this many targets were applied; None: end with the windows.
    last_window: what to do when the last window holds more targets than are left: "trim" drops
    the later ones, so exactly total_tokens are applied; "overshoot" applies them all.
    progress: a bar on standard error, if that is a terminal.
    checkpoints: where the run is kept, and whether it goes on from there. What was saved takes the
    place of the model's values, of torch's generators and of the windows' position; the rest of
    the run is bit for bit that of a run that was never stopped, on as many ranks: `resumption` says
    what it is on others. An update that was not finished starts again from its first microbatch.

    mesh: a DeviceMesh whose ranks train together, each with the same arguments. The model is that
    of `stack.distribute(model, mesh, distribution)`, and rank r of W trains rows r, r + W, ... of
    every window, so that all ranks together see the rows of one process; the records and counters
    are of all ranks, and the same on each.

    Raises ValueError for an unknown `last_window`, for total_tokens < 1, when the windows end
    before total_tokens (a run that is short must not look finished), for a `distribution` without
    a mesh, and as Keeper and `distribute` do.
    """
    _check(total_tokens, last_window, mesh, distribution)
    model, group = initial_model(config, stack, seed, device), None
    if mesh is not None:
        model = stack.distribute(model, mesh, distribution or DistributionSettings())
        group = data_group(mesh)
    index, num_ranks = rank_in(group)
    training = TrainState(model, stack.param_groups(model, settings.weight_decay), group=group)
    keeper = checkpoints and Keeper(checkpoints, training, settings, windows, stack)
    records: list[UpdateRecord] = []
    stopped = False
    with keeper or nullcontext(), _progress_bar(windows, progress and index == 0) as advance:
        source, watched = (keeper.begin(), keeper.stack) if keeper else (windows, stack)
        for window in _until(source, training, total_tokens, last_window):
            share = window.share(index, num_ranks).to(device)
            record = stack.update_window(training, share, watched, settings)
            records.append(record)
            advance(record)
            if keeper and keeper.after_window():
                stopped = True
                break
    return TrainResult(model, records, training.counters, training.optimizer_state, stopped)


def _check(
    total_tokens: int | None,
    last_window: str,
    mesh: Any,
    distribution: DistributionSettings | None,
) -> None:
    if last_window not in ("trim", "overshoot"):
        raise ValueError(f'last_window must be "trim" or "overshoot", got {last_window!r}')
    if total_tokens is not None and total_tokens < 1:
        raise ValueError(f"total_tokens must be >= 1 or None, got {total_tokens}")
    if mesh is None and distribution is not None:
        raise ValueError("a distribution needs the mesh of ranks to distribute over")


def initial_model(
    config: Any, stack: Any, seed: int, device: torch.device | str = "cpu"
) -> nn.Module:
    """The model of `config` before any update, on `device`.

    seed: of its parameters, which are drawn on the CPU so that every device gets the same.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: nn.Module = stack.build_model(config, stack).to(device)
    return model


def _until(
    windows: Iterable[Window], training: TrainState, total_tokens: int | None, last_window: str
) -> Iterator[Window]:
    """The windows up to `total_tokens` applied targets, the last one trimmed if that is asked."""
    if total_tokens is None:
        yield from windows
        return
    source = iter(windows)
    while (done := training.counters.tokens_updated) < total_tokens:
        window = next(source, None)
        if window is None:
            raise ValueError(
                f"the windows ended after {done} applied targets, before total_tokens = "
                f"{total_tokens}; give more windows or ask for fewer tokens"
            )
        remaining = total_tokens - done
        is_too_long = window.num_targets > remaining
        yield window.trim(remaining) if is_too_long and last_window == "trim" else window


@contextmanager
def _progress_bar(windows: Iterable[Window], shown: bool) -> Iterator[Any]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    num_windows = len(windows) if isinstance(windows, Sized) else None
    with bar:
        task = bar.add_task("training", total=num_windows, loss="")

        def advance(record: UpdateRecord) -> None:
            bar.update(task, advance=1, loss=f"{record.loss_nats:.3f} nats/token")

        yield advance


if __name__ == "__main__":
    from reference.train_command import main

    raise SystemExit(main())
