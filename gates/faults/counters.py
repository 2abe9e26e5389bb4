"""Wrong ways to count and to record what a window did."""

from __future__ import annotations

from dataclasses import replace

from harness import fault
from reference.window import Window

GATE = "m2_windows::"


def miscounting(reference, change):
    """An update_window that counts change(counters, window) after each window."""

    def update_window(training, window, stack, settings):
        record = reference.update_window(training, window, stack, settings)
        training.counters = change(record.counters, window)
        return replace(record, counters=training.counters)

    return update_window


@fault(
    role="update_window",
    caught_by=f"{GATE}test_counters[4]",
    seen_in="modelscope/ms-swift#10099",
)
def counts_microbatches_as_steps(reference):
    """Counts an optimizer step for every microbatch."""
    return miscounting(
        reference,
        lambda counters, window: replace(
            counters, optimizer_steps=counters.optimizer_steps + len(window.microbatches) - 1
        ),
    )


@fault(
    role="update_window", caught_by=f"{GATE}test_counters", seen_in="meta-pytorch/torchtune PR#1875"
)
def reads_targets_only(reference):
    """Counts the targets as the tokens read: padding disappears from the books."""
    return miscounting(
        reference,
        lambda counters, window: replace(counters, tokens_read=counters.tokens_supervised),
    )


@fault(
    role="update_window",
    caught_by=f"{GATE}test_recorded_loss",
    seen_in="pytorch/torchtitan PR#4167",
)
def records_mean_of_means(reference):
    """Records the mean of the microbatches' mean losses, 3 for 2.5."""

    def update_window(training, window, stack, settings):
        stats = [
            stack.accumulate(training.model, Window((microbatch,)), None)
            for microbatch in window.microbatches
        ]
        means = [stat.nll_sum / max(stat.num_targets, 1) for stat in stats]
        record = reference.update_window(training, window, stack, settings)
        return replace(record, loss_nats=sum(means) / len(means))

    return update_window
