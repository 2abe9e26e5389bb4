"""Wrong and right ways to plan windows, rows and targets."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from harness import benign, fault
from reference.ledger.windows import WindowPlan

PLAN = "m0_windows::test_plan"
ANY_SUM = "m0_windows::test_any_sum"
EDGES = "m0_windows::test_edges"
ANY_ROWS = "m0_windows::test_any_rows"
RUN = "m0_windows::test_run_keeps_to_the_plan"


def planned_with(change):
    """A plan_windows in which `change(plan)` replaces parts."""

    def build(reference):
        def plan_windows(total_tokens, context_tokens, rows, microbatches, ranks, last_window):
            plan = reference.plan_windows(
                total_tokens, context_tokens, rows, microbatches, ranks, last_window
            )
            return replace(plan, **change(plan))

        return plan_windows

    return build


@fault(role="plan_windows", caught_by=[PLAN, ANY_SUM, EDGES], seen_in="ml-explore/mlx-lm PR#1413")
def partial_window_dropped(reference):
    """Plans floor(total / window) updates."""
    return planned_with(lambda p: {"num_updates": p.total_tokens // p.window_tokens})(reference)


@fault(role="plan_windows", caught_by=[ANY_SUM, EDGES], seen_in="own")
def empty_window_after_an_exact_fit(reference):
    """Plans floor(total / window) + 1 updates: one too many where the window divides."""
    return planned_with(lambda p: {"num_updates": p.total_tokens // p.window_tokens + 1})(reference)


@fault(role="plan_windows", caught_by=EDGES, seen_in="own")
def rounded_by_a_float(reference):
    """Takes the ceiling of a float64 quotient."""
    return planned_with(lambda p: {"num_updates": math.ceil(p.total_tokens / p.window_tokens)})(
        reference
    )


@fault(role="plan_windows", caught_by=[PLAN, ANY_SUM, EDGES], seen_in="own")
def remainder_and_overshoot_exchanged(reference):
    """Reports what is missing from the last window as what is in it."""
    return planned_with(
        lambda p: {
            "remainder_tokens": p.overshoot_tokens,
            "overshoot_tokens": p.remainder_tokens,
        }
    )(reference)


@fault(
    role="plan_windows",
    caught_by=[f"{PLAN}[trim]", ANY_SUM, EDGES, f"{RUN}[29-trim]"],
    seen_in="own",
)
def silent_overshoot(reference):
    """Runs the last window in full although the plan says trim."""
    return planned_with(lambda p: {"last_window": "overshoot"})(reference)


@fault(role="plan_windows", caught_by=[PLAN, ANY_SUM, EDGES], seen_in="own")
def accumulation_forgotten(reference):
    """Takes one microbatch for a window."""

    def plan_windows(total_tokens, context_tokens, rows, microbatches, ranks, last_window):
        return reference.plan_windows(total_tokens, context_tokens, rows, 1, ranks, last_window)

    return plan_windows


@fault(role="train", caught_by=f"{RUN}[29-trim]", seen_in="verl-project/verl#7401")
def ends_a_window_early(reference):
    """Ends one window before the planned total, as if nothing were missing."""

    def train(config, stack, windows, settings, seed, device, total, last_window):
        window = windows[0].num_targets
        fewer = max(total - window, 1)
        return reference.train(config, stack, windows, settings, seed, device, fewer, last_window)

    return train


@fault(role="window_rows", caught_by=ANY_ROWS, seen_in="huggingface/datasets#3423")
def every_rank_reads_the_same(reference):
    """Ignores the rank: each row is read once a rank, and others never."""
    return lambda plan, update, rank, microbatch: reference.window_rows(plan, update, 0, microbatch)


@fault(role="window_rows", caught_by=ANY_ROWS, seen_in="metagene-ai/metagene-pretrain PR#18")
def looks_ahead(reference):
    """Reads one row more, which the neighbour reads too."""

    def window_rows(plan, update, rank, microbatch):
        rows = reference.window_rows(plan, update, rank, microbatch)
        return range(rows.start, rows.stop + 1)

    return window_rows


@fault(role="window_rows", caught_by=ANY_ROWS, seen_in="modelscope/ms-swift#10099")
def cursor_in_the_wrong_unit(reference):
    """Goes on after an update as many rows as it had tokens."""

    def window_rows(plan, update, rank, microbatch):
        rows = reference.window_rows(plan, 0, rank, microbatch)
        skipped = update * plan.window_tokens
        return range(rows.start + skipped, rows.stop + skipped)

    return window_rows


@fault(role="window_rows", caught_by=ANY_ROWS, seen_in="verl-project/verl#7401")
def last_update_reads_nothing(reference):
    """Takes the end of the rows for reached one update early."""

    def window_rows(plan, update, rank, microbatch):
        rows = reference.window_rows(plan, update, rank, microbatch)
        return range(0) if update == plan.num_updates - 1 else rows

    return window_rows


@fault(
    role="count_targets",
    caught_by="m0_windows::test_any_targets[inside]",
    seen_in="pytorch/torchtitan PR#4075",
)
def targets_across_documents(reference):
    """Counts total - 1 targets where documents do not predict each other."""
    return lambda document_lengths, policy: reference.count_targets(document_lengths, "across")


@benign(
    role="plan_windows",
    accepted_by=[PLAN, ANY_SUM, EDGES, f"{RUN}[29-trim]", f"{RUN}[12-overshoot]"],
    because="integer division with remainder, the last window from the remainder",
)
def by_divmod(reference):
    """Divides with remainder; a remainder of zero is a full last window."""

    def plan_windows(total_tokens, context_tokens, rows, microbatches, ranks, last_window):
        window = ranks * microbatches * rows * context_tokens
        full, left = divmod(total_tokens, window)
        return WindowPlan(
            total_tokens=total_tokens,
            context_tokens=context_tokens,
            num_rows=rows,
            num_microbatches=microbatches,
            num_ranks=ranks,
            last_window=last_window,
            num_updates=full + (left > 0),
            remainder_tokens=left or window,
            overshoot_tokens=window - left if left else 0,
        )

    return plan_windows


@benign(
    role="window_rows",
    accepted_by=ANY_ROWS,
    because="who reads a row of a window is free, if each row is read once",
)
def a_block_of_rows_a_rank(reference):
    """Gives each rank one block of successive rows of the window."""

    def window_rows(plan, update, rank, microbatch):
        place = (update * plan.num_ranks + rank) * plan.num_microbatches + microbatch
        end = -(-plan.planned_tokens // plan.context_tokens)
        start = place * plan.num_rows
        return range(min(start, end), min(start + plan.num_rows, end))

    return window_rows


@benign(
    role="count_targets",
    accepted_by="m0_windows::test_any_targets",
    because="each token but a first one is a target of the token before it",
)
def targets_walked(reference):
    """Walks through the row and counts tokens that have one to predict them."""

    def count_targets(document_lengths, policy):
        owners = [i for i, length in enumerate(document_lengths) for _ in range(length)]
        pairs = itertools.pairwise(owners)
        return sum(policy == "across" or before == after for before, after in pairs)

    return count_targets
