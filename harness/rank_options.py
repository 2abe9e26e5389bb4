"""The options of ranks, the fixture ``ranks``, and the cases of ``world_size``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.portable import Recipe
    from harness.ranks import Ranks, Session

WORLD_SIZES = (1, 2, 3, 4)
NUM_RANKS_ON_CPU = 4
SESSION = pytest.StashKey["Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("touchstone")
    group.addoption(
        "--ranks",
        type=int,
        metavar="N",
        help=f"the most ranks of a distributed gate, over all hosts; gates ask for 1 to "
        f"{WORLD_SIZES[-1]} (default {NUM_RANKS_ON_CPU} on the CPU, else one a device)",
    )
    group.addoption(
        "--rank-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="when ranks that have not ended are ended (default 60)",
    )
    group.addoption("--nnodes", type=int, default=1, metavar="N", help="hosts (default 1)")
    group.addoption("--node-rank", type=int, metavar="I", help="which host this is, from 0")
    group.addoption("--rdzv-endpoint", metavar="HOST:PORT", help="where the hosts meet: host 0")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.ranks is not None and option.ranks < 1:
        raise pytest.UsageError(f"--ranks {option.ranks}: give at least 1")
    if not option.rank_timeout > 0:
        raise pytest.UsageError(f"--rank-timeout {option.rank_timeout}: give more than 0 seconds")
    if option.nnodes < 1:
        raise pytest.UsageError(f"--nnodes {option.nnodes}: give at least 1")
    if option.nnodes == 1:
        if option.node_rank is not None or option.rdzv_endpoint is not None:
            raise pytest.UsageError("--node-rank and --rdzv-endpoint need --nnodes 2 or more")
        return
    if option.node_rank is None or not 0 <= option.node_rank < option.nnodes:
        raise pytest.UsageError(
            f"--node-rank {option.node_rank}: with --nnodes {option.nnodes} give each host its "
            f"own number from 0 to {option.nnodes - 1}"
        )
    host, _, port = (option.rdzv_endpoint or "").rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise pytest.UsageError(
            f"--rdzv-endpoint {option.rdzv_endpoint}: give the HOST:PORT of host 0 to every host"
        )
    if option.ranks is not None and option.ranks % option.nnodes:
        raise pytest.UsageError(
            f"--ranks {option.ranks}: they cannot be dealt evenly to {option.nnodes} hosts"
        )
    if getattr(option, "numprocesses", None):
        raise pytest.UsageError("several hosts run the gates in the same order; leave out -n")


def session_of(config: pytest.Config) -> Session:
    """The ranks' session of this process."""
    from harness.launcher import Hosts
    from harness.ranks import Session, num_devices_of

    if SESSION not in config.stash:
        option = config.option
        hosts, kind = Hosts(), option.device
        if option.nnodes > 1:
            hosts = Hosts(option.nnodes, option.node_rank, option.rdzv_endpoint)
        num_ranks = option.ranks
        if num_ranks is None:
            num_here = NUM_RANKS_ON_CPU // hosts.num
            if kind != "cpu":
                num_here = num_devices_of(kind)
            num_ranks = max(1, num_here) * hosts.num
        config.stash[SESSION] = Session(num_ranks, hosts, option.rank_timeout, kind)
    return config.stash[SESSION]


@pytest.fixture
def ranks(request: pytest.FixtureRequest, recipe: Recipe) -> Ranks:
    """Runs a program in several ranks: ``ranks.run(program, *arguments, world_size=2)``."""
    from harness.fixtures import seed_of
    from harness.judge import called_by, world_sizes_of
    from harness.ranks import Ranks

    item = request.node
    session = session_of(request.config)
    noted = called_by(item), world_sizes_of(item)
    return Ranks(session, recipe, seed_of(item), item.nodeid, *noted)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks' fork server before a gate starts another, which would be the only one."""
    option = session.config.option
    if option.collectonly or option.setupplan:
        return
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        from harness.launcher import start_fork_server

        start_fork_server()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames and not _parametrised(metafunc):
        metafunc.parametrize("world_size", WORLD_SIZES)


def _parametrised(metafunc: pytest.Metafunc) -> bool:
    """Whether the gate chooses its world sizes itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    return any("world_size" in str(mark.args[0]) for mark in marks)


def is_too_large(item: pytest.Item) -> bool:
    """Whether --ranks leaves this case out. Two ranks are never left out: they are NOT_RUN.

    With several hosts the sizes that cannot be dealt evenly are left out too.
    """
    callspec = getattr(item, "callspec", None)
    world_size: Any = callspec.params.get("world_size") if callspec else None
    if not isinstance(world_size, int):
        return False
    session = session_of(item.config)
    if world_size % session.hosts.num:
        return True
    return world_size > max(session.num_ranks, 2)
