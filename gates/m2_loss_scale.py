"""M2. Compute in float16: one loss scale a window, divided out once before the clip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from gates import toys
from harness import gate, not_run
from harness.compare import relative_error, worst_relative
from reference.loss_scale import LossScaleState, LossScaling
from reference.update import NonFiniteError, TrainState

EXACT = "powers of two, exact in float16 and float32"
# Gradients of a target. Under scales of 2^8 to 2^15 the first fits float16, which ends at 65504,
# and the second does not, whether or not the window's two targets were divided out before.
DIRECTIONS = [[2.0**-6], [60000.0]]
GOOD, LARGE, EMPTY = 0, 1, 2


def float16_toy(device):
    return toys.LinearLoss(DIRECTIONS, start_D=[0.0], compute_dtype=torch.float16).to(device)


def window_of(kind, device):
    """Two targets in two microbatches; of EMPTY none."""
    token = GOOD if kind == EMPTY else kind
    rows = [toys.row([token], num_targets=int(kind != EMPTY)) for _ in range(2)]
    return toys.rows(*rows).to(device)


def settings_of(interval=2, initial=2.0**12, **changes):
    scaling = LossScaling(initial=initial, interval=interval)
    return replace(toys.plain_descent(max_norm=1.0), loss_scaling=scaling, **changes)


def weight_of(training):
    return float(training.model.lm_head.weight.detach())


@gate(
    claim="a loss scale leaves the gradient of the window's token mean and the reported loss alone",
    roles=["accumulate"],
    not_claimed="which scale is good",
    source="huggingface/accelerate#641: unscaled inside the window, a sum of 2 became 1025",
)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_divided_out_once(stack, k, scale, rng, device, check):
    model = toys.tiny_model(stack, device, num_layers=1)
    window = toys.ragged_window(rng, (16, 1, 0, 3, 16, 0, 2, 7))
    loss, want = toys.token_mean(model, window)
    stats = stack.accumulate(model, window.split(k).to(device), None, scale)
    got = toys.gradients(model)
    bound = toys.rounding(toys.working_dtype(stack))
    because = "multiplied by the scale and divided by it, once"
    check("relative gradient error", worst_relative(got, want), at_most=bound, because=because)
    check(
        "gradient norm / that of the token mean",
        toys.flat(got).norm() / toys.flat(want).norm(),
        within=(1 - bound, 1 + bound),
        because="Adam hides a scale; the norm, on which the clip acts, does not",
    )
    check(
        "relative error of the loss sum",
        abs(stats.nll_sum / stats.num_targets / loss - 1),
        at_most=min(max(bound, 1e-6), 1e-5),
        because="the loss is reported without the scale, in float32 at least",
    )


@gate(
    claim="gradients below float16's smallest number arrive whole under a loss scale",
    roles=["accumulate"],
    not_claimed="gradients below it with the scale too",
    source="Micikevicius et al. 2018, section 3.2; float16 ends at 2^-24",
)
def test_small_gradients(stack, device, check):
    model = toys.LinearLoss([[2.0**-14]], [0.0], compute_dtype=torch.float16).to(device)
    window = toys.rows(*[toys.row([0] * 1024) for _ in range(4)]).to(device)
    stack.accumulate(model, window, None, 2.0**12)
    check(
        "gradient",
        toys.gradients(model)["lm_head.weight"],
        equal=2.0**-14,
        because="each of 4096 targets gives 2^-26: 0 in float16, and 2^-14 under the scale",
    )


@gate(
    claim="the scale halves where float16 overflows and doubles after two finite updates; a window "
    "that overflows is skipped and counted apart, one without targets changes no scale",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="several ranks (M6)",
    source="torch.amp.GradScaler, once a window; harubaru/waifu-diffusion#64: a clip of scaled "
    "gradients clips all",
)
def test_scale_of_a_run(stack, device, check):
    model = float16_toy(device)
    training = TrainState(model, stack.param_groups(model, 0.0))
    exponents = (12, 12, 11, 10, 10, 10, 11, 11)  # of the scale that each window is computed with
    kinds = (GOOD, LARGE, LARGE, GOOD, EMPTY, GOOD, GOOD, GOOD)
    for index, kind in enumerate(kinds):
        window = window_of(kind, device)
        record = stack.update_window(training, window, stack, settings_of())
        name, done = f"window {index + 1}", kinds[: index + 1]
        check(f"scale of {name}", record.loss_scale, equal=2.0 ** exponents[index],
              because="by hand, from 2^12")  # fmt: skip
        check(f"{name} is applied", record.skipped is None, equal=kind == GOOD,
              because="60000 times the scale is beyond float16")  # fmt: skip
        if kind == GOOD:
            check(f"norm of {name}", record.grad_norm, equal=2.0**-6,
                  because=f"before clipping, without the scale; {EXACT}")  # fmt: skip
        num_applied = done.count(GOOD)
        want = -num_applied * 2.0**-6
        check(f"weight after {name}", weight_of(training), within=(want - 1e-6, want + 1e-6),
              because="a gradient of 2^-6 at rate 1; nothing when skipped")  # fmt: skip
        counters = training.counters
        check(
            f"supervised, updated, steps after {name}",
            [counters.tokens_supervised, counters.tokens_updated, counters.optimizer_steps],
            equal=[2 * (len(done) - done.count(EMPTY)), 2 * num_applied, num_applied],
            because="a skipped update is none",
        )
    check(
        "scale, finite updates in a row, skipped updates",
        _fields(training.loss_scale),
        equal=[2.0**12, 0, 2],
        because="doubled by the sixth and the eighth window; two windows overflowed",
    )


def _fields(state: LossScaleState):
    return [state.scale, state.good_updates, state.skipped_updates]


@gate(
    claim="a window that overflows is applied, and rightly, once the scale is small enough",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="how many windows are skipped until then",
    source="torch.amp.GradScaler",
)
def test_overflow_is_cured(stack, device, check):
    training = TrainState(model := float16_toy(device), stack.param_groups(model, 0.0))
    for _ in range(20):
        record = stack.update_window(training, window_of(LARGE, device), stack, settings_of())
        if record.skipped is None:
            break
    check("windows skipped before", training.loss_scale.skipped_updates, within=(1, 12),
          because="from 2^12 down to at least 1: 60000 is in float16")  # fmt: skip
    check("weight", weight_of(training), within=(-1 - 1e-5, -1 + 1e-5),
          because="a gradient of 60000, clipped to 1, applied once")  # fmt: skip


@gate(
    claim="whatever windows come, the scale is that of torch's GradScaler stepped once a window",
    roles=["accumulate", "update_window"],
    not_claimed="scales that float32 does not hold",
    source="torch._amp_update_scale_, which GradScaler.update calls",
)
def test_any_windows(stack, device, check, for_all):
    @for_all(
        kinds=st.lists(st.sampled_from([GOOD, LARGE, EMPTY]), min_size=1, max_size=9).filter(
            lambda kinds: kinds.count(LARGE) <= 3 and kinds.count(GOOD) <= 3
        ),
        interval=st.integers(1, 4),
        exponent=st.sampled_from([11, 12]),
        max_examples=30,
    )
    def _(kinds, interval, exponent):
        model = float16_toy(device)
        training = TrainState(model, stack.param_groups(model, 0.0))
        settings = settings_of(interval, initial=2.0**exponent)
        scale = torch.tensor(2.0**exponent)
        num_good, num_skipped = torch.tensor(0, dtype=torch.int32), 0
        for kind in kinds:
            stack.update_window(training, window_of(kind, device), stack, settings)
            if kind != EMPTY:
                num_skipped += kind == LARGE
                found_inf = torch.tensor(float(kind == LARGE))
                torch._amp_update_scale_(scale, num_good, found_inf, 2.0, 0.5, interval)
            state = training.loss_scale or LossScaleState(2.0**exponent)
            check("scale", state.scale, equal=float(scale), because=EXACT)
            check("finite updates in a row", state.good_updates, equal=int(num_good),
                  because="counts are whole numbers")  # fmt: skip
            check("skipped updates", state.skipped_updates, equal=num_skipped,
                  because="counts are whole numbers")  # fmt: skip


STOPS = {
    "norm, no scaling": ("norm", None, "stopped"),
    "loss, no scaling": ("loss", None, "stopped"),
    "norm, scale 4": ("norm", 4.0, "skipped"),
    "norm, scale 1": ("norm", 1.0, "stopped"),
    "loss, scale 4": ("loss", 4.0, "stopped"),
}


@gate(
    claim="on_non_finite stop ends the run before anything is applied, but leaves an overflow that "
    "a smaller scale may cure to the scale",
    roles=["accumulate", "clip_grad_norm", "update_window"],
    not_claimed="several ranks (M6)",
    source="issue 4, point 2: a skip or a stop, as configured",
)
@pytest.mark.parametrize("case", STOPS)
def test_stop(stack, case, device, check):
    what, scale, want = STOPS[case]
    model = toys.LinearLoss([[1.0]], start_D=[0.0]).to(device)
    if what == "norm":
        model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        nll = model.stack.token_nll
        model.stack.token_nll = lambda *inputs: (nll(*inputs)[0] + float("nan"), nll(*inputs)[1])
    training = TrainState(model, stack.param_groups(model, 0.0))
    settings = replace(
        toys.plain_descent(max_norm=1.0),
        on_non_finite="stop",
        loss_scaling=None if scale is None else LossScaling(initial=scale),
    )
    window = toys.rows(toys.row([0])).to(device)
    try:
        record = stack.update_window(training, window, stack, settings)
        ended = "applied" if record.skipped is None else "skipped"
    except NonFiniteError:
        ended = "stopped"
    check("how the update ended", ended, equal=want, because="as configured")
    check("weight", weight_of(training), equal=0.0, because="nothing was applied")
    check("optimizer steps", training.counters.optimizer_steps, equal=0, because="nothing applied")


@gate(
    claim="a decoder that computes in float16 has the gradient of its float64 twin to float16's "
    "rounding, also where its losses are scaled",
    roles=["build_model", "accumulate"],
    not_claimed="that float16 is precise enough for a given training run",
    source="a float16 unit of last place is 2^-10; bfloat16 would be 8 times as coarse",
)
def test_float16_decoder(stack, rng, device, check):
    if torch.float16 not in stack.dtypes:
        not_run("What is on trial declares no float16 on this device (DTYPES).")
    config = replace(toys.TINY, compute_dtype=torch.float16)
    model = stack.build_model(config, stack).to(device)
    window = toys.ragged_window(rng, (16, 3, 0, 7) * 2)
    loss, want = toys.token_mean(model, window)
    for scale in (1.0, 2.0**12):
        stats = stack.accumulate(model, window.split(4).to(device), None, scale)
        error = relative_error(toys.flat(toys.gradients(model)), toys.flat(want))
        check(f"relative gradient error under the scale {scale:g}", error, at_most=2e-3,
              because="5e-4 to 8e-4 over 40 seeds; bfloat16 has 4e-3 to 6e-3")  # fmt: skip
        check("relative loss error", abs(stats.nll_sum / stats.num_targets / loss - 1),
              at_most=1e-3, because="the end-to-end bound")  # fmt: skip
