"""Real runs killed at random instants: `python -m gates.kill_test --kills 200`.

Each run saves after every update and is killed (SIGKILL) after a random time; the next process goes
on from the folder. A run writes what it does to a log that a kill does not lose.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gates import crashes, runs, snapshots, toys
from harness.contract import Stack
from reference.checkpoint import expected, latest
from reference.stack import ROLES
from reference.update import TrainState

CONFIG = replace(toys.TINY, num_layers=1)


@dataclass
class Report:
    """What random kills did.

    kills: that hit a running process; broken: newest checkpoints that cannot be loaded; lost: kills
    behind which a committed update is not there; astray: updates that were not the next one, or
    not from the state and on the tokens of the run that was never killed.
    """

    kills: int = 0
    finished_runs: int = 0
    updates: int = 0
    saves: int = 0
    broken: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)


def kill_runs(stack: Any, source: runs.Text, folder: Path, num_kills: int, seed: int) -> Report:
    """Kills runs in `folder` until `num_kills` hit one. On the CPU: a fork has no other device.

    seed: of the instants. It ends early when a run cannot be gone on with.
    """
    rng = torch.Generator().manual_seed(seed)
    report, log, number = Report(), folder / "whole.log", 0
    start_s = time.perf_counter()
    ended = crashes.run(lambda: _train(stack, source, folder / "whole", log)).ended
    duration_s = time.perf_counter() - start_s
    want = dict(_read(log)[0])
    if ended != "returned":
        report.broken.append(f"a run that nobody killed {ended}")
    while report.kills < num_kills and not report.broken and not report.lost:
        root, before = folder / f"run-{number}", _newest(folder / f"run-{number}")
        log = folder / f"{report.kills}-{number}.log"
        process = crashes.Process(lambda root=root, log=log: _train(stack, source, root, log))
        time.sleep(duration_s * float(torch.rand((), generator=rng)))
        process.kill()
        ended = process.wait().ended
        report.kills += ended == "killed"
        if ended.startswith("raised"):
            report.broken.append(f"{root.name}, after {before} updates: {ended}")
        _judge(stack, root, before, _read(log), want, report)
        if _newest(root) == runs.NUM_UPDATES:
            report.finished_runs += 1
            number += 1
    return report


def _train(stack: Any, source: runs.Text, root: Path, log: Path) -> None:
    """Trains, in the forked process, and tells the log of every update and every save."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(kind: str, steps: int, seen: str = "-") -> None:
        os.write(descriptor, f"{kind} {steps} {seen}\n".encode())

    def update_window(training: Any, window: Any, inner: Any, settings: Any) -> Any:
        parts = snapshots.of_training(training) | snapshots.parts(window)
        seen = "".join(f"{name} {parts[name]}\n" for name in sorted(parts))
        tell("update", training.counters.optimizer_steps, hashlib.sha256(seen.encode()).hexdigest())
        return stack.update_window(training, window, inner, settings)

    def save(directory: Path, snapshot: Any, *keep: int) -> Any:
        target = stack.save(directory, snapshot, *keep)
        tell("saved", snapshot.counters.optimizer_steps)
        return target

    torch.manual_seed(runs.RANDOM_SEED)
    watched = stack.replace({"update_window": update_window, "save": save})
    arguments = (CONFIG, watched, source.windows(stack), runs.SETTINGS, runs.SEED, "cpu", None)
    keeper = runs.checkpoints(root, every=1, resume=True)
    stack.train(*arguments, "overshoot", False, checkpoints=keeper)


def _read(log: Path) -> tuple[list[tuple[int, str]], list[int]]:
    """(updates as (steps before, what was seen), steps that were saved), in order."""
    words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    updates = [(int(steps), seen) for kind, steps, seen in words if kind == "update"]
    return updates, [int(steps) for kind, steps, _ in words if kind == "saved"]


def _newest(root: Path) -> int:
    """Optimizer steps of the newest checkpoint, as its name has them; 0 without one."""
    newest = latest(root)
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


def _judge(
    stack: Any,
    root: Path,
    before: int,
    log: tuple[list[tuple[int, str]], list[int]],
    want: dict[int, str],
    report: Report,
) -> None:
    """What one process did, and what it left, against the run that was never killed."""
    updates, saved = log
    report.updates += len(updates)
    report.saves += len(saved)
    where, after = f"{root.name}, from update {before} on", _newest(root)
    if after < max([before, *saved]):
        report.lost.append(f"{where}: {max([before, *saved])} were saved, {after} are there")
    for place, (steps, seen) in enumerate(updates, before):
        if steps != place or want.get(steps) != seen:
            report.astray.append(f"{where}: update {steps + 1} in place of {place + 1}")
            break
    newest = latest(root)
    if newest is not None:
        model = stack.build_model(CONFIG, stack)
        groups = stack.param_groups(model, runs.SETTINGS.weight_decay)
        try:
            stack.load(newest, expected(TrainState(model, groups), runs.SETTINGS))
        except ValueError as error:
            report.broken.append(f"{where}: {error}")


def main() -> int:
    """Kills runs of the reference and prints what came of it; 1 if anything was broken or lost."""
    parser = argparse.ArgumentParser(prog="python -m gates.kill_test", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the text and of the instants")
    options = parser.parse_args()
    rng, stack = torch.Generator().manual_seed(options.seed), Stack(ROLES)
    source = runs.text(stack, rng)
    with tempfile.TemporaryDirectory() as folder:
        report = kill_runs(stack, source, Path(folder), options.kills, options.seed)
    print(
        f"{report.kills} kills (seed {options.seed}) in {report.finished_runs} runs of "
        f"{runs.NUM_UPDATES} updates that came to their end; {report.updates} updates and "
        f"{report.saves} saves in all\n"
        f"{len(report.broken)} checkpoints broken, {len(report.lost)} committed updates lost, "
        f"{len(report.astray)} resumes that were not the run that was never killed"
    )
    wrong = [*report.broken, *report.lost, *report.astray]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
