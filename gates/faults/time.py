"""Wrong and right ways to compute time, utilization and throughput."""

from __future__ import annotations

import math
from dataclasses import replace

from harness import benign, fault
from reference.ledger.time import Throughput, TrainingTime, Utilization

HOURS = "m0_time::test_published_utilizations"
ON_RANKS = "m0_time::test_published_ranks"
AGREE = "m0_time::test_time_and_utilization_agree"
MEASURED = "m0_time::test_measured_utilization"
RECOMPUTATION = "m0_time::test_recomputation"
AT_MOST_ONE = "m0_time::test_at_most_one"
ACCUMULATION = "m0_time::test_any_accumulation"
PADDED = "m0_time::test_padded_and_real"


@fault(role="training_time", caught_by=[HOURS, AGREE], seen_in="own")
def utilization_ignored(reference):
    """Plans with the peak itself."""
    return lambda flops, ranks, peak, utilization: reference.training_time(flops, ranks, peak, 1.0)


@fault(role="training_time", caught_by=[HOURS, AGREE], seen_in="own")
def utilization_multiplied(reference):
    """Multiplies the time by the utilization: the worse it is used, the sooner it ends."""

    def training_time(flops, num_ranks, peak_flops_per_s, utilization):
        whole = reference.training_time(flops, num_ranks, peak_flops_per_s, 1.0)
        return replace(whole, time_s=whole.time_s * utilization)

    return training_time


@fault(
    role="training_time",
    caught_by=[f"{ON_RANKS}[8-132.12]", f"{ON_RANKS}[64-16.51]", HOURS],
    seen_in="own",
)
def peak_of_one_rank(reference):
    """Divides by the peak of one rank, however many there are."""

    def training_time(flops, num_ranks, peak_flops_per_s, utilization):
        alone = reference.training_time(flops, 1, peak_flops_per_s, utilization)
        return replace(alone, num_ranks=num_ranks)

    return training_time


def judged_by(change):
    """A utilization role in which `change(fraction, flops)` replaces the fraction."""

    def build(reference):
        def utilization(flops, time_s, num_ranks, peak_flops_per_s):
            right = reference.model_flops_utilization(flops, time_s, num_ranks, peak_flops_per_s)
            return replace(right, fraction=change(right.fraction, flops))

        return utilization

    return build


@fault(role="model_flops_utilization", caught_by=RECOMPUTATION, seen_in="own")
def hfu_reported_as_mfu(reference):
    """Counts what the hardware did and calls it what the model needs."""
    return judged_by(lambda fraction, flops: fraction * flops.hardware_total / flops.model_total)(
        reference
    )


@fault(role="hardware_flops_utilization", caught_by=[RECOMPUTATION, AT_MOST_ONE], seen_in="own")
def mfu_reported_as_hfu(reference):
    """Leaves recomputation out of what the hardware did."""
    return judged_by(lambda fraction, flops: fraction)(reference)


@fault(role="model_flops_utilization", caught_by=MEASURED, seen_in="pytorch/torchtitan PR#280")
def full_scores_against_a_causal_plan(reference):
    """Counts 12 L T N H in the run while the plan's convention says 6."""

    def change(fraction, flops):
        charged_again = flops.attention_per_token * (flops.convention.kappa == 6)
        return fraction * (flops.model_per_token + charged_again) / flops.model_per_token

    return judged_by(change)(reference)


@fault(role="model_flops_utilization", caught_by=AT_MOST_ONE, seen_in="pytorch/torchtitan PR#280")
def more_than_the_peak(reference):
    """Reports more than 100 % without a word."""

    def model_flops_utilization(flops, time_s, num_ranks, peak_flops_per_s):
        fraction = flops.model_total / (time_s * num_ranks * peak_flops_per_s)
        return Utilization(fraction, "model FLOPs", flops.convention.text)

    return model_flops_utilization


@fault(role="model_flops_utilization", caught_by=AT_MOST_ONE, seen_in="own")
def clamped_to_the_peak(reference):
    """Reports 1 where the numbers give more, which hides a wrong time or convention."""

    def model_flops_utilization(flops, time_s, num_ranks, peak_flops_per_s):
        fraction = flops.model_total / (time_s * num_ranks * peak_flops_per_s)
        return Utilization(min(fraction, 1.0), "model FLOPs", flops.convention.text)

    return model_flops_utilization


@fault(role="model_flops_utilization", caught_by=[MEASURED, RECOMPUTATION], seen_in="own")
def convention_lost(reference):
    """Reports a share without saying what was counted."""

    def model_flops_utilization(flops, time_s, num_ranks, peak_flops_per_s):
        right = reference.model_flops_utilization(flops, time_s, num_ranks, peak_flops_per_s)
        return replace(right, convention="")

    return model_flops_utilization


@fault(role="throughput", caught_by=[ACCUMULATION, PADDED], seen_in="karpathy/nanochat PR#175")
def one_microbatch_over_the_whole_step(reference):
    """Divides the last microbatch's tokens by the time of the whole update."""
    return lambda microbatches, time_s: reference.throughput(microbatches[-1:], time_s)


@fault(role="throughput", caught_by=[ACCUMULATION, PADDED], seen_in="axolotl-ai-cloud/axolotl#3688")
def mean_of_microbatches(reference):
    """Divides the mean microbatch by the time of the whole update."""

    def throughput(microbatches, time_s):
        return reference.throughput(microbatches, time_s * len(microbatches))

    return throughput


@fault(role="token_counts", caught_by=PADDED, seen_in="meta-pytorch/torchtune PR#1875")
def padding_counted_as_real(reference):
    """Calls every position of a padded row a token."""

    def token_counts(microbatch):
        counts = reference.token_counts(microbatch)
        return replace(counts, real=counts.positions)

    return token_counts


@fault(role="token_counts", caught_by=PADDED, seen_in="vllm-project/speculators PR#942")
def tokens_counted_as_supervised(reference):
    """Counts the elements of the labels instead of the labels that are a target."""

    def token_counts(microbatch):
        return replace(reference.token_counts(microbatch), supervised=microbatch.labels.numel())

    return token_counts


@benign(
    role="training_time",
    accepted_by=[HOURS, ON_RANKS, AGREE],
    because="the same factors in another order",
)
def divided_one_by_one(reference):
    """Divides by the utilization first, then by the ranks, then by the peak."""

    def training_time(flops, num_ranks, peak_flops_per_s, utilization):
        return TrainingTime(flops / utilization / num_ranks / peak_flops_per_s, num_ranks)

    return training_time


@benign(
    role="throughput",
    accepted_by=[ACCUMULATION, PADDED],
    because="a sum of rates over one time is the rate of the sum",
)
def sum_of_rates(reference):
    """Adds the microbatches' rates over the time of the whole update."""

    def throughput(microbatches, time_s):
        return Throughput(
            math.fsum(counts.positions / time_s for counts in microbatches),
            math.fsum(counts.real / time_s for counts in microbatches),
            math.fsum(counts.supervised / time_s for counts in microbatches),
        )

    return throughput
