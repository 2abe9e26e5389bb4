"""A program runs in several ranks, and every rank's result comes back."""

import multiprocessing
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest
import rank_programs as programs
import torch

import harness.launcher
import harness.ranks
from harness.launcher import Hosts, Launcher
from harness.portable import Recipe
from harness.rank_ends import RanksFailed
from harness.ranks import Ranks, Session, missing_backend

RECIPE = Recipe("reference.stack", (), "cpu", None)


def ranks_of(session, recipe=RECIPE):
    return Ranks(session, recipe, seed=5, gate="a test", called=set(), world_sizes=set())


@pytest.fixture(scope="module")
def session():
    return Session(4, Hosts(), 30.0, "cpu")


@pytest.fixture
def ranks(session):
    return ranks_of(session)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(ranks, world_size):
    results = ranks.run(programs.who, world_size=world_size)
    assert [result[:4] for result in results] == [
        (index, world_size, "cpu", 1) for index in range(world_size)
    ]
    assert len({pid for *_, pid in results}) == world_size


def test_the_ranks_are_in_one_group(ranks):
    results = ranks.run(programs.sum_of_indices, torch.tensor([1.0, 5.0]), world_size=4)
    assert [result.tolist() for result in results] == [[10.0, 26.0]] * 4


def test_every_rank_draws_the_same_and_so_does_the_next_job(ranks):
    draws = [
        torch.stack(result)
        for _ in range(2)
        for result in ranks.run(programs.draw, torch.Generator().manual_seed(3), world_size=2)
    ]
    assert all(torch.equal(draw, draws[0]) for draw in draws)


def test_the_stack_is_that_of_the_recipe(session):
    x = torch.ones(2)
    (right,) = ranks_of(session).run(programs.a_role, x, world_size=1)
    fault = Recipe("reference.stack", (), "cpu", ("gates.faults.operators", "gates_with_a_gelu"))
    (wrong,) = ranks_of(session, fault).run(programs.a_role, x, world_size=1)
    assert not torch.equal(right, wrong)


def test_a_result_that_cannot_be_pickled_is_the_ranks_own_failure(ranks):
    with pytest.raises(RanksFailed, match=r"of 2 ranks, rank .* raised an exception") as caught:
        ranks.run(programs.unpicklable, world_size=2)
    assert "pickle" in str(caught.value)


@pytest.mark.parametrize("program", [lambda rank, stack: 0, {}.get, "who"])
def test_a_program_has_a_name_that_a_rank_can_find(ranks, program):
    with pytest.raises(ValueError, match="at the top of an importable module"):
        ranks.run(program, world_size=1)


def test_no_rank_is_no_job(ranks):
    with pytest.raises(ValueError, match="world_size 0"):
        ranks.run(programs.who, world_size=0)


def test_more_ranks_than_asked_for_are_not_run(ranks):
    with pytest.raises(pytest.skip.Exception, match=r"5 ranks are more than --ranks 4"):
        ranks.run(programs.who, world_size=5)


def test_three_ranks_on_two_hosts_are_not_run():
    session = Session(4, Hosts(2, 0, "localhost:1"), 30.0, "cpu")
    assert session.why_not(3) == "3 ranks cannot be dealt evenly to 2 hosts."
    assert not session.why_not(4)


def test_more_ranks_than_devices_are_not_run(monkeypatch):
    """What is missing is a device, whatever --ranks says: its default is their number."""
    monkeypatch.setattr(harness.ranks, "missing_backend", lambda kind: "")
    monkeypatch.setattr(harness.ranks, "num_devices_of", lambda kind: 1)
    session = Session(1, Hosts(), 30.0, "cuda")
    assert session.why_not(2) == "2 ranks need 2 GPUs; this machine has 1."
    assert session.why_not(1) == ""


def test_a_backend_that_is_not_built_in(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "was built without the backend nccl" in missing_backend("cuda")
    assert missing_backend("cpu") == ""


def test_a_port_that_is_taken():
    first = Launcher(Hosts())
    taken = f"localhost:{first._store.port}"
    script = f"from harness.launcher import Hosts, Launcher; Launcher(Hosts(2, 0, {taken!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"RuntimeError: the ranks' store cannot listen at {taken}" in done.stderr


@pytest.fixture
def endpoint():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def test_a_host_that_says_nothing_is_named(endpoint):
    launcher = Launcher(Hosts(3, 0, endpoint))
    launcher._store.set("hosts/0/the job/1", pickle.dumps("here"))
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^host 2 told nothing of the job within 1 s.*"
                                               "--rank-timeout gives"):  # fmt: skip
            launcher.share("the job", "here", 1.0)
    assert time.monotonic() - start < 0.5, "the second time at once"


def test_a_first_host_that_never_came_is_waited_for_once(endpoint, monkeypatch):
    monkeypatch.setattr(harness.launcher, "MEETING_S", 1)
    session = Session(4, Hosts(2, 1, endpoint), 30.0, "cpu")
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=f"finds no first host at {endpoint}: "):
            _ = session.launcher
    assert time.monotonic() - start < 0.5, "the second time at once"


def test_the_handlers_of_signals_are_as_before(ranks):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    ranks.run(programs.who, world_size=2)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert not multiprocessing.active_children()
