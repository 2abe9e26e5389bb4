"""What runs in the process of one rank: the group, the stack, the program, and its words."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from harness.collectives import Collectives
from harness.devices import find, force_numerics
from harness.portable import Recipe
from harness.rank_frames import traceback_of

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
END_SIGNALS = (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT)  # of the launcher
LINGER_S = 0.3  # of a rank that raised, so that the launcher sees first which rank died
GROUP_TIMEOUT = 10  # deadlines: the launcher's own comes first, and says more


@dataclass(frozen=True)
class Rank:
    """This process among its like: what a program is given.

    ``group`` is the default process group; ``collectives`` watches what this rank issues.
    """

    index: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    collectives: Collectives


@dataclass(frozen=True)
class Job:
    """What all ranks do: ``program(rank, stack, *arguments)``."""

    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    recipe: Recipe
    device_kind: str
    seed: int
    timeout_s: float


def files(folder: Path, index: int) -> dict[str, Path]:
    """Where a rank leaves its result, its exception, its stack when ended, its collectives."""
    kinds = ("result", "exception", "stack", "collectives", "called")
    return {kind: folder / f"rank-{index}.{kind}" for kind in kinds}


def main(folder: str) -> None:
    """The entry of a rank. What it has to say is in its files; the exit status is 0 or 1."""
    index = int(os.environ["RANK"])
    own = files(Path(folder), index)
    _end_with_the_launcher(own["stack"])
    try:
        result = _run(Path(folder), index, own)
        _leave(own["result"], lambda file: torch.save(result, file))
    except BaseException as error:  # SystemExit too: only its files say how a rank ended
        words = (type(error).__name__, str(error), traceback_of(error), time.time())
        _leave(own["exception"], lambda file: file.write_bytes(pickle.dumps(words)))
        time.sleep(LINGER_S)
        sys.exit(1)


def _end_with_the_launcher(stack: Path) -> None:
    """End when the launcher is gone; write the Python stack when the launcher ends this rank."""
    threading.Thread(target=_watch_the_launcher, daemon=True).start()
    file = stack.open("w")
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # another's fork server may ignore SIGTERM
        faulthandler.register(number, file, all_threads=True, chain=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also from within a collective


def _watch_the_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _leave(file: Path, write: Callable[[Path], Any]) -> None:
    """A file is there as a whole or not at all."""
    part = file.with_suffix(".part")
    write(part)
    part.replace(file)


def _run(folder: Path, index: int, own: dict[str, Path]) -> Any:
    torch.set_num_threads(1)
    job: Job = torch.load(folder / "job", map_location="cpu", weights_only=False)
    device = _device(job.device_kind)  # before anything else looks at a device
    force_numerics(find(job.device_kind))
    random.seed(job.seed)
    numpy.random.seed(job.seed)
    torch.manual_seed(job.seed)
    stack = job.recipe.build(_first_calls(own["called"]))
    group = _join(job, index, device)
    rank = Rank(index, group.size(), device, group, Collectives(own["collectives"]))
    result = job.program(rank, stack, *job.arguments)
    dist.destroy_process_group()  # who still waits for this rank is told
    return result


def _first_calls(file: Path) -> Callable[[str], None]:
    """Writes a role into the file at its first call, at once: the rank may be killed in it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    called = set[str]()

    def note(role: str) -> None:
        if role not in called:
            called.add(role)
            os.write(descriptor, f"{role}\n".encode())

    return note


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        importlib.import_module("torch_npu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(kind).set_device(device)
    return device


def _join(job: Job, index: int, device: torch.device) -> dist.ProcessGroup:
    """The default group, by the launcher's store and under the name of this job."""
    timeout = timedelta(seconds=GROUP_TIMEOUT * job.timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        BACKENDS[device.type],
        store=PrefixStore(f"ranks/{os.environ['TORCHELASTIC_RUN_ID']}", store),
        rank=index,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    return dist.group.WORLD  # type: ignore[return-value]  # it was made a line before
