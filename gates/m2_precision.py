"""M2. bfloat16 compute over float32 weights: nothing small is lost between them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gates import toys
from harness import gate
from harness.compare import max_abs_error, relative_error
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings

SETTINGS = UpdateSettings(Schedule(peak=1e-5, total_tokens=2**40), weight_decay=0.0)


def bfloat16_model(stack, device):
    config = replace(toys.TINY, compute_dtype=toys.require_bfloat16(stack))
    return stack.build_model(config, stack).to(device)


@gate(
    claim="updates far smaller than a weight add up: 1 - 100 * 6e-4 is 0.94, not 1",
    roles=["optimizer_step"],
    not_claimed="bfloat16 parameters with stochastic rounding or compensation",
    source="workofart/ml-by-hand PR#85: 0 of 768 weights moved in 100 updates of bfloat16 weights",
)
def test_master_weight(stack, device, check):
    weight = nn.Parameter(torch.ones(2, 2, device=device))
    groups, state = [{"params": [weight], "weight_decay": 0.0}], {}
    for _ in range(100):
        weight.grad = torch.full_like(weight, 0.5)
        stack.optimizer_step(groups, state, 6e-4, (0.9, 0.95), 1e-8)
    check(
        "weight after 100 updates of 6e-4",
        weight.detach().mean(),
        within=(0.94 - 1e-5, 0.94 + 1e-5),
        because="a constant gradient moves AdamW by its rate; 100 roundings of 6e-8",
    )


@gate(
    claim="one small update of a model that computes in bfloat16 moves all weights with a gradient",
    roles=["accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="that the move is the right one (m2_optimizer)",
    source="meta-pytorch/torchtune#2254: a bfloat16 step is lost in weights 400 times larger",
)
def test_weights_move(stack, rng, device, check):
    model = bfloat16_model(stack, device)
    window = toys.ragged_window(rng, (16, 3, 0, 7) * 2).split(4).to(device)
    training = TrainState(model, stack.param_groups(model, 0.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stack.accumulate(model, window, None)
    gradients = toys.gradients(model)
    stack.update_window(training, window, stack, SETTINGS)
    # Adam's first step has the size of the rate where the gradient is well above epsilon.
    moved, expected = 0, 0
    for name, parameter in model.named_parameters():
        has_gradient = gradients[name].abs() > 1e-6
        spacing = before[name].abs() * torch.finfo(torch.float32).eps
        can_move = has_gradient & (spacing < SETTINGS.schedule.peak)
        moved += int(((parameter.detach() != before[name]) & can_move).sum())
        expected += int(can_move.sum())
    check("weights that must move", expected, at_least=1000, because="2 layers of width 16")
    check("share that moved", moved / expected, equal=1.0,
          because="a step of 1e-5 is above the float32 spacing of every weight")  # fmt: skip


@gate(
    claim="gradients of microbatches add up in float32: 256 + 1 = 257, and 1024 parts are a whole",
    roles=["accumulate"],
    not_claimed="reductions inside one microbatch",
    source="ISEEKYAN/Megatron-LM PR#146: 256 + 1 = 256 in bfloat16; pytorch/pytorch#106395",
)
@pytest.mark.parametrize(
    ("directions", "tokens", "want"),
    [([512.0, 2.0], [0, 1], 257.0), ([1.0], [0] * 1024, 1.0)],
    ids=["256+1", "1024/1024"],
)
def test_sum_over_microbatches(stack, directions, tokens, want, device, check):
    directions_VD = [[value] for value in directions]
    model = toys.LinearLoss(directions_VD, [0.0], compute_dtype=torch.bfloat16).to(device)
    window = toys.rows(*[toys.row([token]) for token in tokens])  # a target a microbatch
    stack.accumulate(model, window.to(device), None)
    check(
        "sum of the gradients",
        toys.gradients(model)["lm_head.weight"],
        equal=want,
        because="every part is exact in bfloat16, every sum in float32; sums kept in bfloat16 give "
        "256 and 0.25",
    )


@gate(
    claim="the error of a bfloat16 gradient does not grow with the number of microbatches",
    roles=["accumulate"],
    not_claimed="that bfloat16 is precise enough for a given training run",
    source="hiyouga/LlamaFactory#9769, deepspeedai/DeepSpeed#2352: bfloat16 accumulation",
)
def test_error_does_not_grow(stack, rng, device, check):
    model = bfloat16_model(stack, device)
    window = toys.ragged_window(rng, (16, 3, 0, 7) * 8)
    loss, gradient = toys.token_mean(model, window)
    want, errors = toys.flat(gradient), []
    for k in (1, 4, 32):
        stats = stack.accumulate(model, window.split(k).to(device), None)
        errors.append(relative_error(toys.flat(toys.gradients(model)), want))
        check(f"relative gradient error, {k} microbatches", errors[-1], at_most=2e-2,
              because="the classical bound for bfloat16; 5e-3 is usual here")  # fmt: skip
        check("relative loss error", abs(stats.nll_sum / stats.num_targets / loss - 1),
              at_most=1e-3, because="the end-to-end bound for bfloat16 compute")  # fmt: skip
    check.series("error", errors, [1, 4, 32], "microbatches", "relative gradient error")
    check(
        "error at 32 microbatches / at 1",
        errors[-1] / errors[0],
        at_most=1.2,
        because="0.95 to 1.08 over 68 seeds; sums kept in bfloat16 give 1.36 to 1.92",
    )


@gate(
    claim="compute in bfloat16 leaves parameters, gradients and moments in float32",
    roles=["build_model", "accumulate", "optimizer_step", "update_window"],
    not_claimed="other mixed-precision recipes",
    source="2 bytes compute, 4 bytes each for weights, gradients and two moments",
)
def test_dtypes(stack, rng, device, check):
    model = bfloat16_model(stack, device)
    window = toys.ragged_window(rng, (4, 2), num_tokens=8).to(device)
    training = TrainState(model, stack.param_groups(model, 0.1))
    stack.update_window(training, window, stack, SETTINGS)
    stack.accumulate(model, window, None)
    microbatch = window.microbatches[0]
    hidden = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    check(
        "hidden states",
        str(hidden.dtype),
        equal=str(model.config.compute_dtype),
        because="that was asked for",
    )
    states = [training.optimizer_state[p] for p in model.parameters()]
    found = {
        "parameters": {p.dtype for p in model.parameters()},
        "gradients": {p.grad.dtype for p in model.parameters()},
        "first moments": {state.first_moment.dtype for state in states},
        "second moments": {state.second_moment.dtype for state in states},
    }
    for name, dtypes in found.items():
        check(name, sorted(map(str, dtypes)), equal=["torch.float32"],
              because="with 8 bits small updates and slow means are lost")  # fmt: skip


@gate(
    claim="casts are taken from the weights of now, with their graph: an evaluation in between "
    "changes no gradient, an update changes the next forward",
    roles=["build_model", "evaluate", "accumulate", "update_window"],
    not_claimed="torch.autocast, which the reference does not use",
    source="pytorch/pytorch#112583: casts cached under no_grad have no graph, and go stale",
)
def test_casts_are_fresh(stack, rng, device, check):
    window = toys.ragged_window(rng, (5, 0, 8), num_tokens=8).to(device)
    model = bfloat16_model(stack, device)
    untouched = copy.deepcopy(model)
    stack.accumulate(untouched, window, None)
    stack.evaluate(model, [window])
    stack.accumulate(model, window, None)
    check(
        "parameters without a gradient after an evaluation",
        [name for name, p in model.named_parameters() if p.grad is None],
        equal=[],
        because="every parameter is on the way to the loss",
    )
    check(
        "largest change of a gradient by an evaluation before",
        max_abs_error(toys.flat(toys.gradients(model)), toys.flat(toys.gradients(untouched))),
        equal=0.0,
        because="the same operations on the same weights",
    )
    training = TrainState(model, stack.param_groups(model, 0.0))
    large = replace(SETTINGS, schedule=Schedule(peak=1e-1, total_tokens=2**40))
    stack.update_window(training, window, stack, large)
    twin = bfloat16_model(stack, device)
    twin.load_state_dict(model.state_dict())
    got, want = stack.evaluate(model, [window]), stack.evaluate(twin, [window])
    check(
        "loss after the update / of a new model with these weights",
        got.nats / want.nats,
        within=(1 - 1e-6, 1 + 1e-6),
        because="the same weights; only what was kept from before can differ",
    )
