"""A rank that dies, hangs or raises is named, with what every rank did last."""

import pytest
import rank_programs as programs

from harness.launcher import Hosts
from harness.portable import Recipe
from harness.rank_ends import RanksFailed
from harness.ranks import Ranks, Session

SECOND = "issued 2 collectives, the last: all_reduce of 16 bytes among 3"


@pytest.fixture(scope="module")
def attempt():
    """Runs rank 1 into its misfortune, and returns the failure."""
    session = Session(4, Hosts(), 30.0, "cpu")
    ranks = Ranks(session, Recipe("reference.stack", (), "cpu", None), 0, "a test", set(), set())

    def run(how, **options):
        return ranks.run(programs.goes_wrong, how, world_size=3, **options)

    return run


def failure_of(attempt, how, timeout_s=30.0):
    outcome = attempt(how, timeout_s=timeout_s, may_fail=True)
    assert outcome.results == [None, None, None]
    return outcome.failure


@pytest.mark.parametrize(
    ("how", "words"),
    [("kill", "rank 1 died of signal 9 (SIGKILL)"), ("exit", "rank 1 ended itself with exit st"),
     ("vanish", "rank 1 ended without a word")],
)  # fmt: skip
def test_a_rank_that_dies(attempt, how, words):
    failure = failure_of(attempt, how)
    assert (failure.kind, failure.ranks, failure.fewest) == ("died", (1,), (1,))
    assert str(failure).startswith("of 3 ranks, rank 1 died\n")
    assert words in str(failure)
    assert str(failure).count(SECOND) == 2
    assert "a line of rank 1" in str(failure)


@pytest.mark.parametrize(
    ("how", "words"), [("sleep", "was still running"), ("stop", "gave no sign of life")]
)
def test_a_rank_that_is_silent(attempt, how, words):
    failure = failure_of(attempt, how, timeout_s=2.0)
    assert (failure.kind, failure.ranks, failure.fewest) == ("hung", (1,), (1,))
    assert str(failure).startswith("of 3 ranks, rank 1 did not end within 2 s\n")
    assert f"rank 1 {words}" in str(failure)
    assert str(failure).count(SECOND) == 2


def test_a_stack_tells_where_a_rank_was(attempt):
    _, silent, waiting = failure_of(attempt, "sleep", timeout_s=2.0).ends
    assert "rank_programs.py" in silent.log
    assert "in all_reduce" in waiting.log
    assert "forkserver" not in waiting.log


@pytest.mark.parametrize(("how", "words"), [("raise", "KeyError: 'nothing here'"),
                                            ("leave", "SystemExit: 0")])  # fmt: skip
def test_an_exception_comes_back_with_its_rank(attempt, how, words):
    failure = failure_of(attempt, how)
    assert (failure.kind, failure.ranks) == ("raised", (1,))
    assert f"rank 1 raised {words}" in str(failure)
    assert "in goes_wrong" in str(failure)


def test_a_rank_that_leaves_out_a_collective(attempt):
    outcome = attempt("skip", may_fail=True)
    assert outcome.failure.kind == "raised"  # gloo tells who waits that rank 1 has gone
    assert outcome.failure.fewest == (1,)
    assert [len(end.collectives) for end in outcome.ends] == [2, 1, 2]
    assert "fewer collectives than the others: rank 1" in str(outcome.failure)


@pytest.mark.parametrize(
    ("how", "other"), [("kind", "all_gather of 16 bytes"), ("size", "all_reduce of 8 bytes")]
)
def test_ranks_that_issue_different_collectives_are_told_where_they_part(how, other):
    session = Session(2, Hosts(), 30.0, "cpu")
    ranks = Ranks(session, Recipe("reference.stack", (), "cpu", None), 0, "a test", set(), set())
    failure = ranks.run(programs.part, how, world_size=2, timeout_s=5.0, may_fail=True).failure
    assert failure.parting == 1
    told = str(failure)
    assert "they parted at collective 2:" in told
    assert f"rank 0: all_reduce of 16 bytes among 2\nrank 1: {other} among 2" in told


def test_without_may_fail_it_is_an_error(attempt):
    with pytest.raises(RanksFailed, match=r"rank 1 died of signal 9 \(SIGKILL\)") as caught:
        attempt("kill")
    assert caught.value.failure.ranks == (1,)
