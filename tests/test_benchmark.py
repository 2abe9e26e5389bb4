"""The benchmark: its bound is an order statistic, and its exit status says whether it held."""

import pytest

pytest.importorskip("transformers")

from candidates.peers import benchmark


@pytest.mark.parametrize(
    ("num_pairs", "rank"),
    # From a table of the binomial distribution: P(Binomial(n, 1/2) >= rank) >= 0.95.
    [(5, 1), (8, 2), (12, 3), (24, 8), (30, 11)],
)
def test_the_bound_is_the_order_statistic_of_the_table(num_pairs, rank):
    assert benchmark.lower_bound_of_median(list(range(1, num_pairs + 1))) == rank


def test_four_pairs_give_no_bound():
    with pytest.raises(ValueError, match="4 pairs give no lower bound"):
        benchmark.lower_bound_of_median([1.0, 1.0, 1.0, 1.0])


def test_a_slow_reference_exits_1_and_names_the_shape(capsys):
    asked = ["--shape", "bytes-0.09m", "--seconds", "0.1", "--threads", "1"]
    assert benchmark.main([*asked, "--at-least", "0.01"]) == 0
    assert benchmark.main([*asked, "--at-least", "100"]) == 1
    output = capsys.readouterr().out
    assert "NOT SHOWN to be at least 100.0 times as fast: bytes-0.09m" in output


def test_threads_below_1_are_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--threads", "0"])
    assert "--threads must be at least 1, got 0" in capsys.readouterr().err
