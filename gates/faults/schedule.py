"""Wrong and right learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import replace

from gates.faults.update import update_with
from harness import benign, fault

GATE = "m2_schedule::"
RAMP, TABLE, LIMITS = (
    f"{GATE}test_warmup_table", f"{GATE}test_table", f"{GATE}test_continuity_and_clamp"
)  # fmt: skip


@fault(role="learning_rate", caught_by=TABLE, seen_in="pytorch/torchtitan PR#1261")
def warmup_from_zero(reference):
    """Counts the warmup from zero: (t - 1) / warmup."""

    def learning_rate(tokens, schedule):
        late = max(tokens - 1, 0) if tokens <= schedule.warmup_tokens else tokens
        return reference.learning_rate(late, schedule)

    return learning_rate


@fault(role="learning_rate", caught_by=[RAMP, TABLE, LIMITS], seen_in="pytorch/torchtitan PR#1261")
def warmup_never_ends_quite(reference):
    """Reaches 0.8 of the peak in the warmup and jumps at its end."""

    def learning_rate(tokens, schedule):
        rate = reference.learning_rate(tokens, schedule)
        return 0.8 * rate if tokens < schedule.warmup_tokens else rate

    return learning_rate


@fault(
    role="learning_rate",
    caught_by=f"{GATE}test_without_ramps",
    seen_in="pytorch/torchtitan PR#1010",
)
def decay_of_at_least_one_token(reference):
    """Guards the division by a decay of 0 by decaying over one token."""

    def learning_rate(tokens, schedule):
        return reference.learning_rate(
            tokens, replace(schedule, decay_tokens=max(schedule.decay_tokens, 1))
        )

    return learning_rate


@fault(role="learning_rate", caught_by=[TABLE, LIMITS], seen_in="own")
def decay_goes_below(reference):
    """Does not stop at the total: the rate goes on down, through zero."""

    def learning_rate(tokens, schedule):
        beyond = tokens - schedule.total_tokens
        rate = reference.learning_rate(tokens, schedule)
        if beyond <= 0 or not schedule.decay_tokens:
            return rate
        return rate - schedule.peak * beyond / schedule.decay_tokens

    return learning_rate


@fault(role="learning_rate", caught_by=[TABLE, LIMITS], seen_in="pytorch/pytorch#60265")
def rises_again(reference):
    """Starts anew after the total."""

    def learning_rate(tokens, schedule):
        return reference.learning_rate(tokens % (schedule.total_tokens + 1), schedule)

    return learning_rate


@fault(role="learning_rate", caught_by=TABLE, seen_in="own")
def no_stable_part(reference):
    """Decays from the end of the warmup on."""

    def learning_rate(tokens, schedule):
        longest = schedule.total_tokens - schedule.warmup_tokens
        return reference.learning_rate(tokens, replace(schedule, decay_tokens=longest))

    return learning_rate


@fault(role="learning_rate", caught_by=f"{TABLE}[0.1]", seen_in="own")
def decays_to_zero(reference):
    """Ignores the final fraction."""

    def learning_rate(tokens, schedule):
        return reference.learning_rate(tokens, replace(schedule, final_fraction=0.0))

    return learning_rate


@fault(role="learning_rate", caught_by=TABLE, seen_in="own")
def cosine_decay(reference):
    """Decays along a cosine: the same at both ends and in the middle."""

    def learning_rate(tokens, schedule):
        rate = reference.learning_rate(tokens, schedule)
        start = schedule.total_tokens - schedule.decay_tokens
        if not start < tokens < schedule.total_tokens:
            return rate
        share = (1 + math.cos(math.pi * (tokens - start) / schedule.decay_tokens)) / 2
        low = schedule.final_fraction
        return schedule.peak * (low + (1 - low) * share)

    return learning_rate


@fault(role="learning_rate", caught_by=f"{TABLE}[0.1]", seen_in="own")
def drops_to_the_final_fraction(reference):
    """Multiplies the last fraction in again, so there is a jump at the end of the decay."""

    def learning_rate(tokens, schedule):
        rate = reference.learning_rate(tokens, schedule)
        return rate * schedule.final_fraction if tokens >= schedule.total_tokens else rate

    return learning_rate


@fault(
    role="learning_rate",
    caught_by=f"{GATE}test_purity",
    seen_in="Lightning-AI/pytorch-lightning#4655, Nerogar/OneTrainer#1604",
)
def counts_its_calls(reference):
    """Moves on by what the tokens grew since the last call, as a scheduler with a state does."""
    seen = {"tokens": 0, "last": 0}

    def learning_rate(tokens, schedule):
        seen["tokens"] += abs(tokens - seen["last"])
        seen["last"] = tokens
        return reference.learning_rate(seen["tokens"], schedule)

    return learning_rate


@fault(
    role="learning_rate",
    caught_by=f"{GATE}test_purity",
    seen_in="pytorch/pytorch#60265, vllm-project/speculators PR#900",
)
def keeps_the_first_schedule(reference):
    """Keeps the schedule it was first asked for, also when another is given."""
    first = []

    def learning_rate(tokens, schedule):
        first.append(schedule)
        return reference.learning_rate(tokens, first[0])

    return learning_rate


# --- update_window: the learning rate --------------------------------------------------------


def rate_at(tokens):
    """Roles for update_with: the schedule asked at tokens(tokens_done, training, window)."""

    def changed_roles(training, window, stack):
        def learning_rate(tokens_done, schedule):
            return stack.learning_rate(tokens(tokens_done, training, window), schedule)

        return {"learning_rate": learning_rate}

    return changed_roles


@fault(
    role="update_window",
    caught_by=f"{GATE}test_rate_of_an_update",
    seen_in="huggingface/accelerate#963",
)
def schedule_steps_every_microbatch(reference):
    """Moves the schedule on once a microbatch."""
    return update_with(
        reference, rate_at(lambda done, training, window: done * len(window.microbatches))
    )


@fault(
    role="update_window",
    caught_by=[f"{GATE}test_rate_of_an_update", f"{GATE}test_rate_is_applied"],
    seen_in="huggingface/accelerate#662, huggingface/diffusers#9633",
)
def schedule_steps_every_rank(reference):
    """Moves the schedule on eight times an update, once for each rank."""
    return update_with(reference, rate_at(lambda done, training, window: 8 * done))


@fault(
    role="update_window",
    caught_by=[f"{GATE}test_rate_of_an_update", f"{GATE}test_rate_is_applied"],
    seen_in="pytorch/torchtitan PR#1261",
)
def schedule_starts_at_zero(reference):
    """Asks for the rate before counting the window: the first update has rate 0."""
    return update_with(
        reference, rate_at(lambda done, training, window: training.counters.tokens_updated)
    )


@fault(role="update_window", caught_by=f"{GATE}test_rate_of_an_update", seen_in="own")
def schedule_counts_positions(reference):
    """Counts positions read, padding included, in the schedule."""
    return update_with(
        reference,
        rate_at(lambda done, training, window: training.counters.tokens_read + window.num_tokens),
    )


@fault(
    role="update_window",
    caught_by=f"{GATE}test_rate_is_applied",
    seen_in="vllm-project/speculators PR#900",
)
def logs_the_next_rate(reference):
    """Records the rate of this update but applies that of the update before."""

    def changed_roles(training, window, stack):
        def optimizer_step(groups, state, learning_rate, betas, epsilon):
            last, training.last_rate = getattr(training, "last_rate", 0.0), learning_rate
            stack.optimizer_step(groups, state, last, betas, epsilon)

        return {"optimizer_step": optimizer_step}

    return update_with(reference, changed_roles)


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="learning_rate",
    accepted_by=[RAMP, TABLE, LIMITS, f"{GATE}test_without_ramps", f"{GATE}test_purity",
                 f"{GATE}test_rate_of_an_update", f"{GATE}test_rate_is_applied"],
    because="the lower of two ramps, held between final and peak, is the same function",
)  # fmt: skip
def lower_of_two_ramps(reference):
    """min(rising ramp, falling ramp), clamped."""

    def learning_rate(tokens, schedule):
        low = schedule.final_fraction
        up = tokens / schedule.warmup_tokens if schedule.warmup_tokens else 1.0
        left = max(schedule.total_tokens - tokens, 0)
        down = low + (1 - low) * left / schedule.decay_tokens if schedule.decay_tokens else 1.0
        return schedule.peak * min(up, down, 1.0)

    return learning_rate
