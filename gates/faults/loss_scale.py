"""Wrong and right ways to scale the loss of a float16 model."""

from __future__ import annotations

from dataclasses import replace

import torch

from gates.faults.accumulation import (
    accumulate_with,
    divide_gradients,
    microbatch_nll,
    over_window,
)
from gates.faults.update import parameters_of, update_with
from harness import benign, fault
from reference.loss_scale import LossScaleState, next_loss_scale
from reference.update import NonFiniteError, WindowStats

GATE = "m2_loss_scale::"
DIVIDED, SMALL, RUN = (
    f"{GATE}test_{name}" for name in ("divided_out_once", "small_gradients", "scale_of_a_run")
)
ANY, CURED, STOP = (f"{GATE}test_{name}" for name in ("any_windows", "overflow_is_cured", "stop"))


# --- accumulate ------------------------------------------------------------------------------


@fault(role="accumulate", caught_by=SMALL, seen_in="own")
def ignores_the_loss_scale(reference):
    """Takes the scale and does not use it: small gradients vanish in float16."""
    return lambda model, window, group, loss_scale=1.0: reference.accumulate(model, window, group)


@fault(role="accumulate", caught_by=DIVIDED, seen_in="own")
def leaves_the_scale_in(reference):
    """Leaves gradients that are still multiplied by the scale."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        divide_gradients(model, 1 / loss_scale)
        return stats

    return accumulate


@fault(role="accumulate", caught_by=[DIVIDED, SMALL], seen_in="huggingface/accelerate#641")
def unscales_twice(reference):
    """Divides the gradients by the scale a second time."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        divide_gradients(model, loss_scale)
        return stats

    return accumulate


@fault(
    role="accumulate",
    caught_by=[f"{DIVIDED}[1024.0-4]", f"{DIVIDED}[3.0-4]"],
    seen_in="huggingface/accelerate#641",
)
def unscales_in_the_middle(reference):
    """Divides all gradients by the scale after every microbatch, the earlier ones again."""

    def accumulate(model, window, group, loss_scale=1.0):
        model.zero_grad()
        nll_total = 0.0
        for microbatch in window.microbatches:
            nll_sum = microbatch_nll(model, microbatch)
            (nll_sum * over_window(microbatch, window) * loss_scale).backward()
            nll_total += float(nll_sum.detach())
            divide_gradients(model, loss_scale)
        return WindowStats(nll_total, window.num_targets, window.num_tokens)

    return accumulate


@fault(role="accumulate", caught_by=DIVIDED, seen_in="own")
def reports_the_scaled_loss(reference):
    """Reports the loss that was multiplied by the scale."""

    def accumulate(model, window, group, loss_scale=1.0):
        stats = reference.accumulate(model, window, group, loss_scale)
        return replace(stats, nll_sum=stats.nll_sum * loss_scale)

    return accumulate


@fault(role="build_model", caught_by=f"{GATE}test_float16_decoder", seen_in="own")
def computes_in_bfloat16(reference):
    """Computes in bfloat16 where float16 was asked for."""

    def build_model(config, stack):
        return reference.build_model(replace(config, compute_dtype=torch.bfloat16), stack)

    return build_model


# --- update_window ---------------------------------------------------------------------------


@fault(
    role="update_window",
    caught_by=RUN,
    seen_in="harubaru/waifu-diffusion#64, pytorch/examples#1196",
)
def clips_before_unscaling(reference):
    """Clips gradients that are still multiplied by the scale, and divides afterwards."""

    def changed_roles(training, window, stack):
        used = []

        def multiply(factor):
            for parameter in parameters_of(training):
                if parameter.grad is not None:
                    parameter.grad *= factor

        def accumulate(model, window, group, loss_scale=1.0):
            used.append(loss_scale)
            return stack.accumulate(model, window, group, loss_scale)

        def clip_grad_norm(*arguments):
            multiply(used[-1])
            norm = stack.clip_grad_norm(*arguments)
            multiply(1 / used[-1])
            return norm / used[-1]

        return {"accumulate": accumulate, "clip_grad_norm": clip_grad_norm}

    return update_with(reference, changed_roles)


def scaled_otherwise(reference, change):
    """An update_window after which the scale's state is change(before, after, record, context)."""

    def update_window(training, window, stack, settings):
        before = training.loss_scale
        record = reference.update_window(training, window, stack, settings)
        if settings.loss_scaling is not None:
            before = before or LossScaleState(settings.loss_scaling.initial)
            after = training.loss_scale or before
            training.loss_scale = change(before, after, record, window, settings.loss_scaling)
        return record

    return update_window


