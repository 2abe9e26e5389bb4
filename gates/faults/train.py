"""Wrong and right ways to run through windows."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from harness import benign, fault

GATE = "m2_windows::"


def train_on(reference, choose):
    """A train that runs the reference's on choose(windows)."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        chosen = choose(list(windows))
        return reference.train(
            config, stack, chosen, settings, seed, device, total, last_window, progress
        )

    return train


PARTIAL, LOOP = f"{GATE}test_last_partial_window", f"{GATE}test_loop"


@fault(role="train", caught_by=PARTIAL, seen_in="ml-explore/mlx-lm PR#1413, verl-project/verl#7401")
def drops_a_partial_window(reference):
    """Drops a last window with fewer microbatches than the first."""
    return train_on(
        reference,
        lambda windows: [w for w in windows if len(w.microbatches) == len(windows[0].microbatches)],
    )


@fault(role="train", caught_by=LOOP, seen_in="own")
def one_window_again_and_again(reference):
    """Trains on the first window in place of the others."""
    return train_on(reference, lambda windows: [windows[0]] * len(windows))


@fault(role="train", caught_by=LOOP, seen_in="own")
def backwards_through_the_windows(reference):
    """Goes through the windows from the last to the first."""
    return train_on(reference, lambda windows: windows[::-1])


def last_windows(totals, declared):
    return [f"{GATE}test_last_window[{total}-{declared}]" for total in totals]


@fault(role="train", caught_by=last_windows([25, 1], "trim"), seen_in="own")
def overshoots_although_told_to_trim(reference):
    """Applies the last window whole whatever was declared."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        return reference.train(
            config, stack, windows, settings, seed, device, total, "overshoot", progress
        )

    return train


@fault(role="train", caught_by=last_windows([25, 1], "overshoot"), seen_in="own")
def trims_although_told_to_overshoot(reference):
    """Cuts the last window whatever was declared."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        return reference.train(
            config, stack, windows, settings, seed, device, total, "trim", progress
        )

    return train


@fault(role="train", caught_by=last_windows([25, 1], "overshoot"), seen_in="own")
def reports_the_plan(reference):
    """Reports the tokens that were asked for instead of those that were applied."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        result = reference.train(
            config, stack, windows, settings, seed, device, total, last_window, progress
        )
        return replace(result, counters=replace(result.counters, tokens_updated=total))

    return train


@fault(
    role="train",
    caught_by=[*last_windows([25], "trim"), *last_windows([25], "overshoot")],
    seen_in="verl-project/verl#7401",
)
def leaves_the_rest_out(reference):
    """Stops at the last window that fits whole into the total."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        kept, left = [], total if total is not None else math.inf
        for window in windows:
            if window.num_targets > left:
                break
            kept.append(window)
            left -= window.num_targets
        return reference.train(
            config, stack, kept, settings, seed, device, None, last_window, progress
        )

    return train


def train_with(reference, changed_roles):
    """A train whose stack has changed_roles(stack) put in."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        changed = stack.replace(changed_roles(stack))
        return reference.train(
            config, changed, windows, settings, seed, device, total, last_window, progress
        )

    return train


@fault(role="train", caught_by=LOOP, seen_in="KempnerInstitute/KempnerForge PR#115")
def fresh_moments_every_window(reference):
    """Starts every window with an empty optimizer state."""

    def changed_roles(stack):
        def update_window(training, window, inner, settings):
            training.optimizer_state = {}
            return stack.update_window(training, window, inner, settings)

        return {"update_window": update_window}

    return train_with(reference, changed_roles)


@fault(role="train", caught_by=[LOOP, "m2_overfit::test_one_window"], seen_in="own")
def returns_the_first_model(reference):
    """Returns a copy of the model from before the training."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        first = []

        def build_model(config, inner):
            model = stack.build_model(config, inner)
            first.append(copy.deepcopy(model))
            return model

        result = reference.train(
            config, stack.replace({"build_model": build_model}), windows, settings, seed, device,
            total, last_window, progress,
        )  # fmt: skip
        return replace(result, model=first[0].to(device))

    return train


@fault(role="train", caught_by=LOOP, seen_in="own")
def ignores_the_seed(reference):
    """Draws the initial parameters from seed 0 whatever was asked."""

    def train(config, stack, windows, settings, seed, device, total, last_window, progress):
        return reference.train(
            config, stack, windows, settings, 0, device, total, last_window, progress
        )

    return train


# --- right, in another way -------------------------------------------------------------------

EVERY_LOOP = [f"{GATE}test_last_window", PARTIAL, LOOP, "m2_overfit::test_one_window"]


@benign(role="train", accepted_by=EVERY_LOOP, because="the same windows, drawn earlier")
def prefetches(reference):
    """Draws all windows before the first update, as a loader with a buffer does."""
    return train_on(reference, list)
