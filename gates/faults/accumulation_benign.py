"""Other right ways to accumulate the gradient of a window."""

from __future__ import annotations

import torch

from gates.faults.accumulation import (
    GATE,
    SUM,
    accumulate_into,
    accumulate_with,
    divide_gradients,
    microbatch_nll,
)
from harness import benign
from reference.update import WindowStats
from reference.window import Window

ACCEPTED = [
    *(f"{GATE}test_{name}" for name in (
        "partition", "any_partition", "hundred_and_ten", "hand_example", "stale_gradients",
        "ratio_of_terms", "no_targets",
    )),
    SUM,
    "m2_precision::test_error_does_not_grow",
    "m2_clip::test_once_after_accumulation",
    "m2_windows::test_counters",
    "m2_windows::test_recorded_loss",
    "m2_windows::test_skipped_window",
]  # fmt: skip


@benign(role="accumulate", accepted_by=ACCEPTED, because="the same sum in another order")
def reversed_microbatches(reference):
    """Goes through the microbatches from the last to the first."""
    return lambda model, window, group, loss_scale=1.0: reference.accumulate(
        model, Window(window.microbatches[::-1]), group, loss_scale
    )


@benign(role="accumulate", accepted_by=ACCEPTED, because="a common factor may come last")
def divides_after_accumulation(reference):
    """Adds up gradients of sums and divides them by the window's targets at the end."""
    summed = accumulate_with(lambda microbatch, window: 1.0)

    def accumulate(model, window, group, loss_scale=1.0):
        stats = summed(model, window, group, loss_scale)
        divide_gradients(model, max(stats.num_targets, 1))
        return stats

    return accumulate


@benign(role="accumulate", accepted_by=ACCEPTED, because="an empty sum has no gradient")
def skips_empty_microbatches(reference):
    """Does not run microbatches without targets (in one process; ranks would wait)."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        nll_total, num_targets = 0.0, window.num_targets
        for microbatch in window.microbatches:
            if microbatch.num_targets:
                nll_sum = microbatch_nll(model, microbatch)
                (nll_sum / num_targets * loss_scale).backward()
                nll_total += float(nll_sum.detach())
        divide_gradients(model, loss_scale)
        return WindowStats(nll_total, num_targets, window.num_tokens)

    return accumulate


@benign(role="accumulate", accepted_by=ACCEPTED, because="the gradient of a sum is linear")
def one_backward(reference):
    """Adds the losses of all microbatches first and goes backwards once."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        nll_sum = sum(microbatch_nll(model, microbatch) for microbatch in window.microbatches)
        (nll_sum / max(window.num_targets, 1) * loss_scale).backward()
        divide_gradients(model, loss_scale)
        return WindowStats(float(nll_sum.detach()), window.num_targets, window.num_tokens)

    return accumulate


@benign(role="accumulate", accepted_by=ACCEPTED, because="buffers as wide as the parameters")
def buffers_of_its_own(reference):
    """Keeps the sums in cleared buffers beside the model, as sharded optimizers do."""
    return accumulate_into(torch.zeros_like, torch.add)