@fault(role="update_window", caught_by=[RUN, ANY], seen_in="huggingface/accelerate#641")
def moves_the_scale_every_microbatch(reference):
    """Counts every microbatch as an update when it moves the scale."""

    def change(before, after, record, window, scaling):
        if record.skipped is None:
            for _ in window.microbatches[1:]:
                after = next_loss_scale(after, scaling, True)
        return after

    return scaled_otherwise(reference, change)


@fault(role="update_window", caught_by=[RUN, ANY, CURED], seen_in="own")
def keeps_the_scale_after_an_overflow(reference):
    """Skips the window and does not make the scale smaller: every later one overflows too."""
    return scaled_otherwise(
        reference, lambda before, after, *_: replace(after, scale=max(after.scale, before.scale))
    )


@fault(role="update_window", caught_by=[RUN, ANY], seen_in="own")
def never_raises_the_scale(reference):
    """The scale only ever falls."""
    return scaled_otherwise(
        reference, lambda before, after, *_: replace(after, scale=min(after.scale, before.scale))
    )


@fault(role="update_window", caught_by=ANY, seen_in="own")
def goes_on_counting_after_an_overflow(reference):
    """An overflow does not start the row of finite updates anew."""

    def change(before, after, record, window, scaling):
        overflowed = after.skipped_updates > before.skipped_updates
        return replace(after, good_updates=before.good_updates) if overflowed else after

    return scaled_otherwise(reference, change)


@fault(role="update_window", caught_by=[RUN, ANY], seen_in="own")
def counts_an_empty_window_as_finite(reference):
    """A window without targets brings the next, larger scale nearer."""

    def change(before, after, record, window, scaling):
        return after if window.num_targets else next_loss_scale(before, scaling, True)

    return scaled_otherwise(reference, change)


@fault(role="update_window", caught_by=[RUN, ANY], seen_in="own")
def mixes_skipped_updates_with_the_rest(reference):
    """Does not count the skipped updates apart."""
    return scaled_otherwise(reference, lambda before, after, *_: replace(after, skipped_updates=0))


@fault(role="update_window", caught_by=RUN, seen_in="own")
def counts_a_skipped_step_as_done(reference):
    """A window that overflowed counts as an optimizer step, and its targets as trained on."""

    def update_window(training, window, stack, settings):
        record = reference.update_window(training, window, stack, settings)
        if record.skipped and record.num_targets:
            training.counters = replace(
                record.counters,
                optimizer_steps=record.counters.optimizer_steps + 1,
                tokens_updated=record.counters.tokens_updated + record.num_targets,
            )
        return replace(record, counters=training.counters)

    return update_window


@fault(
    role="update_window",
    caught_by=[f"{STOP}[{case}]" for case in (
        "norm, no scaling", "loss, no scaling", "norm, scale 1", "loss, scale 4",
    )],
    seen_in="own",
)  # fmt: skip
def skips_where_it_should_stop(reference):
    """Accepts on_non_finite "stop" and skips."""

    def update_window(training, window, stack, settings):
        skipping = replace(settings, on_non_finite="skip")
        return reference.update_window(training, window, stack, skipping)

    return update_window


@fault(role="update_window", caught_by=f"{STOP}[norm, scale 4]", seen_in="own")
def stops_at_an_overflow(reference):
    """Ends the run where the scale had only to become smaller."""

    def update_window(training, window, stack, settings):
        record = reference.update_window(training, window, stack, settings)
        if record.skipped and record.num_targets and settings.on_non_finite == "stop":
            raise NonFiniteError(record.skipped)
        return record

    return update_window


@fault(role="update_window", caught_by=STOP, seen_in="own")
def stops_after_the_step(reference):
    """Applies what is not finite, and stops then."""

    def update_window(training, window, stack, settings):
        try:
            return reference.update_window(training, window, stack, settings)
        finally:
            with torch.no_grad():
                for parameter in parameters_of(training):
                    if parameter.grad is not None:
                        parameter -= parameter.grad.nan_to_num()

    return update_window


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="accumulate",
    accepted_by=[DIVIDED, SMALL, RUN, ANY, CURED, STOP],
    because="a common factor may come last",
)
def divides_targets_and_scale_at_once(reference):
    """Multiplies sums by the scale and divides by targets and scale at the end."""
    summed = accumulate_with(lambda microbatch, window: 1.0)

    def accumulate(model, window, group, loss_scale=1.0):
        stats = summed(model, window, group, loss_scale)
        divide_gradients(model, max(stats.num_targets, 1))
        return stats

    return accumulate
