"""M2. The learning rate is a pure function of the supervised tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from gates import toys
from harness import gate
from reference.schedule import Schedule, learning_rate
from reference.update import TrainState, UpdateSettings

FLOATS = "float64 arithmetic of three operations"
PLAN = Schedule(peak=3e-4, total_tokens=1000, warmup_tokens=100, decay_tokens=200)


@st.composite
def schedules(draw):
    """Every kind: without warmup, without decay, with both touching."""
    total = draw(st.integers(1, 2000))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    fraction = draw(st.sampled_from([0.0, 0.1, 1.0]))
    return Schedule(draw(st.sampled_from([1.0, 3e-4])), total, warmup, decay, fraction)


@gate(
    claim="a warmup of 4 windows gives 1/4, 2/4, 3/4 and 1 of the peak, starting with the first",
    roles=["learning_rate"],
    not_claimed="that a candidate's loop asks for the right tokens (test_rate_of_an_update)",
    source="pytorch/torchtitan PR#1261: 0, 1/4, 1/2, 3/4, 1 is the other convention",
)
def test_warmup_table(stack, check):
    schedule = Schedule(peak=8.0, total_tokens=800, warmup_tokens=400)
    rates = [stack.learning_rate(100 * window, schedule) for window in (1, 2, 3, 4, 5)]
    check.series("warmup of four windows", rates, x_label="window", y_label="learning rate")
    check("rates", rates, equal=[2.0, 4.0, 6.0, 8.0, 8.0], because="eighths are exact in float64")


@gate(
    claim="warmup, stable, decay and what follows have the values of the table",
    roles=["learning_rate"],
    not_claimed="that these lengths are good ones",
    source="peak * t/warmup; peak; linear to final_fraction * peak at the total; constant after",
)
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_table(stack, fraction, check):
    schedule = replace(PLAN, final_fraction=fraction)
    halfway = (1 + fraction) / 2
    table = {0: 0.0, 1: 0.01, 50: 0.5, 99: 0.99, 100: 1.0, 101: 1.0, 799: 1.0, 800: 1.0,
             900: halfway, 999: 1 - 0.995 * (1 - fraction), 1000: fraction,
             1001: fraction, 10**12: fraction}  # fmt: skip
    for tokens, share in table.items():
        check(
            f"share of the peak at {tokens} tokens",
            stack.learning_rate(tokens, schedule) / schedule.peak,
            within=(share - 1e-12, share + 1e-12),
            because=FLOATS,
        )
    curve = range(0, 1101, 10)
    check.series(f"final fraction {fraction}", [stack.learning_rate(t, schedule) for t in curve],
                 list(curve), "supervised tokens", "learning rate")  # fmt: skip


@gate(
    claim="without warmup the first update has the peak, without decay the last one too",
    roles=["learning_rate"],
    not_claimed="other shapes",
    source="pytorch/torchtitan PR#1010: decay_steps=0 divided by zero",
)
def test_without_ramps(stack, check):
    schedule = Schedule(peak=0.5, total_tokens=10, final_fraction=0.0)
    for tokens in (1, 9, 10, 11, 1000):
        check(
            f"rate at {tokens} tokens",
            stack.learning_rate(tokens, schedule),
            equal=0.5,
            because="no ramp was asked for, so there is none",
        )


@gate(
    claim="every schedule is continuous, between final and peak, and constant beyond its total",
    roles=["learning_rate"],
    not_claimed="smoothness",
    source="a jump in the learning rate is a jump in the loss; pytorch/pytorch#60265: rates that "
    "rise again after the end",
)
def test_continuity_and_clamp(stack, check, for_all):
    @for_all(schedule=schedules(), tokens=st.integers(0, 2500), max_examples=100)
    def _(schedule, tokens):
        start_of_decay = schedule.total_tokens - schedule.decay_tokens
        decay_slope = (1 - schedule.final_fraction) / max(schedule.decay_tokens, 1)
        # From token 0, before any update, to 1 the rate may jump when there is no warmup.
        steepest = max(1 / max(schedule.warmup_tokens, 1), decay_slope)
        for seam in (tokens, schedule.warmup_tokens, start_of_decay, schedule.total_tokens):
            rates = [
                stack.learning_rate(max(seam + offset, 0), schedule) / schedule.peak
                for offset in (-1, 0, 1)
            ]
            changes = [abs(rates[1] - rates[0]), abs(rates[2] - rates[1])]
            check("change in one token / the steepest ramp", max(changes) / steepest,
                  at_most=1 + 1e-9, because="linear ramps; no jump where they meet")  # fmt: skip
            check("lowest share of the peak", min(rates), at_least=0.0, because="never negative")
            check("highest share of the peak", max(rates), at_most=1 + 1e-12, because=FLOATS)
        end = stack.learning_rate(schedule.total_tokens, schedule)
        beyond = stack.learning_rate(schedule.total_tokens + tokens, schedule)
        check("change beyond the total", abs(beyond - end), equal=0.0, because="clamped")


@gate(
    claim="the rate depends on the tokens and the schedule only, not on what was asked before",
    roles=["learning_rate"],
    not_claimed="the loop around it (test_rate_of_an_update)",
    source="Lightning-AI/pytorch-lightning#4655, pytorch/pytorch#60265: schedulers with a state "
    "restart, lag or jump on resume",
)
def test_purity(stack, rng, check):
    order = random.Random(rng.initial_seed())
    schedules_asked = [PLAN, replace(PLAN, peak=1.0), replace(PLAN, total_tokens=500)]
    asked = [(t, s) for t in range(1, 1100, 23) for s in schedules_asked]
    for name in ("in order", "shuffled", "shuffled again"):
        for tokens, schedule in asked:
            check(
                f"relative error {name}",
                abs(stack.learning_rate(tokens, schedule) - learning_rate(tokens, schedule))
                / schedule.peak,
                at_most=1e-12,
                because=FLOATS,
            )
        order.shuffle(asked)


@gate(
    claim="the rate of an update is the schedule's at the targets applied with it, however rows "
    "are cut into windows and windows into microbatches",
    roles=["learning_rate", "update_window"],
    not_claimed="several ranks",
    source="huggingface/accelerate#662, #963: a scheduler that steps once a rank or once a "
    "microbatch ends the warmup 8 or 4 times too early",
)
def test_rate_of_an_update(stack, device, check, for_all):
    schedule = Schedule(peak=1.0, total_tokens=60, warmup_tokens=20, decay_tokens=20)
    settings = UpdateSettings(schedule)
    model = toys.LinearLoss([[1.0], [-1.0]], start_D=[1.0]).to(device)

    @for_all(
        windows=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=9),
        max_examples=40,
    )
    def _(windows):
        training = TrainState(model, stack.param_groups(model, 0.1))
        done = 0
        for counts in windows:
            # Rows of 8 positions, so that positions read and targets differ.
            window = toys.rows(*[toys.row([0] * 8, num_targets=count) for count in counts])
            record = stack.update_window(training, window.to(device), stack, settings)
            done += sum(counts)
            if sum(counts):
                check(
                    "distance from the schedule's rate",
                    abs(record.learning_rate - learning_rate(done, schedule)),
                    at_most=1e-12,
                    because=FLOATS,
                )


@gate(
    claim="the rate that the record names is the rate that moved the weights",
    roles=["learning_rate", "optimizer_step", "update_window"],
    not_claimed="Adam's own step, which epsilon outweighs here",
    source="vllm-project/speculators PR#900: the rate used was one update behind the one logged",
)
def test_rate_is_applied(stack, device, check):
    model = toys.LinearLoss([[1.0]], start_D=[0.0]).to(device)
    peak = toys.OUTWEIGHING_EPSILON
    schedule = Schedule(peak, total_tokens=80, warmup_tokens=40, decay_tokens=20)
    settings = replace(toys.plain_descent(), schedule=schedule)
    training = TrainState(model, stack.param_groups(model, 0.0))
    shares = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.0]
    steps = []
    for share in shares:
        start = float(model.lm_head.weight.detach())
        stack.update_window(training, toys.rows(toys.row([0] * 10)).to(device), stack, settings)
        steps.append(start - float(model.lm_head.weight.detach()))
        check(
            f"step {len(steps)}",
            steps[-1],
            within=(share - 1e-5, share + 1e-5),
            because="gradient 1 times the rate of this update, weights in float32",
        )
    check.series("step", steps, x_label="window of 10 targets", y_label="displacement")
