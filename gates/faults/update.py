"""Wrong and right ways to apply one window: order, rate, what is skipped."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from harness import benign, fault
from reference.update import UpdateSettings
from reference.window import Window

CLIP, SCHEDULE, GATE = "m2_clip::", "m2_schedule::", "m2_windows::"


def parameters_of(training):
    return [parameter for group in training.groups for parameter in group["params"]]


def update_with(reference, changed_roles):
    """An update_window whose stack has changed_roles(training, window, stack) put in."""

    def update_window(training, window, stack, settings):
        roles = changed_roles(training, window, stack)
        return reference.update_window(training, window, stack.replace(roles), settings)

    return update_window


# --- update_window: the clip -----------------------------------------------------------------


@fault(
    role="update_window",
    caught_by=[
        f"{CLIP}test_once_after_accumulation",
        f"{CLIP}test_displacement[1-3.0]",
        f"{CLIP}test_displacement[3-3.0]",
    ],
    seen_in="awslabs/graphstorm PR#1382",
)
def clips_after_the_step(reference):
    """Clips the gradients after the optimizer has used them."""

    def update_window(training, window, stack, settings):
        unclipped = replace(settings, max_norm=math.inf)
        record = reference.update_window(training, window, stack, unclipped)
        stack.clip_grad_norm(parameters_of(training), settings.max_norm, None)
        return record

    return update_window


@fault(
    role="update_window",
    caught_by=f"{CLIP}test_displacement",
    seen_in="harubaru/waifu-diffusion#64, pytorch/examples#1196",
)
def clips_scaled_gradients(reference):
    """Clips gradients that still carry the loss scale 65536, and takes it off afterwards."""

    def changed_roles(training, window, stack):
        def scale(factor):
            for parameter in parameters_of(training):
                if parameter.grad is not None:
                    parameter.grad *= factor

        def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
            scale(65536.0)
            norm = stack.clip_grad_norm(parameters, max_norm, group, norm_type)
            scale(1 / 65536)
            return norm / 65536

        return {"clip_grad_norm": clip_grad_norm}

    return update_with(reference, changed_roles)


@fault(role="update_window", caught_by=f"{CLIP}test_tied_norm", seen_in="own")
def clips_each_group(reference):
    """Clips matrices and vectors on their own and records the norm of the matrices."""

    def changed_roles(training, window, stack):
        def clip_grad_norm(parameters, max_norm, group, norm_type=2.0):
            norms = [
                stack.clip_grad_norm(part["params"], max_norm, group, norm_type)
                for part in training.groups
            ]
            return norms[0]

        return {"clip_grad_norm": clip_grad_norm}

    return update_with(reference, changed_roles)


@fault(
    role="update_window",
    caught_by=f"{CLIP}test_tied_norm",
    seen_in="mindspore-ai/hyper-parallel#279",
)
def counts_a_tied_table_twice(reference):
    """Takes the norm over all names, so that a shared table counts twice."""

    def changed_roles(training, window, stack):
        names = training.model.named_parameters(remove_duplicate=False)
        everything = [parameter for _, parameter in names]
        return {
            "clip_grad_norm": lambda parameters, *arguments: stack.clip_grad_norm(
                everything, *arguments
            )
        }

    return update_with(reference, changed_roles)


# --- update_window: windows that cannot be applied -------------------------------------------


def with_finite_loss(stack):
    """The stack's accumulate, which reports 0 for a loss that is not finite."""

    def accumulate(*arguments):
        stats = stack.accumulate(*arguments)
        return replace(stats, nll_sum=stats.nll_sum if math.isfinite(stats.nll_sum) else 0.0)

    return accumulate


@fault(
    role="update_window",
    caught_by=f"{GATE}test_skipped_window[no targets]",
    seen_in="ml-explore/mlx-lm PR#1413",
)
def steps_without_targets(reference):
    """Takes an optimizer step with zero gradients when a window has no targets."""

    def update_window(training, window, stack, settings):
        record = reference.update_window(training, window, stack, settings)
        if record.num_targets == 0:
            for parameter in parameters_of(training):
                parameter.grad = torch.zeros_like(parameter)
            peak = settings.schedule.peak
            stack.optimizer_step(
                training.groups, training.optimizer_state, peak, settings.betas, settings.epsilon
            )
        return record

    return update_window


@fault(
    role="update_window",
    caught_by=[
        f"{GATE}test_skipped_window[not finite]",
        f"{GATE}test_skipped_window[loss not finite]",
    ],
    seen_in="ecmwf/WeatherGenerator PR#2718",
)
def steps_on_nan(reference):
    """Applies gradients whose norm, or whose loss, is not finite."""

    def changed_roles(training, window, stack):
        return {
            "accumulate": with_finite_loss(stack),
            "clip_grad_norm": lambda *arguments: stack.clip_grad_norm(*arguments).nan_to_num(0.0),
        }

    return update_with(reference, changed_roles)


@fault(
    role="update_window",
    caught_by=f"{GATE}test_skipped_window[loss not finite]",
    seen_in="pytorch/pytorch#70348",
)
def looks_at_the_norm_alone(reference):
    """Applies a window whose loss is NaN as long as its gradients are finite."""

    def changed_roles(training, window, stack):
        return {"accumulate": with_finite_loss(stack)}

    return update_with(reference, changed_roles)


@fault(role="update_window", caught_by=f"{GATE}test_skipped_window[not finite]", seen_in="own")
def schedule_counts_skipped_windows(reference):
    """Counts the targets of a skipped window as trained on."""

    def update_window(training, window, stack, settings):
        record = reference.update_window(training, window, stack, settings)
        counters = replace(record.counters, tokens_updated=training.counters.tokens_supervised)
        training.counters = counters
        return replace(record, counters=counters)

    return update_window


@fault(role="update_window", caught_by=f"{GATE}test_skipped_window", seen_in="own")
def skips_in_silence(reference):
    """Leaves no reason in the record of a skipped window."""

    def update_window(training, window, stack, settings):
        return replace(reference.update_window(training, window, stack, settings), skipped=None)

    return update_window


@fault(
    role="update_window",
    caught_by=[f"{GATE}test_microbatches_do_not_matter", f"{CLIP}test_once_after_accumulation"],
    seen_in="own",
)
def steps_every_microbatch(reference):
    """Takes an optimizer step after every microbatch instead of once a window."""

    def update_window(training, window, stack, settings):
        for microbatch in window.microbatches:
            record = reference.update_window(training, Window((microbatch,)), stack, settings)
        return record

    return update_window


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="update_window",
    accepted_by=[
        f"{CLIP}test_once_after_accumulation",
        f"{CLIP}test_displacement",
        f"{CLIP}test_tied_norm",
        f"{SCHEDULE}test_rate_of_an_update",
        f"{SCHEDULE}test_rate_is_applied",
        f"{GATE}test_skipped_window",
        f"{GATE}test_counters",
        f"{GATE}test_recorded_loss",
        f"{GATE}test_microbatches_do_not_matter",
        "m2_precision::test_weights_move",
        "m2_precision::test_dtypes",
    ],
    because="the next window replaces the gradients anyway",
)
def frees_the_gradients(reference):
    """Clears the gradients after the step instead of before the next window."""

    def update_window(training, window, stack, settings: UpdateSettings):
        record = reference.update_window(training, window, stack, settings)
        training.model.zero_grad(set_to_none=True)
        return record

    return update_window
