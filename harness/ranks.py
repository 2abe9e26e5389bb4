"""Running one program in several ranks: the fixtures ``ranks`` and ``world_size``.

::

    results = ranks.run(program, *arguments, world_size=world_size)

calls ``program(rank, stack, *arguments)`` in every rank and returns the results in rank order.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.contract import not_run
from harness.devices import find
from harness.launcher import SHUTDOWN_S, Hosts, Launcher
from harness.portable import Recipe
from harness.rank_ends import Failure, RankEnd, RanksFailed, failure_of, read_end
from harness.rank_process import BACKENDS, Job

MARGIN_S = 30  # beyond the deadline, for another host to tell how its ranks ended


@dataclass(frozen=True)
class Outcome:
    """What became of a job that may fail: every rank's end, and why not all finished."""

    ends: tuple[RankEnd, ...]
    failure: Failure | None

    @property
    def results(self) -> list[Any]:
        """The results in rank order; None where a rank did not finish."""
        return [end.result for end in self.ends]


class Session:
    """What is common to all jobs: how many ranks, where, with which deadline; starts lazily."""

    def __init__(self, num_ranks: int, hosts: Hosts, timeout_s: float, device_kind: str) -> None:
        self.num_ranks, self.hosts = num_ranks, hosts
        self.timeout_s, self.device_kind = timeout_s, device_kind
        self._launcher: Launcher | None = None
        self._unmet = ""  # why the hosts never met

    @property
    def launcher(self) -> Launcher:
        """Started by the first job; RuntimeError at once where that failed before."""
        __tracebackhide__ = True
        if self._unmet:
            raise RuntimeError(self._unmet)
        if self._launcher is None:
            try:
                self._launcher = Launcher(self.hosts)
            except RuntimeError as error:
                self._unmet = str(error)
                raise
        return self._launcher

    def describe(self) -> dict[str, Any]:
        """As the evidence keeps it."""
        return {
            "num": self.num_ranks,
            "backend": BACKENDS[self.device_kind],
            "num_hosts": self.hosts.num,
            "host": self.hosts.index,
            "timeout_s": self.timeout_s,
        }

    def why_not(self, world_size: int) -> str:
        """Why a job of ``world_size`` ranks cannot run here, one sentence; empty if it can."""
        if world_size % self.hosts.num:
            return f"{world_size} ranks cannot be dealt evenly to {self.hosts.num} hosts."
        if missing := missing_backend(self.device_kind):
            return missing
        if too_few := self._too_few_devices(world_size // self.hosts.num):
            return too_few
        if world_size > self.num_ranks:
            return (f"{world_size} ranks are more than --ranks {self.num_ranks}; "
                    f"give --ranks {world_size}.")  # fmt: skip
        return ""

    def _too_few_devices(self, num_local: int) -> str:
        if self.device_kind == "cpu":
            return ""
        num_devices = num_devices_of(self.device_kind)
        if num_local <= num_devices:
            return ""
        kind = {"cuda": "GPU", "npu": "NPU"}[self.device_kind]
        return f"{num_local} ranks need {num_local} {kind}s; this machine has {num_devices}."


def num_devices_of(kind: str) -> int:
    """The devices of a kind on this machine, of which every rank needs one."""
    if find(kind).missing:
        return 0
    return int(torch.get_device_module(kind).device_count())


def missing_backend(kind: str) -> str:
    """Which backend torch was built without, one sentence; empty if none."""
    if not dist.is_available():
        return f"PyTorch {torch.__version__} was built without torch.distributed."
    if not dist.is_gloo_available():
        return f"PyTorch {torch.__version__} was built without the backend gloo."
    if kind == "cuda" and not dist.is_nccl_available():
        return f"PyTorch {torch.__version__} was built without the backend nccl."
    return ""


class Ranks:
    """Runs programs in ranks for one gate, on the stack that the gate has on trial."""

    def __init__(
        self, session: Session, recipe: Recipe, seed: int, gate: str,
        called: set[str], world_sizes: set[int],
    ) -> None:  # fmt: skip
        """``called`` and ``world_sizes`` take what the ranks called, and how many there were."""
        self._session, self._recipe, self._seed = session, recipe, seed
        self._gate, self._called, self._world_sizes = gate, called, world_sizes

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        world_size: int,
        may_fail: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """``[program(rank, stack, *arguments) for every rank]``, each in a process of its own.

        Arguments and results are pickled; their tensors arrive on the CPU. The default process
        group is initialised, the random generators have the gate's seed on every rank, each rank
        has one thread. Calls of the candidate's roles count as the gate's own. All ranks are
        ended when one fails, or when ``timeout_s`` (default ``--rank-timeout``) are over.

        With ``may_fail`` an ``Outcome`` is returned, whose ``failure`` a gate can measure.

        Raises:
            RanksFailed: not all ranks finished; it says which did not, and what each did last.
            ValueError: the program is not at the top of an importable module, no rank.
        """
        __tracebackhide__ = True
        _refuse_a_program_without_a_name(program)
        if world_size < 1:
            raise ValueError(f"world_size {world_size}: a job has at least one rank")
        reason = self._session.why_not(world_size)
        if reason:
            not_run(reason)
        deadline_s = self._session.timeout_s if timeout_s is None else timeout_s
        kind = self._session.device_kind
        job = Job(program, arguments, self._recipe, kind, self._seed, deadline_s)
        ends, late = self._launch(job, world_size)
        for end in ends:
            self._called |= end.called
        self._world_sizes.add(world_size)
        failure = failure_of(ends, deadline_s, late)
        if may_fail:
            return Outcome(tuple(ends), failure)
        if failure:
            raise RanksFailed(failure)
        return [end.result for end in ends]

    def _launch(self, job: Job, world_size: int) -> tuple[list[RankEnd], bool]:
        """How every rank ended, those of other hosts too, and whether a deadline was over."""
        __tracebackhide__ = True
        launcher, hosts = self._session.launcher, self._session.hosts
        mine = f"{self._gate}, {job.program.__qualname__} in {world_size} ranks"
        for host, theirs in enumerate(launcher.share("the job", mine, job.timeout_s + MARGIN_S)):
            if theirs != mine:
                launcher.parted = (
                    f"host {host} is at {theirs}, this one at {mine}; start every host with the "
                    "same options"
                )
                raise RuntimeError(launcher.parted)
        num_local = world_size // hosts.num
        with tempfile.TemporaryDirectory(prefix="touchstone-ranks-") as name:
            folder = Path(name)
            torch.save(job, folder / "job")
            statuses, late = launcher.launch(folder, num_local, job.timeout_s)
            first = hosts.index * num_local
            local = [read_end(folder, index, index - first, statuses.get(index), late)
                     for index in range(first, first + num_local)]  # fmt: skip
        patience_s = job.timeout_s + SHUTDOWN_S + MARGIN_S
        shared = launcher.share("its ranks", (local, late), patience_s)
        ends = [end for ends_of_host, _ in shared for end in ends_of_host]
        return ends, any(late for _, late in shared)


def _refuse_a_program_without_a_name(program: Callable[..., Any]) -> None:
    module, name = getattr(program, "__module__", ""), getattr(program, "__qualname__", "")
    if getattr(importlib.import_module(module) if module else None, name, None) is not program:
        raise ValueError(
            f"ranks run a function at the top of an importable module; {name or program} of "
            f"{module or 'nowhere'} is not, so that no rank can find it"
        )
