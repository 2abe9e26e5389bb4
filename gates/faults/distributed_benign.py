"""Other right ways for ranks to make one update."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gates.faults.distributed_clip import clip_by, whole_norm
from gates.faults.distributed_sums import average_gradients, over_all_targets, over_ranks
from harness import benign

UPDATE = [f"m6_update::test_{name}" for name in ("gradient", "hand_example", "five_updates")]
ACCEPTED = [
    *UPDATE,
    "m6_update::test_not_finite",
    "m6_precision::test_low_bit",
    "m6_precision::test_float16_scale",
    "m6_collectives::test_every_rank_takes_part",
    "m6_wrapping::test_beside_ddp",
]


def some(gates, *cases):
    """The gates in these cases only, where every case would cost a launch and show no more."""
    return [f"{gate}[{case}]" for gate in gates for case in cases]


def in_one_buffer(parameters, group):
    """One all-reduce of all gradients, as buckets make it."""
    if group is None:
        return
    parameters = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter).clone()


@benign(
    role="accumulate",
    accepted_by=some(ACCEPTED[:4], 3) + some(ACCEPTED[5:], 3),
    because="W times the gradient, averaged over W ranks",
)
def averages_w_times_the_gradient(reference):
    """Backwards W S_r / N and averages, as DDP does."""
    return over_ranks(
        lambda counts, microbatch: counts.ranks / max(counts.everywhere, 1), average_gradients
    )


@benign(
    role="accumulate",
    accepted_by=some([*ACCEPTED[:4], *ACCEPTED[5:], "m6_collectives::test_traffic"], 4),
    because="one buffer holds the same sums",
)
def reduces_in_one_buffer(reference):
    """Reduces all gradients in one buffer."""
    return over_ranks(over_all_targets, in_one_buffer)


@benign(
    role="accumulate",
    accepted_by=[*some(ACCEPTED[:4], 4), "m6_precision::test_low_bit[4-float32]"],
    because="a sum over ranks in their order is one of its orders",
)
def adds_gathered_gradients_up(reference):
    """Gathers the ranks' gradients and adds them up from the last rank to the first."""

    def reduce(parameters, group):
        for parameter in parameters:
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, parameter.grad.contiguous(), group=group)
            parameter.grad = sum(reversed(parts[:-1]), parts[-1])

    return over_ranks(over_all_targets, reduce)


@benign(
    role="accumulate",
    accepted_by=some(ACCEPTED[:3], 2) + some(ACCEPTED[6:], 2),
    because="a common factor may come last, and N then too",
)
def divides_after_the_reduction(reference):
    """Backwards S_r, sums over ranks, and divides by N at the end."""
    summed = over_ranks(lambda counts, microbatch: 1.0)

    def accumulate(model, window, group, loss_scale=1.0):
        stats = summed(model, window, group, loss_scale)
        for parameter in model.parameters():
            parameter.grad /= max(stats.num_targets, 1)
        return stats

    return accumulate


@benign(
    role="accumulate",
    accepted_by=some(UPDATE, 2),
    because="a reduction at every microbatch has the same sum (its traffic is another matter)",
)
def reduces_every_microbatch_too(reference):
    """Sums every microbatch's own gradient over ranks."""
    from gates.faults.distributed_sums import reduces_after_every_microbatch

    return reduces_after_every_microbatch.build(reference)


@benign(
    role="clip_grad_norm",
    accepted_by=[
        *(f"m6_clip::test_spread_gradients[{ranks}-{norm}]" for ranks in (2, 4)
          for norm in ("2", "inf")),
        *some(["m6_clip::test_replicas_count_once", "m6_clip::test_displacement"], 4),
    ],
    because="the norm of gathered gradients, in float64",
)  # fmt: skip
def norm_of_gathered_gradients(reference):
    """Gathers every gradient and takes the norm in float64."""
    return clip_by(whole_norm)
