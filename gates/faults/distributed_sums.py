"""Wrong ways for ranks to make one gradient of theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gates.faults.accumulation import microbatch_nll
from harness import fault
from reference.group import sum_counts, sum_floats, sum_gradients
from reference.update import WindowStats

GATE = "m6_update::"
GRADIENT = [f"{GATE}test_gradient[3]"]
EXAMPLE = [f"{GATE}test_hand_example[2]"]
FIVE = f"{GATE}test_five_updates[2]"


@dataclass(frozen=True)
class Counts:
    """Targets and tokens here and on all ranks, ranks, microbatches: what factors are made of."""

    own: int
    tokens: int
    everywhere: int
    tokens_everywhere: int
    ranks: int
    microbatches: int


def counts_of(model, window, group):
    device = next(model.parameters()).device
    own = [window.num_targets, window.num_tokens]
    return Counts(
        *own,
        *sum_counts(own, group, device),
        1 if group is None else dist.get_world_size(group),
        len(window.microbatches),
    )


def over_ranks(factor, reduce=sum_gradients, after=lambda model, group: None):
    """An accumulate: backward nll_sum * factor(counts, microbatch), `after` each, then `reduce`."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        counts = counts_of(model, window, group)
        nll_total = 0.0
        for microbatch in window.microbatches:
            nll_sum = microbatch_nll(model, microbatch)
            (nll_sum * factor(counts, microbatch) * loss_scale).backward()
            nll_total += float(nll_sum.detach())
            after(model, group)
        reduce(model.parameters(), group)
        scaled = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(scaled, loss_scale)
        device = next(model.parameters()).device
        nll_total = sum_floats(nll_total, group, device)
        return WindowStats(nll_total, counts.everywhere, counts.tokens_everywhere)

    return accumulate


def over_all_targets(counts, microbatch):
    return 1 / max(counts.everywhere, 1)


def average_gradients(parameters, group):
    """What DDP does: the sum over ranks, divided by their number."""
    parameters = list(parameters)
    sum_gradients(parameters, group)
    for parameter in parameters:
        if parameter.grad is not None and group is not None:
            parameter.grad /= dist.get_world_size(group)


# --- the denominator -------------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=[
        *(f"{GATE}test_gradient[{ranks}]" for ranks in (2, 3, 4)),
        *(f"{GATE}test_hand_example[{ranks}]" for ranks in (2, 3, 4)),
        FIVE,
        "m6_clip::test_displacement[2]",
    ],
    seen_in="huggingface/transformers#34242, PR#34373, PrimeIntellect-ai/prime-rl PR#1957",
)
def mean_of_the_ranks_means(reference):
    """Divides by the rank's own targets and averages over ranks, as DDP does."""
    return over_ranks(lambda counts, microbatch: 1 / max(counts.own, 1), average_gradients)


@fault(
    role="accumulate",
    caught_by=[*GRADIENT, *EXAMPLE, "m6_wrapping::test_beside_ddp[2]"],
    seen_in="pytorch/torchtitan PR#2206",
)
def averages_what_is_divided(reference):
    """Divides by the targets of all ranks, and still averages: 1/W of the gradient."""
    return over_ranks(over_all_targets, average_gradients)


@fault(
    role="accumulate",
    caught_by=[*GRADIENT, *EXAMPLE],
    seen_in="pytorch/torchtitan PR#1803",
)
def sum_of_the_ranks_means(reference):
    """Divides by the rank's own targets and sums over ranks: W times too much."""
    return over_ranks(lambda counts, microbatch: 1 / max(counts.own, 1))


@fault(role="accumulate", caught_by=GRADIENT, seen_in="vllm-project/speculators PR#942")
def weighs_ranks_by_positions(reference):
    """Weighs the ranks' means by their positions, of which all have as many."""
    return over_ranks(
        lambda counts, microbatch: counts.tokens / (counts.tokens_everywhere * max(counts.own, 1))
    )


@fault(role="accumulate", caught_by=GRADIENT, seen_in="vllm-project/speculators PR#942")
def divides_by_positions_of_all_ranks(reference):
    """Divides by all positions of all ranks instead of the targets."""
    return over_ranks(lambda counts, microbatch: 1 / counts.tokens_everywhere)


