"""M2. Windows in, updates out: what is applied, what is skipped, and what is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gates import toys
from harness import gate
from harness.compare import max_abs_error, relative_error
from reference.schedule import Schedule, learning_rate
from reference.update import TrainState, UpdateSettings

SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=1000, warmup_tokens=100))
EXACT = "counts are whole numbers"


def trained(stack, model, windows, settings=SETTINGS):
    """A TrainState after these windows, and their records."""
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    records = [stack.update_window(training, window, stack, settings) for window in windows]
    return training, records


def values_of(training):
    """All parameters and moments as one vector, and the steps of all parameters."""
    parameters = dict(training.model.named_parameters())
    states = {name: training.optimizer_state[p] for name, p in parameters.items()}
    moments = {f"{name} first": state.first_moment for name, state in states.items()}
    moments |= {f"{name} second": state.second_moment for name, state in states.items()}
    return toys.flat(parameters | moments).clone(), [int(state.step) for state in states.values()]


def counts_of(counters):
    return [
        counters.tokens_read,
        counters.tokens_supervised,
        counters.tokens_updated,
        counters.optimizer_steps,
    ]


@gate(
    claim="a window that cannot be applied changes nothing but what was read, and says so",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "learning_rate", "update_window"],
    not_claimed="agreement between ranks on what to skip",
    source="a step with a zero gradient would still decay weights and move along old moments; "
    "ml-explore/mlx-lm PR#1413: all-masked window divides by zero; pytorch/pytorch#70348: a NaN "
    "loss with finite gradients",
)
@pytest.mark.parametrize("kind", ["no targets", "not finite", "loss not finite"])
def test_skipped_window(stack, kind, rng, device, check):
    added_nats = [0.0]  # to every loss sum: a NaN that no gradient sees

    def token_nll(*arguments):
        nll_sum, num_targets = stack.token_nll(*arguments)
        return nll_sum + added_nats[0], num_targets

    model = toys.tiny_model(stack.replace({"token_nll": token_nll}), device, num_layers=1)
    good = [toys.ragged_window(rng, (5, 0, 3), num_tokens=8).to(device) for _ in range(4)]
    training, _ = trained(stack, model, good[:2])
    values, steps = values_of(training)
    counts = counts_of(training.counters)
    bad = good[2].split(3)
    if kind == "no targets":
        record = stack.update_window(training, bad.trim(0), stack, SETTINGS)
        supervised = 0
    elif kind == "loss not finite":
        added_nats[0] = float("nan")
        record = stack.update_window(training, bad, stack, SETTINGS)
        added_nats[0], supervised = 0.0, 8
    else:
        gain = model.norm.weight
        kept = gain.data.clone()
        gain.data.fill_(float("nan"))
        record = stack.update_window(training, bad, stack, SETTINGS)
        gain.data.copy_(kept)
        supervised = 8
    values_after, steps_after = values_of(training)
    check(
        "largest change of parameters and moments",
        max_abs_error(values_after, values),
        equal=0.0,
        because="nothing was applied: no step, no decay, no moment",
    )
    check("optimizer steps of the parameters", steps_after, equal=steps, because=EXACT)
    check(
        "read, supervised, updated, steps",
        counts_of(training.counters),
        equal=[counts[0] + 24, counts[1] + supervised, counts[2], counts[3]],
        because="24 positions were read; nothing was applied",
    )
    check("skipped has a reason", bool(record.skipped), equal=True, because="never in silence")
    after = stack.update_window(training, good[3], stack, SETTINGS)
    check(
        "learning rate of the next window",
        after.learning_rate,
        within=(SETTINGS.schedule.peak * 0.2399999, SETTINGS.schedule.peak * 0.2400001),
        because="third window applied of 8 targets each: 24/100 of the warmup",
    )
    check("next window is applied", after.skipped is None, equal=True, because="one bad window")


@gate(
    claim="tokens read, supervised and updated and optimizer steps are four counts, all exact",
    roles=["accumulate", "update_window"],
    not_claimed="time and throughput",
    source="vllm-project/speculators PR#942 (labels, not numel), modelscope/ms-swift#10099 (units)"
    ", karpathy/nanochat PR#175 (all microbatches, not one)",
)
@pytest.mark.parametrize("k", [1, 4])
def test_counters(stack, k, rng, device, check):
    model = toys.tiny_model(stack, device, num_layers=1)
    targets = [(8, 0, 1, 5), (0, 0, 0, 0), (2, 2, 2, 2), (0, 0, 7, 0)]
    windows = [toys.ragged_window(rng, row, 8).split(k).to(device) for row in targets]
    _, records = trained(stack, model, windows)
    want = [[32, 14, 14, 1], [64, 14, 14, 1], [96, 22, 22, 2], [128, 29, 29, 3]]
    for index, record in enumerate(records):
        check(
            f"read, supervised, updated, steps after window {index + 1}",
            counts_of(record.counters),
            equal=want[index],
            because="4 rows of 8 positions a window; 14, 0, 8 and 7 labels that are not -100",
        )
        check(
            f"targets and tokens of window {index + 1}",
            [record.num_targets, record.num_tokens],
            equal=[sum(targets[index]), 32],
            because="the whole window, whatever its microbatches",
        )


@gate(
    claim="the recorded loss is the sum over all targets divided by all targets: 2.5, not 3",
    roles=["accumulate", "update_window"],
    not_claimed="anything beyond these numbers",
    source="sums 6 and 4 over 3 and 1 targets: (6 + 4) / (3 + 1) = 2.5; the mean of means is 3",
)
def test_recorded_loss(stack, device, check):
    model = toys.LinearLoss([[2.0], [4.0]], start_D=[1.0]).to(device)
    window = toys.rows(toys.row([0, 0, 0, 1], num_targets=3), toys.row([1, 0, 0, 0], num_targets=1))
    _, (record,) = trained(stack, model, [window.to(device)], toys.plain_descent())
    exact = "whole numbers, exact in float32"
    check("recorded loss", record.loss_nats, equal=2.5, because=exact, unit="nats per token")
    check("recorded sum", record.nll_sum, equal=10.0, because=exact, unit="nats")
    check("recorded norm", record.grad_norm, equal=2.5, because=exact)


@gate(
    claim="k microbatches give the same records and the same parameters over several updates",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "learning_rate", "update_window"],
    not_claimed="bitwise equality",
    source="an update is a function of the window, not of its microbatches",
)
@pytest.mark.parametrize("k", [2, 5])
def test_microbatches_do_not_matter(stack, k, rng, device, check):
    whole = [toys.ragged_window(rng, (5, 1, 0, 0, 8), num_tokens=8) for _ in range(4)]
    whole = [window.to(device) for window in whole]
    first = toys.tiny_model(stack, device, num_layers=1)
    second = toys.tiny_model(stack, device, num_layers=1)
    second.load_state_dict(first.state_dict())
    # An epsilon of the gradients' size: with 1e-8 a rounding of a gradient near 0 is a full step.
    settings = replace(SETTINGS, epsilon=1e-3)
    training, want = trained(stack, first, whole, settings)
    other, got = trained(stack, second, [window.split(k) for window in whole], settings)
    bound = toys.rounding(toys.working_dtype(stack))
    for one, another in zip(want, got, strict=True):
        check("recorded norm ratio", another.grad_norm / one.grad_norm,
              within=(1 - max(bound, 1e-6), 1 + max(bound, 1e-6)),
              because="the same gradient, its norm in float32 or wider")  # fmt: skip
        check("recorded loss ratio", another.loss_nats / one.loss_nats,
              within=(1 - max(bound, 1e-6), 1 + max(bound, 1e-6)),
              because="the same sum, kept in float32 or wider")  # fmt: skip
        check("learning rate", another.learning_rate, equal=one.learning_rate,
              because="the same tokens")  # fmt: skip
        check("counters", counts_of(another.counters), equal=counts_of(one.counters), because=EXACT)
    check(
        "relative difference of the parameters",
        relative_error(values_of(other)[0], values_of(training)[0]),
        at_most=max(bound, 1e-9),
        because="float64 sums in another order, through four updates",
    )


def windows_for_training(rng, counts):
    return [toys.ragged_window(rng, row, num_tokens=8) for row in counts]


@gate(
    claim="the last window is trimmed or overshot as declared, and the counters say so",
    roles=["train", "update_window"],
    not_claimed="how many tokens a plan should have",
    source="the plan's arithmetic: 23e9 tokens in windows of 1,048,576 leave a last one of 534,016",
)
@pytest.mark.parametrize("last_window", ["trim", "overshoot"])
@pytest.mark.parametrize("total", [30, 25, 20, 1])
def test_last_window(stack, last_window, total, rng, device, check):
    windows = windows_for_training(rng, [(4, 6), (8, 2), (5, 5), (3, 7)])
    result = stack.train(
        toys.TINY, stack, iter(windows), SETTINGS, 0, device, total, last_window, False
    )
    num_updates = math.ceil(total / 10)
    last = total - 10 * (num_updates - 1) if last_window == "trim" else 10
    applied = 10 * (num_updates - 1) + last
    check("updates", len(result.records), equal=num_updates, because="ceil(total / 10 targets)")
    check("targets of the last window", result.records[-1].num_targets, equal=last, because=EXACT)
    check(
        "read, supervised, updated, steps",
        counts_of(result.counters),
        equal=[16 * num_updates, applied, applied, num_updates],
        because=f"{last_window}: {applied} of the {total} asked, inputs are read whole",
    )
    check(
        "learning rate of the last window",
        result.records[-1].learning_rate,
        equal=learning_rate(applied, SETTINGS.schedule),
        because="the schedule counts what was applied",
    )


@gate(
    claim="no window is left out: one update each, also for a short last one",
    roles=["accumulate", "train", "update_window"],
    not_claimed="the data path before the windows",
    source="ml-explore/mlx-lm PR#1413: the final partial window dropped, or divided by the full "
    "number of microbatches; verl-project/verl#7401: total steps = planned",
)
def test_last_partial_window(stack, rng, device, check):
    config = replace(toys.TINY, num_layers=1)
    windows = [
        *(w.split(4) for w in windows_for_training(rng, [(8, 1, 0, 3), (2, 2, 8, 0)])),
        *(w.split(3) for w in windows_for_training(rng, [(8, 1, 1)])),
    ]
    result = stack.train(config, stack, windows, SETTINGS, 0, device, None, "overshoot", False)
    check("updates", len(result.records), equal=3, because="three windows")
    check(
        "read, supervised, updated, steps",
        counts_of(result.counters),
        equal=[88, 34, 34, 3],
        because="32 + 32 + 24 positions, 12 + 12 + 10 targets",
    )
    # Without its last window the run ends where that window begins.
    start = stack.train(config, stack, windows[:2], SETTINGS, 0, device, None, "overshoot", False)
    loss, gradient = toys.token_mean(start.model, windows[-1])
    norm = float(toys.flat(gradient).norm())
    last = result.records[-1]
    tolerance = {"within": (1 - 1e-4, 1 + 1e-4), "because": "float32 model against float64"}
    check("norm of the last window / its token mean's", last.grad_norm / norm, **tolerance)
    check("loss of the last window / its token mean", last.loss_nats / loss, **tolerance)
    moved = [
        float((after - before).detach().abs().max())
        for after, before in zip(result.model.parameters(), start.model.parameters(), strict=True)
    ]
    check(
        "parameters that the last window moved",
        sum(change > 0 for change in moved),
        equal=len(moved),
        because="every parameter is on the way to the loss",
    )


@gate(
    claim="the loop applies windows in order, each to the parameters that the one before left",
    roles=["train", "update_window"],
    not_claimed="resuming",
    source="the definition of a training run; the records are compared with a loop written here",
)
def test_loop(stack, rng, device, check):
    config = replace(toys.TINY, num_layers=1)
    windows = windows_for_training(rng, [(8, 1), (2, 2), (0, 0), (5, 6), (1, 0)])
    start = stack.train(config, stack, windows[:1], SETTINGS, 3, device, None, "overshoot", False)
    result = stack.train(config, stack, windows, SETTINGS, 3, device, None, "overshoot", False)
    torch.manual_seed(3)
    model = stack.build_model(config, stack).to(device)
    training, want = trained(stack, model, [window.to(device) for window in windows])
    for index, (got, wanted) in enumerate(zip(result.records, want, strict=True)):
        if wanted.skipped is None:
            check(f"loss of window {index + 1} / by hand", got.loss_nats / wanted.loss_nats,
                  within=(1 - 1e-5, 1 + 1e-5), because="float32, the same operations")  # fmt: skip
        check("counters", counts_of(got.counters), equal=counts_of(wanted.counters), because=EXACT)
    check(
        "first loss, run again / first loss",
        start.records[0].loss_nats / result.records[0].loss_nats,
        within=(1 - 1e-6, 1 + 1e-6),
        because="the same seed gives the same initial parameters",
    )
    check(
        "relative difference of the last parameters",
        relative_error(
            toys.flat(dict(result.model.named_parameters())),
            toys.flat(dict(training.model.named_parameters())),
        ),
        at_most=1e-4,
        because="float32, the same operations on the same device",
    )
