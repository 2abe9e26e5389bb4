"""What the distributed candidates refuse, and what they leave as it was, on one rank."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from candidates.distributed import ddp, ddp_after, ddp_sum, fsdp2
from candidates.distributed.bench.__main__ import main
from candidates.distributed.clip import clip_grad_norm
from candidates.distributed.replicas import group_of
from gates import toys
from reference.distribute import DistributionSettings, named_parameters
from reference.stack import ROLES

CANDIDATES = [ddp, ddp_sum, ddp_after, fsdp2]
STACK = SimpleNamespace(**ROLES)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    return init_device_mesh("cpu", (1,), mesh_dim_names=("data",))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ROLES["build_model"](toys.TINY, STACK)


@pytest.fixture
def window():
    return toys.ragged_window(torch.Generator().manual_seed(1), (9, 0, 2, 5)).split(2)


def of(parameter):
    gradient = parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def with_gradient(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_plain_model_in_one_process_has_the_references_gradient(candidate, model, window):
    want_stats = ROLES["accumulate"](model, window, None)
    want = toys.gradients(model)
    stats = candidate.accumulate(model, window, None)
    assert (stats.num_targets, stats.num_tokens) == (16, 64)
    assert stats.nll_sum == pytest.approx(want_stats.nll_sum, rel=1e-6)
    got = toys.gradients(model)
    assert all(torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-7) for name in want)


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(candidate, model, mesh, window):
    wrapped = candidate.distribute(model, mesh, DistributionSettings())
    candidate.accumulate(wrapped, window, dist.group.WORLD)
    plain = {name: of(p) for name, p in named_parameters(wrapped)}
    candidate.accumulate(wrapped, window, dist.group.WORLD, 2.0**10)
    assert all(torch.equal(of(p), plain[name]) for name, p in named_parameters(wrapped))


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_distributed_model_without_its_group_is_refused(candidate, model, mesh, window):
    wrapped = candidate.distribute(model, mesh, DistributionSettings())
    with pytest.raises(ValueError, match="needs the group"):
        candidate.accumulate(wrapped, window, None)


@pytest.mark.parametrize("candidate", [ddp, fsdp2])
def test_a_plain_model_on_several_ranks_is_refused(candidate, model, window, monkeypatch, group):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(ValueError, match="needs a model from distribute"):
        candidate.accumulate(model, window, group)


@pytest.mark.parametrize("candidate", [ddp, fsdp2])
@pytest.mark.parametrize(
    "settings, words",
    [
        (DistributionSettings(compute_dtype=torch.bfloat16), "no compute_dtype"),
        (DistributionSettings(checkpoint_activations=True), "no `layers`"),
    ],
)
def test_settings_without_a_place_are_refused(candidate, settings, words, mesh):
    with pytest.raises(ValueError, match=words):
        candidate.distribute(nn.Linear(2, 2), mesh, settings)


def test_a_mesh_of_three_dimensions_is_refused(group):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="1-D, or 2-D"):
        group_of(mesh)


def test_a_mesh_that_the_ranks_do_not_fill_is_refused(group):
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)mesh"):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def test_partial_sums_are_no_gradients(mesh):
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="partial sum"):
        clip_grad_norm(with_gradient(partial), 1.0, None)


@pytest.mark.parametrize("max_norm, norm_type", [(0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1, 0)])
def test_a_limit_that_clips_everything_is_refused(max_norm, norm_type):
    with pytest.raises(ValueError, match="must be > 0"):
        clip_grad_norm(with_gradient(torch.ones(3)), max_norm, None, norm_type)


def test_a_norm_of_nothing_is_zero():
    assert clip_grad_norm([nn.Parameter(torch.ones(3))], 1.0, None) == 0


@pytest.mark.parametrize("norm_type, want", [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
def test_every_norm_type(norm_type, want, mesh):
    sharded = distribute_tensor(torch.tensor([3.0]), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.tensor([-4.0]), mesh, [Replicate()])
    empty = distribute_tensor(torch.zeros(0), mesh, [Shard(0)])
    parameters = with_gradient(sharded, replicated, empty)
    norm = clip_grad_norm(parameters, 1.0, None, norm_type)
    assert norm == pytest.approx(want)
    assert of(parameters[1]) == pytest.approx(-4.0 / want)


def test_a_norm_that_is_not_finite_leaves_the_gradients():
    parameters = with_gradient(torch.tensor([3.0, math.inf]))
    assert clip_grad_norm(parameters, 1.0, None) == math.inf
    assert parameters[0].grad.tolist() == [3.0, math.inf]


def test_the_head_stays_the_embedding_under_fsdp2(model, mesh):
    wrapped = fsdp2.distribute(model, mesh, DistributionSettings(checkpoint_activations=True))
    assert wrapped.module.lm_head.weight is wrapped.module.embed_tokens.weight
    assert isinstance(wrapped.module.lm_head.weight, DTensor)


def test_the_benchmark_runs_on_a_cpu(capsys):
    arguments = ["--preset", "smoke", "--device", "cpu", "--pairs", "5", "--rows", "1"]
    assert main([*arguments, "--tokens", "16"]) == 0
    assert "fsdp2" in capsys.readouterr().out
