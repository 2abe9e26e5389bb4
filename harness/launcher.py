"""Starts the ranks of one job with torch's elastic launcher, on one host or several.

A job costs 0.1 s on a CPU: a fork server that has imported torch forks the ranks, and one store
serves all jobs of a session.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness import rank_process
from harness.formatting import listing

PRELOADED = [  # what a rank would import otherwise, in seconds; what is missing is left out
    "harness.rank_process",
    "torch.distributed.fsdp",
    "torch._inductor.config",  # imported by torch.use_deterministic_algorithms
    "reference.stack",
    "gates.distributed",
]
MONITOR_INTERVAL_S = 0.02
SHUTDOWN_S = 2  # between SIGTERM and SIGKILL; torch 2.11 has no option for it and waits up to 30
SHUTDOWN: dict[str, Any] = (
    {"shutdown_timeout": SHUTDOWN_S}
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    else {}
)
MEETING_S = 300  # how long one host waits for the others at the start
NOISY = (
    "torchelastic-events-null",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)  # what they log, RanksFailed says better
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a session: how many, which of them this is, and where they meet."""

    num: int = 1
    index: int = 0
    endpoint: str = "localhost:0"


def start_fork_server() -> ForkServerProcess:
    """Starts what forks the ranks, and its first process, which ends when all is imported.

    A process has one fork server, with the preloads and the ignored signals of who starts it first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=int)
    process.start()
    return process


class Launcher:
    """Runs one job after the other; on several hosts every host runs the same ones.

    Raises:
        RuntimeError: no port, or the other hosts do not come.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.parted = ""  # why the hosts have lost each other, if they have
        self._num_jobs = 0
        self._address, _, port = hosts.endpoint.rpartition(":")
        first = hosts.index == 0
        try:
            self._store = TCPStore(
                self._address,
                int(port),
                is_master=first,
                timeout=timedelta(seconds=MEETING_S),
                wait_for_workers=False,
                multi_tenant=True,  # the elastic agent of every job listens at the same port
            )
        except (dist.DistError, OSError) as error:
            what = "cannot listen at" if first else "finds no first host at"
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"the ranks' store {what} {hosts.endpoint}: {reason}") from None
        for name in NOISY:
            logging.getLogger(name).disabled = True
        server_is_there = start_fork_server()  # so that no deadline counts its start
        server_is_there.join()

    def launch(self, folder: Path, num_local: int, timeout_s: float) -> tuple[dict[int, int], bool]:
        """Run ``rank_process.main(folder)`` in ``num_local`` ranks of this host, to the end of all.

        Returns the exit statuses of ranks that the launcher saw fail, and whether the job was
        ended because ``timeout_s`` were over. All are ended when one fails. Nothing is left
        running, whatever happens here.

        Raises:
            KeyboardInterrupt: the launcher was interrupted, or told to terminate.
        """
        self._num_jobs += 1
        config = LaunchConfig(
            min_nodes=self.hosts.num,
            max_nodes=self.hosts.num,
            nproc_per_node=num_local,
            run_id=str(self._num_jobs),
            rdzv_backend="static",
            rdzv_endpoint=f"{self._address}:{self._store.port}",
            rdzv_configs={"rank": self.hosts.index, "timeout": MEETING_S},
            local_addr=self._address,
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
            **SHUTDOWN,
        )
        try:
            with _signals_restored(), _no_process_left():
                signal.signal(signal.SIGALRM, _too_late)
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                elastic_launch(config, rank_process.main)(str(folder))
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}, False
        except SignalException as error:
            if error.sigval != signal.SIGALRM:
                raise KeyboardInterrupt from error
            return {}, True
        return {}, False

    def share(self, what: str, mine: Any, timeout_s: float) -> list[Any]:
        """What every host says of ``what`` in the job to come or the one just done, by host.

        Raises:
            RuntimeError: a host says nothing within ``timeout_s``, or did so before.
        """
        __tracebackhide__ = True
        if self.hosts.num == 1:
            return [mine]
        self.refuse_if_parted()
        place, hosts = f"hosts/{self._num_jobs}/{what}", range(self.hosts.num)
        timeout = timedelta(seconds=timeout_s)
        try:
            self._store.set(f"{place}/{self.hosts.index}", pickle.dumps(mine))  # type: ignore[arg-type]
            keys = [f"{place}/{host}" for host in hosts]
            self._store.wait(keys, timeout)
            said = [pickle.loads(self._store.get(key)) for key in keys]
            self._store.set(f"{place}/read by {self.hosts.index}", "")
            if self.hosts.index == 0:  # the store is here, and stays until everybody has read
                self._store.wait([f"{place}/read by {host}" for host in hosts], timeout)
        except dist.DistError:
            self.parted = f"{self._silent(place)} nothing of {what} within {timeout_s:g} s; " + (
                "does every host run the same gates with the same options, and is it still there? "
                "--rank-timeout gives it more time"
            )
            raise RuntimeError(self.parted) from None
        return said

    def _silent(self, place: str) -> str:
        """Which hosts have not told, or else not read what the others told, and the verb."""

        def missing(kind: str) -> str:
            keys = {str(host): f"{place}/{kind}{host}" for host in range(self.hosts.num)}
            return listing([host for host, key in keys.items() if not self._store.check([key])])

        try:
            silent = missing("")
            return f"host {silent} told" if silent else f"host {missing('read by ')} read"
        except dist.DistError:
            return "host 0, with the store, is gone; it told"

    def refuse_if_parted(self) -> None:
        """Raise RuntimeError at once when the hosts have lost each other in an earlier job."""
        __tracebackhide__ = True
        if self.parted:
            raise RuntimeError(self.parted)


def _too_late(number: int, frame: object) -> NoReturn:
    raise SignalException("the deadline is over", signal.SIGALRM)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The elastic launcher leaves its own handlers behind."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_process_left() -> Iterator[None]:
    """A signal may come while ranks are being started, when the launcher does not end them."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
