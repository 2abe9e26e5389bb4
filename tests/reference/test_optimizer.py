"""The optimizer refuses what would train wrongly without a word."""

import math

import pytest
import torch
from torch import nn

from candidates.distributed.clip import clip_grad_norm as distributed_clip
from reference.optimizer import AdamState, clip_grad_norm, optimizer_step, param_groups


def with_gradient(*values, dtype=torch.float32):
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def step(parameter, state=None, rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0):
    groups = [{"params": [parameter], "weight_decay": weight_decay}]
    optimizer_step(groups, {} if state is None else state, rate, betas, epsilon)


def test_the_clip_works_on_the_whole_gradient():
    first, second = with_gradient(3.0), with_gradient(0.0, 4.0)
    assert clip_grad_norm([first, second], 1.0, None) == 5.0
    assert torch.allclose(first.grad, torch.tensor([0.6]))
    assert torch.allclose(second.grad, torch.tensor([0.0, 0.8]))


def test_a_small_gradient_is_not_touched():
    parameter = with_gradient(0.3, 0.4)
    clip_grad_norm([parameter], 1.0, None)
    assert torch.equal(parameter.grad, torch.tensor([0.3, 0.4]))


def test_a_limit_at_the_norm_is_not_passed():
    parameter = with_gradient(3.0, 4.0)
    clip_grad_norm([parameter], 5.0, None)
    assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_an_infinite_limit_never_clips(value):
    parameter = with_gradient(value)
    assert clip_grad_norm([parameter], math.inf, None) == value
    assert parameter.grad == value


def test_zero_gradients_stay_zero():
    parameter = with_gradient(0.0, 0.0)
    assert clip_grad_norm([parameter], 1.0, None) == 0.0
    assert torch.equal(parameter.grad, torch.zeros(2))


def test_the_norm_of_float64_gradients_is_float64():
    assert clip_grad_norm([with_gradient(1.0, dtype=torch.float64)], 1.0, None).dtype == (
        torch.float64
    )


@pytest.mark.parametrize(
    "clip", [clip_grad_norm, distributed_clip], ids=["reference", "distributed"]
)
def test_gradients_of_two_widths_have_one_norm(clip):
    norm = clip([with_gradient(3.0), with_gradient(4.0, dtype=torch.float64)], 1.0, None)
    assert norm.dtype == torch.float64 and norm.item() == 5.0


def test_no_gradient_has_norm_zero():
    assert clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0, None) == 0.0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match="max_norm must be > 0"):
        clip_grad_norm([with_gradient(1.0)], limit, None)


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ValueError, match="group must be None"):
        clip_grad_norm([with_gradient(1.0)], 1.0, object())


@pytest.mark.parametrize("norm_type", [1.0, 0.0, -math.inf, math.nan])
def test_a_norm_of_another_type_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be 2 or inf"):
        clip_grad_norm([with_gradient(1.0)], 1.0, None, norm_type)


def test_the_infinity_norm_is_the_largest_element_of_all():
    first, second = with_gradient(3.0), with_gradient(1.0, -4.0)
    assert clip_grad_norm([first, second], 1.0, None, math.inf) == 4.0
    assert torch.equal(first.grad, torch.tensor([0.75]))
    assert torch.equal(second.grad, torch.tensor([0.25, -1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_without_room_for_small_updates_are_refused(dtype):
    with pytest.raises(ValueError, match="set compute_dtype"):
        step(with_gradient(1.0, dtype=dtype))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rate": -1e-3}, "learning_rate"),
        ({"rate": math.nan}, "learning_rate"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"epsilon": 0.0}, "epsilon"),
    ],
)
def test_values_out_of_range_are_named(changed, name):
    with pytest.raises(ValueError, match=name):
        step(with_gradient(1.0), **changed)


def test_a_refused_step_changes_nothing():
    parameter, state = with_gradient(1.0), {}
    with pytest.raises(ValueError, match="epsilon"):
        step(parameter, state, epsilon=0.0)
    assert parameter.item() == 0.0 and state == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_have_the_parameters_dtype(dtype):
    parameter, state = with_gradient(1.0, dtype=dtype), {}
    step(parameter, state)
    adam = state[parameter]
    assert isinstance(adam, AdamState) and adam.step == 1
    assert adam.first_moment.dtype == adam.second_moment.dtype == dtype


def test_a_tied_parameter_is_in_one_group_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    decaying, rest = param_groups(model, 0.1)
    assert [len(decaying["params"]), len(rest["params"])] == [1, 2]


@pytest.mark.parametrize("weight_decay", [-0.1, math.nan])
def test_a_negative_decay_is_refused(weight_decay):
    with pytest.raises(ValueError, match="weight_decay must be >= 0"):
        param_groups(nn.Linear(2, 2), weight_decay)
