"""Wrong norms of gradients that are spread over ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness import fault

GATE = "m6_clip::test_spread_gradients"
BOTH = [f"{GATE}[{ranks}-2]" for ranks in (2, 4)]
HAND = ["m6_clip::test_replicas_count_once[3]"]


def local(gradient):
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def is_sharded(gradient):
    return isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)


def power_sum(gradient, norm_type):
    """sum |g|^p of this rank's part, max |g| for inf; 0 for a part of no element."""
    values = local(gradient).double().abs().flatten()
    if math.isinf(norm_type):
        return values.max() if values.numel() else values.new_zeros(())
    return values.pow(norm_type).sum()


def root(total, norm_type):
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def joined(values, norm_type):
    stacked = torch.stack(list(values))
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def over(group, value, norm_type):
    """The values of all ranks, summed, or the largest for inf."""
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    dist.all_reduce(value, operation, group=group)
    return value


def clip_by(norm_of, factor_norm_of=None):
    """A clip that returns norm_of(gradients, norm_type), and scales by factor_norm_of, if given."""

    def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = norm_of(gradients, norm_type)
        other = factor_norm_of(gradients, norm_type) if factor_norm_of else norm
        if norm.isfinite():
            factor = float((max_norm / other).clamp(max=1.0))
            for gradient in gradients:
                local(gradient).mul_(factor)
        return norm

    return clip_grad_norm


def own_norm(gradients, norm_type):
    return root(joined((power_sum(g, norm_type) for g in gradients), norm_type), norm_type)


def whole_norm(gradients, norm_type):
    parts = (g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)
    return root(joined((power_sum(g, norm_type) for g in parts), norm_type), norm_type)


@fault(
    role="clip_grad_norm",
    caught_by=[*BOTH, f"{GATE}[2-inf]", *HAND],
    seen_in="pytorch/pytorch#170862, PrimeIntellect-ai/OpenDiloco PR#6, pytorch/pytorch#72548",
)
def norm_of_the_own_shard(reference):
    """Takes the norm of what this rank holds."""
    return clip_by(own_norm)


@fault(role="clip_grad_norm", caught_by=BOTH[:1], seen_in="pytorch/pytorch#170862")
def factor_of_the_own_shard(reference):
    """Returns the norm of all shards, and scales by the norm of this rank's own."""
    return clip_by(whole_norm, own_norm)


@fault(
    role="clip_grad_norm",
    caught_by=[*BOTH, *HAND],
    seen_in="mindspore-ai/hyper-parallel#279",
)
def replicas_in_the_sum(reference):
    """Sums the squares of all gradients over ranks, those of replicas among them."""

    def norm(gradients, norm_type):
        total = joined((power_sum(g, norm_type) for g in gradients), norm_type)
        return root(over(None, total, norm_type), norm_type)

    return clip_by(norm)


@fault(role="clip_grad_norm", caught_by=f"{GATE}[4-2]", seen_in="mindspore-ai/hyper-parallel#279")
def replicas_of_shards_in_the_sum(reference):
    """Sums the squares of shards over all ranks, also where some hold the same shard."""

    def norm(gradients, norm_type):
        shards = [power_sum(g, norm_type) for g in gradients if is_sharded(g)]
        plain = [power_sum(g, norm_type) for g in gradients if not is_sharded(g)]
        total = over(None, joined(shards, norm_type), norm_type)
        return root(joined([total, *plain], norm_type), norm_type)

    return clip_by(norm)


@fault(role="clip_grad_norm", caught_by=BOTH, seen_in="pytorch/pytorch#180346")
def item_of_another_mesh(reference):
    """Sums over the first mesh, and reads what this rank holds of the others."""

    def norm(gradients, norm_type):
        first = next(g.device_mesh for g in gradients if is_sharded(g))
        there = [g for g in gradients if is_sharded(g) and g.device_mesh == first]
        rest = [g for g in gradients if not any(g is other for other in there)]
        total = joined((power_sum(g, norm_type) for g in there), norm_type)
        total = over(first.get_group(0), total, norm_type)
        others = [power_sum(g, norm_type) for g in rest]
        return root(joined([total, *others], norm_type), norm_type)

    return clip_by(norm)


@fault(role="clip_grad_norm", caught_by=BOTH, seen_in="own")
def mean_of_the_ranks_norms(reference):
    """Averages the norms of what the ranks hold."""

    def norm(gradients, norm_type):
        value = own_norm(gradients, norm_type)
        dist.all_reduce(value)
        return value / dist.get_world_size()

    return clip_by(norm)


@fault(
    role="clip_grad_norm",
    caught_by=[f"{GATE}[{ranks}-inf]" for ranks in (2, 3)],
    seen_in="own",
)
def sums_the_largest(reference):
    """Sums the ranks' largest elements for the norm inf, as it sums squares for the norm 2."""

    def norm(gradients, norm_type):
        shards = [power_sum(g, norm_type) for g in gradients if is_sharded(g)]
        plain = [power_sum(g, norm_type) for g in gradients if not is_sharded(g)]
        total = joined(shards, norm_type)
        dist.all_reduce(total)
        return root(joined([total, *plain], norm_type), norm_type)

    def by_type(gradients, norm_type):
        return (norm if math.isinf(norm_type) else whole_norm)(gradients, norm_type)

    return clip_by(by_type)


@fault(
    role="clip_grad_norm",
    caught_by=[f"{GATE}[1-inf]", "m6_clip::test_displacement[1]"],
    seen_in="own",
)
def always_the_2_norm(reference):
    """Takes no notice of norm_type."""
    return lambda parameters, max_norm, group, norm_type=2.0: reference.clip_grad_norm(
        parameters, max_norm, group
    )
