"""M6. The clip sees the norm of the whole gradient, wherever its parts are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gates import distributed, rank_programs, toys
from gates.distributed import Spread
from harness import gate
from harness.compare import max_abs_error, relative_error

SOURCE = "Pascanu et al. 2013, algorithm 1, of all elements, each once"
NORM_TYPES = {"2": 2.0, "inf": math.inf}
BECAUSE = "a float32 sum against float64"
# 25 squares of 1 sharded, 12 replicated.
HAND = (Spread("sharded", torch.full((5, 5), 1.0)), Spread("replicated", torch.full((12,), 1.0)))


def random_gradients(rng, world_size):
    """Gradients of several shapes and scales, spread in every way there is; some small."""
    shapes = {"sharded": [(6, 5), (1,), (7, 3)], "plain": [(4, 4)], "replicated": [(5,), (3, 2)]}
    shapes["replicas of shards"] = [(8, 3), (2,)]
    if world_size == 4:
        shapes["sharded twice"] = [(5, 6)]
    return tuple(
        Spread(kind, torch.randn(shape, generator=rng) * 2.0**index)
        for kind, several in shapes.items()
        for index, shape in enumerate(several)
    )


@gate(
    claim="norm and factor are those of all elements, shards summed and replicas counted once",
    roles=["clip_grad_norm"],
    not_claimed="gradients that are partial sums",
    source=f"{SOURCE}; pytorch/pytorch#170862: the local norm; mindspore-ai/hyper-parallel#279: "
    "replicas counted once a rank; pytorch/pytorch#180346: gradients on different meshes",
)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_spread_gradients(stack, ranks, world_size, norm_type, rng, check):
    gradients = random_gradients(rng, world_size)
    power = NORM_TYPES[norm_type]
    before = torch.cat([gradient.values.flatten() for gradient in gradients]).double()
    want = float(torch.linalg.vector_norm(before, power))
    limits = {"below the limit": 2 * want, "above the limit": want / 3}
    results = ranks.run(
        rank_programs.clipped, gradients, list(limits.values()), power, world_size=world_size
    )
    for index, (case, limit) in enumerate(limits.items()):
        clips = [result[index] for result in results]
        check(f"different norms: {case}", len({clip.norm for clip in clips}), equal=1,
              because="every rank must take the same decision")  # fmt: skip
        ratio = clips[0].norm / want
        check(f"norm / that of all elements: {case}", ratio, within=(1 - 1e-6, 1 + 1e-6),
              because=BECAUSE)  # fmt: skip
        for clip in clips:
            after = torch.cat([gradient.flatten() for gradient in clip.gradients]).double()
            if limit > want:
                check("largest change below the limit", max_abs_error(after, before), equal=0.0,
                      because="nothing to clip")  # fmt: skip
            else:
                check(
                    "relative error of the clipped gradient",
                    relative_error(after, before * (limit / want)),
                    at_most=3e-6,
                    because="one factor for all of them, on every rank, in float32",
                )


@gate(
    claim="25 squares over shards and 12 in replicas have the norm sqrt(37) on any number of ranks",
    roles=["clip_grad_norm"],
    not_claimed="anything beyond these numbers",
    source="mindspore-ai/hyper-parallel#279: replicas in the sum over ranks give sqrt(25 + 12 W)",
)
def test_replicas_count_once(stack, ranks, world_size, check):
    results = ranks.run(rank_programs.clipped, HAND, [1.0], 2.0, world_size=world_size)
    for (clip,) in results:
        check("norm", clip.norm, within=(37**0.5 * (1 - 1e-6), 37**0.5 * (1 + 1e-6)),
              because="sqrt(25 + 12) in float32; 7 if two ranks count replicas twice")  # fmt: skip


@gate(
    claim="the gradient of all ranks is clipped once, after their sum and before the step",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="Adam's own step, which epsilon outweighs here",
    source="facebookresearch/lingua PR#59, over ranks instead of microbatches: W orthogonal "
    "gradients of equal length give steps of 1/sqrt(W), clipped one by one 1/W",
)
def test_once_after_the_sum(stack, ranks, world_size, check):
    directions = [[8.0 * (i == j) for i in range(world_size)] for j in range(world_size)]
    start = distributed.start_of(toys.LinearLoss(directions, start_D=[0.0] * world_size))
    shares = [toys.rows(toys.row([rank])) for rank in range(world_size)]
    results = ranks.run(
        rank_programs.updated, start, [shares], toys.plain_descent(1.0), world_size=world_size
    )
    want = world_size**-0.5
    for result in results:
        for part in -result.parameters["lm_head.weight"][0]:
            check("step along each rank's axis", part, within=(want - 1e-5, want + 1e-5),
                  because=f"1/sqrt({world_size}), in float32")  # fmt: skip
        norm = 8 * want
        check("recorded norm", result.records[0].grad_norm, within=(norm - 1e-5, norm + 1e-5),
              because="8/sqrt(W): of the mean over all targets, before clipping")  # fmt: skip


@gate(
    claim="the step of a distributed model is the clipped gradient of the token mean",
    roles=["distribute", "accumulate", "clip_grad_norm", "param_groups", "update_window"],
    not_claimed="Adam's own step, which epsilon outweighs here",
    source=SOURCE,
)
def test_displacement(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    shares = distributed.ragged_shares(rng, [(9, 0), (1, 4), (16, 2), (0, 3)][:world_size], 2)
    _, gradient = toys.token_mean(model, distributed.together(shares))
    start, plans, norms = distributed.start_of(model), {}, {}
    for name, power in NORM_TYPES.items():
        norms[name] = float(torch.linalg.vector_norm(toys.flat(gradient), power))
        settings = toys.plain_descent(max_norm=norms[name] / 3)
        plans[name] = (start, [shares], replace(settings, norm_type=power))
    results = ranks.run(rank_programs.updated_by_each, plans, world_size=world_size)
    before = toys.flat({name: start.values[name] for name in gradient})
    bound = max(toys.rounding(toys.working_dtype(stack)), 1e-6)
    for result in results:
        for name, norm in norms.items():
            ratio = result[name].records[0].grad_norm / norm
            check(f"norm / that of the token mean: {name}", ratio, within=(1 - bound, 1 + bound),
                  because="the same gradient, its norm in float32 or wider")  # fmt: skip
            step = before - toys.flat(result[name].parameters)
            check(
                f"relative error of the step: {name}",
                relative_error(step, toys.flat(gradient) / 3),
                at_most=100 * bound,
                because="a third of the gradient; its step is subtracted from weights 10 times it",
            )
