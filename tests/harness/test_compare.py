"""Every comparison, with NaN, infinity, nothing to compare, other shapes and its own memory."""

import pytest
import torch

from harness.compare import (
    PIECE,
    error_ratio,
    max_abs_error,
    max_error_ratio,
    place,
    relative_error,
    rounding_floor,
    sign_bias,
    worst_relative,
)

ONE = torch.tensor([3.0, 4.0])
PAIRWISE = pytest.mark.parametrize("compare", [relative_error, max_abs_error])


def test_relative_error_is_the_norm_of_the_difference_over_that_of_the_wanted():
    assert relative_error(ONE + torch.tensor([0.0, 5.0]), ONE) == 1.0
    assert relative_error(ONE.clone(), ONE) == 0.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(ONE, torch.zeros(2)) == float("inf")


def test_relative_error_sees_the_last_element_of_more_than_one_piece():
    want = torch.ones(2, PIECE + 1).T  # which is not contiguous
    got = want.clone()
    got[-1, -1] = 2.0
    assert relative_error(got, want) == pytest.approx((2 * PIECE + 2) ** -0.5)
    got[-1, -1] = float("nan")
    assert not relative_error(got, want) <= 1e300


def test_tensors_are_compared_where_both_are_if_float64_is_there():
    there = torch.empty(2, device="meta")  # a device of which nothing is known
    for tensors in ((ONE, ONE), (there, there), (ONE, there)):
        assert place(*tensors) == torch.device("cpu")
    if torch.cuda.is_available():
        on_gpu = ONE.cuda()
        assert place(on_gpu, on_gpu).type == "cuda"
        assert place(on_gpu, ONE).type == "cpu"
        assert relative_error(on_gpu * 2, on_gpu) == relative_error(on_gpu * 2, ONE) == 1.0


def test_max_abs_error_sees_one_wrong_element():
    got = torch.zeros(10**6)
    got[123456] = 0.5
    assert max_abs_error(got, torch.zeros(10**6)) == 0.5


@PAIRWISE
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_makes_the_distance_so(compare, bad):
    spoiled = torch.tensor([3.0, bad])
    for distance in (compare(spoiled, ONE), compare(ONE, spoiled)):
        assert not distance <= 1e300


@PAIRWISE
def test_what_would_compare_nothing_is_refused(compare):
    with pytest.raises(ValueError, match="shapes differ"):
        compare(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="no element"):
        compare(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="same memory"):
        compare(ONE, ONE.view(2))


def test_differences_below_float32_are_seen_in_float64():
    want = torch.ones(2, dtype=torch.float64)
    assert relative_error(want + 1e-12, want) == pytest.approx(1e-12, rel=1e-3)


def test_the_worst_tensor_counts():
    want = {"a": torch.ones(3), "b": torch.ones(3)}
    got = {"a": torch.ones(3), "b": torch.ones(3) * 1.5}
    assert worst_relative(got, want) == 0.5
    got["a"] = torch.tensor([1.0, float("nan"), 1.0])
    assert not worst_relative(got, want) <= 1e300


@pytest.mark.parametrize("got", [{}, {"a": ONE}, {"a": ONE, "b": ONE, "c": ONE}])
def test_other_names_are_refused(got):
    with pytest.raises(ValueError, match="names differ"):
        worst_relative(got, {"a": ONE + 0, "b": ONE + 0})
    with pytest.raises(ValueError, match="there are none"):
        worst_relative({}, {})


def test_error_ratio_is_against_the_plain_formula_in_the_same_dtype():
    oracle = torch.linspace(0, 1, 101, dtype=torch.float64) / 3
    plain = oracle.to(torch.bfloat16)
    assert error_ratio(plain.clone(), plain, oracle) == pytest.approx(0.5)
    assert error_ratio(plain * 1.5, plain, oracle) > 30
    assert not error_ratio(plain * float("nan"), plain, oracle) <= 1e300


def test_the_floor_is_the_error_of_storing_the_oracle():
    assert rounding_floor(torch.tensor([1.0, 0.5]), torch.bfloat16) == 0.0
    assert rounding_floor(torch.tensor([1.0 + 2**-9]), torch.bfloat16) == 2**-9
    with pytest.raises(ValueError, match="no element"):
        rounding_floor(torch.zeros(0), torch.bfloat16)


def test_the_largest_error_counts_where_a_mean_forgives():
    oracle = torch.rand(10**6, dtype=torch.float64)
    plain = oracle.float()
    got = plain.clone()
    got[123456] += 1e-5
    assert error_ratio(got, plain, oracle) < 1.0
    assert max_error_ratio(got, plain, oracle) > 50
    assert max_error_ratio(plain.clone(), plain, oracle) <= 0.5
    assert not max_error_ratio(got * float("nan"), plain, oracle) <= 1e300


def test_errors_that_no_rounding_excuses_have_an_infinite_ratio():
    exact = torch.tensor([1.0, 0.5], dtype=torch.float64)
    got = torch.tensor([1.0, 0.5 + 2**-20])
    assert max_error_ratio(got, exact.float(), exact) == float("inf")
    assert error_ratio(got, exact.float(), exact) == float("inf")


def test_truncation_is_a_bias_and_rounding_is_none():
    oracle = torch.randn(10**5, dtype=torch.float64)
    rounded = oracle.float().bfloat16()
    cut = (oracle.float().view(torch.int32) & -65536).view(torch.float32)
    assert abs(sign_bias(rounded, oracle)) < 2**-8 / 100
    assert sign_bias(cut, oracle) < -(2**-10)
    assert sign_bias(oracle * 1.25, oracle) == pytest.approx(0.25)
    assert not abs(sign_bias(rounded * float("nan"), oracle)) <= 1e300
