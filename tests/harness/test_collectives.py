"""Every collective is seen, whoever issues it, with the bytes that a rank hands in."""

import pytest
import rank_programs as programs
from rank_programs import LINEAR_BYTES

from harness.collectives import Collective, read
from harness.launcher import Hosts
from harness.portable import Recipe
from harness.ranks import Ranks, Session


@pytest.fixture(scope="module")
def ranks():
    session = Session(4, Hosts(), 30.0, "cpu")
    return Ranks(session, Recipe("reference.stack", (), "cpu", None), 0, "a test", set(), set())


@pytest.fixture
def run(ranks):
    def run(program, world_size=2):
        first, *others = ranks.run(program, world_size=world_size)
        assert all(other == first for other in others)
        return first

    return run


def test_of_the_reducer_of_ddp(run):
    counts, num_bytes = run(programs.ddp)
    assert counts == {"all_reduce": 1}
    assert num_bytes == {"all_reduce": 2 * LINEAR_BYTES}


def test_of_fsdp2(run):
    """Both layers are gathered forward, the last one not again, and reduced backward."""
    counts, num_bytes = run(programs.fsdp2)
    assert counts == {"all_gather": 3, "reduce_scatter": 2}
    assert num_bytes == {"all_gather": 3 * LINEAR_BYTES // 2, "reduce_scatter": 2 * LINEAR_BYTES}


def test_from_within_dtensors(run):
    counts, num_bytes = run(programs.dtensors)
    assert counts == {"all_reduce": 1, "all_gather": 1}
    assert num_bytes == {"all_reduce": 4, "all_gather": 4 * 32}


def test_of_every_kind(run):
    counts, num_bytes = run(programs.every_kind)
    mine = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "send", "recv")
    assert counts == dict.fromkeys([*mine, "reduce_scatter", "all_to_all", "barrier"], 1)
    assert num_bytes == {
        **dict.fromkeys(mine, 12), "reduce_scatter": 24, "all_to_all": 24, "barrier": 0,
    }  # fmt: skip


def test_of_functional_collectives(run):
    counts, num_bytes = run(programs.functional)
    assert counts == {"all_reduce": 1, "all_gather": 1}
    assert num_bytes == {"all_reduce": 12, "all_gather": 20}


def test_of_a_part_of_the_ranks(ranks):
    assert ranks.run(programs.in_a_part, world_size=3) == [[2], [2], []]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    file = tmp_path / "collectives"
    file.write_bytes(b'["all_reduce", 16, 2]\n["all_red')
    assert read(file) == [Collective("all_reduce", 16, 2)]
    assert read(tmp_path / "nothing") == []
