"""How long a save stalls training: blocking, in the background, and torch's own asynchronous one.

`python -m reference.checkpoint.stall --preset qwen2.5-0.5b --device cuda`

The stall of a save is the time from its call until it is written, less what the updates that ran
meanwhile take without a save. It holds both the copy and what the writing takes from training.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from reference.checkpoint.background import BackgroundSaver
from reference.checkpoint.commit import save
from reference.checkpoint.state import Snapshot, capture, tensor_parts
from reference.config import preset
from reference.schedule import Schedule
from reference.train import initial_model
from reference.update import TrainState, UpdateSettings
from reference.window import Microbatch, Window

SETTINGS = UpdateSettings(Schedule(peak=1e-4, total_tokens=10**9))
NUM_TIMED_UPDATES = 10
# "background-from-cpu" copies to the CPU at once, "torch-async" is async_save of torch.
WAYS = ("blocking", "background", "background-from-cpu", "torch-async")
Begin = Callable[[], Callable[[], bool]]


@dataclass(frozen=True)
class Stall:
    """Of one save: seconds lost to training, seconds until it was written, updates meanwhile."""

    stalled_seconds: float
    written_seconds: float
    num_updates: int


def stall(begin: Begin, update: Callable[[], None], update_seconds: float) -> Stall:
    """Updates until the save that `begin()` starts is done; `begin` returns what asks for that."""
    start, num_updates = time.perf_counter(), 0
    is_done = begin()
    while not is_done():
        update()
        num_updates += 1
    seconds = time.perf_counter() - start
    return Stall(seconds - num_updates * update_seconds, seconds, num_updates)


def blocking(snapshot: Callable[[], Snapshot], directory: Path) -> Callable[[], bool]:
    """A save that is over when it returns."""
    save(directory, snapshot(), keep_last=1)
    return lambda: True


def background(
    saver: BackgroundSaver, snapshot: Callable[[], Snapshot], done: threading.Event
) -> Callable[[], bool]:
    """A save in a thread, which sets `done`."""
    saver.submit(snapshot())
    return done.is_set


def torch_asynchronous(training: TrainState, directory: Path) -> Callable[[], bool]:
    """torch.distributed.checkpoint.async_save of the same tensors."""
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    optimizer = {
        f"{names[parameter]}/{moment}": getattr(adam, moment)
        for parameter, adam in training.optimizer_state.items()
        for moment in ("first_moment", "second_moment")
    }
    state = {"model": training.model.state_dict(), "optimizer": optimizer}
    number = training.counters.optimizer_steps
    future: Any = dcp.async_save(state, checkpoint_id=directory / str(number))  # type: ignore[attr-defined]
    return lambda: bool(future.done()) and future.result() is not None


def main(arguments: list[str] | None = None) -> int:
    """The command; prints one line a way of saving."""
    parser = argparse.ArgumentParser(prog="python -m reference.checkpoint.stall")
    parser.add_argument("--preset", default="qwen2.5-0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1024, help="of each update")
    parser.add_argument("--layers", type=int, help="of the model; default: those of the preset")
    parser.add_argument("--rounds", type=int, default=2, help="of each way; the last one counts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="the first is 100 %%")
    parser.add_argument("--directory", type=Path, help="where to write; default: temporary")
    chosen = parser.parse_args(arguments)
    from reference import stack

    roles = argparse.Namespace(**stack.ROLES)
    training, update = _training(chosen, roles)
    update_seconds = statistics.median(_seconds(update) for _ in range(NUM_TIMED_UPDATES))
    taken = partial(capture, training, SETTINGS, {}, {})
    num_bytes = sum(t.nbytes for part in tensor_parts(taken()).values() for t in part.values())
    print(
        f"{chosen.preset} on {chosen.device}: {num_bytes / 1e9:.2f} GB to save, "
        f"{update_seconds * 1e3:.0f} ms an update"
    )
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        _compare(Path(folder), chosen, training, taken, update, update_seconds)
    dist.destroy_process_group()
    return 0


def _training(chosen: Any, roles: Any) -> tuple[TrainState, Callable[[], None]]:
    """A run after three updates, and one more update of it, waited for."""
    config = preset(chosen.preset)
    config = replace(config, num_layers=chosen.layers or config.num_layers)
    model = initial_model(config, roles, seed=0, device=chosen.device)
    training = TrainState(model, roles.param_groups(model, SETTINGS.weight_decay))
    ids = torch.randint(config.vocabulary_size, (1, chosen.tokens))
    window = Window((Microbatch(ids, ids, torch.arange(chosen.tokens)[None]),)).to(chosen.device)

    def update() -> None:
        roles.update_window(training, window, roles, SETTINGS)
        if chosen.device != "cpu":
            torch.accelerator.synchronize()

    for _ in range(3):
        update()
    return training, update


def _seconds(update: Callable[[], None]) -> float:
    start = time.perf_counter()
    update()
    return time.perf_counter() - start


def _compare(
    folder: Path,
    chosen: Any,
    training: TrainState,
    taken: Callable[..., Snapshot],
    update: Callable[[], None],
    update_seconds: float,
) -> None:
    """Each chosen way so many rounds: what the first allocates or imports is not a save's cost."""
    done = threading.Event()

    def written(snapshot: Snapshot) -> Path:
        try:
            return save(folder / "background", snapshot, keep_last=1)
        finally:
            done.set()

    with BackgroundSaver(written) as saver:
        ways: dict[str, Begin] = {
            "blocking": partial(blocking, taken, folder / "blocking"),
            "background": partial(background, saver, partial(taken, on_device=True), done),
            "background-from-cpu": partial(background, saver, taken, done),
            "torch-async": partial(torch_asynchronous, training, folder / "torch"),
        }
        whole = 0.0
        for name in chosen.ways:
            for _ in range(chosen.rounds):
                done.clear()
                update()  # or the step's name is taken
                found = stall(ways[name], update, update_seconds)
            whole = whole or found.stalled_seconds
            print(
                f"{name:30s} stalls {found.stalled_seconds:7.3f} s "
                f"({found.stalled_seconds / whole:6.1%} of {chosen.ways[0]}), written after "
                f"{found.written_seconds:.2f} s, {found.num_updates} updates meanwhile"
            )


if __name__ == "__main__":
    raise SystemExit(main())
