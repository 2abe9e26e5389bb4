"""Runs whose counts, rates or rows depend on how many ranks there are."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from gates.faults.distributed_sums import EXAMPLE, FIVE, GRADIENT, over_ranks
from harness import fault
from reference.group import sum_floats
from reference.window import Window

RECORDS = "m6_counters::test_records"


def num_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def updating_with(reference, **roles):
    """An update_window that sees other roles in the stack."""

    def update_window(training, window, stack, settings):
        made = {role: make(stack) for role, make in roles.items()}
        return reference.update_window(training, window, stack.replace(made), settings)

    return update_window


@fault(
    role="learning_rate",
    caught_by=[f"{RECORDS}[{ranks}-trim]" for ranks in (2, 4)],
    seen_in="huggingface/accelerate#662, huggingface/diffusers#9633",
)
def schedule_steps_once_a_rank(reference):
    """Moves along the schedule W times as fast on W ranks."""
    return lambda tokens, schedule: reference.learning_rate(tokens * num_ranks(), schedule)


@fault(
    role="update_window",
    caught_by=[f"{RECORDS}[2-trim]", f"{RECORDS}[3-overshoot]"],
    seen_in="karpathy/nanochat PR#175 (over ranks)",
)
def counts_its_own_share(reference):
    """Counts and rates by the tokens of this rank's share; the gradient is right."""

    def own(stack):
        def accumulate(model, window, group, loss_scale):
            stats = stack.accumulate(model, window, group, loss_scale)
            return replace(stats, num_targets=window.num_targets, num_tokens=window.num_tokens)

        return accumulate

    return updating_with(reference, accumulate=own)


@fault(role="update_window", caught_by=f"{RECORDS}[2-overshoot]", seen_in="own")
def multiplies_its_own_share(reference):
    """Takes the tokens of all ranks to be W times its own."""

    def estimated(stack):
        def accumulate(model, window, group, loss_scale):
            stats = stack.accumulate(model, window, group, loss_scale)
            targets, tokens = (n * num_ranks() for n in (window.num_targets, window.num_tokens))
            return replace(stats, num_targets=targets, num_tokens=tokens)

        return accumulate

    return updating_with(reference, accumulate=estimated)


@fault(
    role="train",
    caught_by=[f"{RECORDS}[2-trim]", f"{RECORDS}[2-overshoot]"],
    seen_in="own",
)
def total_for_each_rank(reference):
    """Takes total_tokens to be the tokens of one rank: W times as many in all."""

    def train(config, stack, windows, settings, seed, device, total_tokens, *arguments):
        total = total_tokens and total_tokens * num_ranks()
        more = [*windows, *windows]
        return reference.train(config, stack, more, settings, seed, device, total, *arguments)

    return train


@fault(
    role="train",
    caught_by=[f"m6_counters::test_every_row_once[{ranks}]" for ranks in (2, 3)],
    seen_in="metagene-ai/metagene-pretrain PR#18",
)
def looks_ahead_into_the_next_rank(reference):
    """Lets each rank read the first rows of the next one as well, to fill its share."""

    class Greedy(Window):
        def share(self, index, num_shares):
            own, following = (
                Window.share(self, which % num_shares, num_shares) for which in (index, index + 1)
            )
            return Window((*own.microbatches, *following.microbatches[:1]))

    def train(config, stack, windows, *arguments):
        greedy = [Greedy(window.microbatches) for window in windows]
        return reference.train(config, stack, greedy, *arguments)

    return train


@fault(
    role="train",
    caught_by=[f"{RECORDS}[2-trim]", f"{RECORDS}[3-overshoot]", f"{RECORDS}[4-trim]"],
    seen_in="own",
)
def counts_rows_that_stand_in(reference):
    """Counts what a rank without a row of a microbatch goes through in its place as read."""

    class Counting(Window):
        def share(self, index, num_shares):
            own = Window.share(self, index, num_shares)
            return Window(tuple(replace(m, is_stand_in=False) for m in own.microbatches))

    def train(config, stack, windows, *arguments):
        counting = [Counting(window.microbatches) for window in windows]
        return reference.train(config, stack, counting, *arguments)

    return train


@fault(
    role="accumulate",
    caught_by=[*GRADIENT, *EXAMPLE, FIVE],
    seen_in="karpathy/nanochat PR#175",
)
def reports_its_own_sums(reference):
    """Reports the loss and the counts of its own share, while the gradient is right."""

    def accumulate(model, window, group, loss_scale=1.0):
        own = over_ranks(lambda counts, microbatch: 1.0)(model, window, None)
        reference.accumulate(model, window, group, loss_scale)
        return own

    return accumulate


@fault(
    role="accumulate",
    caught_by=[*GRADIENT, *EXAMPLE, FIVE],
    seen_in="huggingface/transformers#34242 (what was logged)",
)
def logs_the_mean_of_means(reference):
    """Reports the mean over ranks of the ranks' mean losses, while the gradient is right."""

    def accumulate(model, window, group, loss_scale=1.0):
        own = over_ranks(lambda counts, microbatch: 1.0)(model, window, None)
        stats = reference.accumulate(model, window, group, loss_scale)
        device, ranks = next(model.parameters()).device, 1
        if group is not None:
            ranks = dist.get_world_size(group)
        mean = sum_floats(own.nll_sum / max(own.num_targets, 1), group, device) / ranks
        return replace(stats, nll_sum=mean * stats.num_targets)

    return accumulate
