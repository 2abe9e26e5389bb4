"""A rank that dies, hangs or raises is named, with what every rank did last."""

import multiprocessing
import os
import re
import signal

import pytest
import rank_programs as programs

from harness import rank_ends
from harness.launcher import Hosts
from harness.portable import Recipe
from harness.rank_ends import RankEnd, RanksFailed
from harness.rank_frames import without_internals
from harness.rank_process import _end_with_the_launcher
from harness.ranks import Ranks, Session

SECOND = "issued 2 collectives, the last: all_reduce of 16 bytes among 3"


@pytest.fixture(scope="module")
def attempt():
    """Runs rank 1 into its misfortune, and returns the failure."""
    session = Session(4, Hosts(), 30.0, "cpu")
    recipe = Recipe("reference.stack", ("rank_programs",), "cpu", None)

    def run(how, called=None, **options):
        ranks = Ranks(session, recipe, 0, "a test", called if called is not None else set(), set())
        return ranks.run(programs.goes_wrong, how, world_size=3, **options)

    return run


def failure_of(attempt, how, timeout_s=30.0):
    called = set()
    outcome = attempt(how, called, timeout_s=timeout_s, may_fail=True)
    assert outcome.results == [None, None, None]
    assert called == {"swiglu"}, "a call counts, however the rank ended that made it"
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
    assert "a line of rank 1" in failure.logs


@pytest.mark.parametrize(
    ("how", "words"), [("sleep", "was still running"), ("stop", "gave no sign of life")]
)
def test_a_rank_that_is_silent(attempt, how, words):
    failure = failure_of(attempt, how, timeout_s=2.0)
    assert (failure.kind, failure.ranks, failure.fewest) == ("hung", (1,), (1,))
    assert str(failure).startswith("of 3 ranks, rank 1 did not end within 2 s\n")
    assert f"rank 1 {words}" in str(failure)
    assert str(failure).count(SECOND) == 2


def test_a_rank_ends_at_sigterm_though_it_inherited_to_ignore_it(tmp_path):
    def rank():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_with_the_launcher(tmp_path / "stack")
        os.kill(os.getpid(), signal.SIGTERM)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM
    assert "in rank\n" in (tmp_path / "stack").read_text()


def test_a_stack_tells_where_a_rank_was(attempt):
    _, silent, waiting = failure_of(attempt, "sleep", timeout_s=2.0).ends
    assert 'in <lambda>\n    "sleep": lambda: time.sleep(100),\n' in silent.log
    for end in (silent, waiting):
        files = re.findall(r'File ".*/(.*)", line', end.log)
        assert set(files) == {"rank_programs.py"}, "no frames of torch, of threads, of the launcher"
    assert "    dist.all_reduce(x)\n" in waiting.log


@pytest.mark.parametrize(("how", "words"), [("raise", "KeyError: 'nothing here'"),
                                            ("leave", "SystemExit: 0")])  # fmt: skip
def test_an_exception_comes_back_with_its_rank(attempt, how, words):
    failure = failure_of(attempt, how)
    assert (failure.kind, failure.ranks) == ("raised", (1,))
    assert f"rank 1 raised {words}" in str(failure)
    assert "in goes_wrong" in failure.logs
    assert failure.logs.startswith("--- rank 1 ---\nTraceback")
    assert failure.logs.split("--- rank")[1].count("Traceback") == 1


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


def run(program, world_size=2):
    session = Session(2, Hosts(), 30.0, "cpu")
    ranks = Ranks(session, Recipe("reference.stack", (), "cpu", None), 0, "a test", set(), set())
    return ranks.run(program, world_size=world_size, may_fail=True).failure


def test_all_ranks_that_raised_the_same_are_named():
    failure = run(programs.fail_alike)
    assert str(failure).startswith("of 2 ranks, rank 0 and 1 raised an exception\n")
    assert "rank 1 raised ValueError: first line …; it issued 1 collective" in str(failure)
    assert "second line" not in str(failure)
    assert failure.logs.startswith("--- rank 0 and 1 ---\nTraceback (most recent call last):\n")
    assert failure.logs.count("\nsecond line") == 1


def test_one_that_raised_other_words_is_not():
    words = ("raised E: 1 of 2", "raised E: gone", "raised E: 2 of 2")
    ends = [RankEnd(i, "raised", words[i], [], ended_s=3.0 - i) for i in range(3)]
    assert rank_ends.failure_of(ends, 1.0, late=False).ranks == (0, 2)


def test_a_traceback_has_no_frames_of_torch():
    logs = run(programs.fail_within_torch, world_size=1).logs
    assert re.findall(r'File ".*/(.*)", line', logs) == ["rank_programs.py"]
    assert "mat1 and mat2" in logs or "size mismatch" in logs


def test_a_message_has_no_frames_of_torch():
    told = "recv failed\nException raised from recv at x.hpp:1 (most recent call first):\n"
    told += "frame #0: c10::Error + 0x80 (0x7f in libc10.so)\nframe #1: <unknown> + 0x1\n\nmore"
    assert without_internals(told) == "recv failed\n\nmore"


def test_without_may_fail_it_is_an_error(attempt):
    with pytest.raises(RanksFailed, match=r"rank 1 died of signal 9 \(SIGKILL\)") as caught:
        attempt("kill")
    assert caught.value.failure.ranks == (1,)