@fault(
    role="accumulate",
    caught_by=GRADIENT,
    seen_in="PrimeIntellect-ai/prime-rl PR#2562, pytorch/torchtitan PR#2206",
)
def mean_of_microbatches_over_ranks(reference):
    """Divides each microbatch by its targets on all ranks, then by the number of microbatches."""

    def accumulate(model, window, group, loss_scale=1.0):
        device = next(model.parameters()).device
        own = [microbatch.num_targets for microbatch in window.microbatches]
        everywhere = iter(sum_counts(own, group, device))
        return over_ranks(
            lambda counts, microbatch: 1 / (max(next(everywhere), 1) * counts.microbatches)
        )(model, window, group, loss_scale)

    return accumulate


@fault(
    role="accumulate",
    caught_by=GRADIENT,
    seen_in="ecmwf/WeatherGenerator PR#2718, pytorch/pytorch#116349",
)
def rank_without_targets_divides_by_zero(reference):
    """Takes sum / count of the rank, NaN where it has no target, and weighs it by its share."""

    def factor(counts, microbatch):
        mean = 1 / torch.tensor(float(counts.own))
        return mean * counts.own / max(counts.everywhere, 1)

    return over_ranks(factor)


# --- the reduction ---------------------------------------------------------------------------


@fault(role="accumulate", caught_by=[*GRADIENT, FIVE], seen_in="own")
def keeps_gradients_to_itself(reference):
    """Does not reduce the gradients at all."""
    return over_ranks(over_all_targets, lambda parameters, group: None)


@fault(role="accumulate", caught_by="m6_collectives::test_killed_rank[2]", seen_in="own")
def trains_alone(reference):
    """Takes no notice of the other ranks, so it misses none that dies."""
    return lambda model, window, group, loss_scale=1.0: reference.accumulate(
        model, window, None, loss_scale
    )


@fault(
    role="accumulate",
    caught_by=[*GRADIENT, FIVE],
    seen_in="huggingface/accelerate PR#1726 (its inverse: no_sync on the last microbatch)",
)
def does_not_reduce_the_last_microbatch(reference):
    """Reduces what there is before the last microbatch, whose gradient stays on its rank."""

    def accumulate(model, window, group, loss_scale=1.0):
        seen = []

        def after(model, group):
            seen.append(1)
            if len(seen) == len(window.microbatches) - 1:
                sum_gradients(model.parameters(), group)

        nothing = over_ranks(over_all_targets, lambda parameters, group: None, after)
        return nothing(model, window, group, loss_scale)

    return accumulate


@fault(role="accumulate", caught_by=GRADIENT, seen_in="own")
def reduces_what_was_reduced(reference):
    """Sums the accumulated gradient over ranks after every microbatch: the first counts W times."""
    return over_ranks(
        over_all_targets,
        lambda parameters, group: None,
        lambda model, group: sum_gradients(model.parameters(), group),
    )


@fault(
    role="accumulate",
    caught_by=[f"{GATE}test_gradient[4]", "m6_wrapping::test_hybrid_mesh[4]"],
    seen_in="own",
)
def sums_within_a_host(reference):
    """Sums over pairs of ranks, as within a host, and not between them."""

    def reduce(parameters, group):
        pairs, _ = dist.new_subgroups(2)
        sum_gradients(parameters, pairs)

    return over_ranks(over_all_targets, reduce)


@fault(
    role="accumulate",
    caught_by="m6_collectives::test_traffic[2]",
    seen_in="huggingface/accelerate PR#1726, KellerJordan/modded-nanogpt PR#31, "
    "facebookresearch/ClassyVision PR#706",
)
def reduces_after_every_microbatch(reference):
    """Sums every microbatch's own gradient over ranks: right, and k times the traffic."""

    def accumulate(model, window, group, loss_scale=1.0):
        totals = {p: torch.zeros_like(p) for p in model.parameters()}

        def after(model, group):
            sum_gradients(model.parameters(), group)
            for parameter, total in totals.items():
                total += parameter.grad
                parameter.grad = None

        def put_back(parameters, group):
            for parameter, total in totals.items():
                parameter.grad = total

        return over_ranks(over_all_targets, put_back, after)(model, window, group, loss_scale)

    return accumulate


@fault(
    role="accumulate",
    caught_by="m6_collectives::test_every_rank_takes_part[2]",
    seen_in="lightseekorg/TorchSpec#126, PR#138",
)
def skips_a_rank_without_targets(reference):
    """Goes on to the next window where this rank has no target, while the others reduce."""

    def accumulate(model, window, group, loss_scale=1.0):
        if window.num_targets == 0:
            model.zero_grad()
            return WindowStats(0.0, 0, window.num_tokens)
        return reference.accumulate(model, window, group, loss_scale)

    return accumulate
