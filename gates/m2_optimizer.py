"""M2. AdamW: its formula over many updates and gaps, its groups, its decay, its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gates import toys
from harness import gate
from harness.compare import max_abs_error, relative_error
from reference.config import CharGPTConfig

BETAS, EPSILON = (0.9, 0.95), 1e-8
SHAPES = ((4, 3), (5,), (2, 3), (1,))
# Gradients of these sizes: from far above epsilon to far below, where its place shows.
SCALES = (1.0, 1e-4, 1e-8, 1e-10)


def parameters_of(rng, device, dtype):
    return [nn.Parameter(torch.randn(s, generator=rng).to(device, dtype)) for s in SHAPES]


def groups_of(parameters):
    return [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "weight_decay": 0.0},
    ]


@gate(
    claim="AdamW equals torch's over 12 updates in which parameters miss their gradient in turn, "
    "with changing rates and gradients from far above to far below epsilon",
    roles=["optimizer_step"],
    not_claimed="speed, parameters narrower than float32",
    source="torch.optim.AdamW; deepspeedai/DeepSpeed PR#8471: one shared step count",
)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
def test_against_torch(stack, betas, rng, device, check):
    dtype = toys.working_dtype(stack)
    parameters = parameters_of(rng, device, dtype)
    twins = [nn.Parameter(p.detach().cpu().double().clone()) for p in parameters]
    start = [twin.detach().clone() for twin in twins]
    groups, state = groups_of(parameters), {}
    oracle = torch.optim.AdamW(groups_of(twins), lr=1.0, betas=betas, eps=EPSILON)
    for update in range(12):
        rate = 1e-2 / (1 + update)
        for index, (parameter, twin, scale) in enumerate(
            zip(parameters, twins, SCALES, strict=True)
        ):
            gradient = scale * torch.randn(parameter.shape, generator=rng).double()
            idle = (update + index) % (index + 2) == 0  # every second, third, … update
            twin.grad = None if idle else gradient
            parameter.grad = None if idle else gradient.to(device, dtype)
        for group in oracle.param_groups:
            group["lr"] = rate
        stack.optimizer_step(groups, state, rate, betas, EPSILON)
        oracle.step()
        for parameter, twin, before, scale in zip(parameters, twins, start, SCALES, strict=True):
            check(
                f"relative error of the displacement, gradients of {scale}",
                relative_error(parameter.detach().cpu().double() - before, twin.detach() - before),
                at_most=1e-9 if dtype == torch.float64 else 1e-4 if scale > EPSILON else 1e-2,
                because="the same formula in float64; a displacement of 1e-2 of weights of 1 "
                "keeps 13 of 15 digits (5 of 7 in float32), one of 1e-4 two less",
            )


@gate(
    claim="two updates have the values of a calculation by hand",
    roles=["optimizer_step"],
    not_claimed="anything beyond these numbers",
    source="Loshchilov and Hutter 2019, algorithm 2, with betas (0.5, 0.75) and epsilon 0.5",
)
def test_hand_example(stack, device, check):
    # g 1:  m 0.5, v 0.25; corrected 1 and 1; p = 1 * (1 - 0.1*0.5) - 0.1 * 1 / 1.5
    # g -1: m -0.25, v 0.4375; corrected -1/3 and 1; p = p * 0.95 + 0.1 * (1/3) / 1.5
    first = 0.95 - 0.1 / 1.5
    second = first * 0.95 + 0.1 / 3 / 1.5
    parameter = nn.Parameter(torch.ones(1, 1, device=device))
    groups, state = [{"params": [parameter], "weight_decay": 0.5}], {}
    for update, gradient, want in ((1, 1.0, first), (2, -1.0, second)):
        parameter.grad = torch.full((1, 1), gradient, device=device)
        stack.optimizer_step(groups, state, 0.1, (0.5, 0.75), 0.5)
        check(
            f"weight after update {update}",
            parameter.detach(),
            within=(want - 1e-6, want + 1e-6),
            because="float32",
        )


@gate(
    claim="with zero gradients matrices decay by (1 - rate * decay) an update and vectors stay",
    roles=["param_groups", "optimizer_step"],
    not_claimed="that decay is good for the model",
    source="ServiceNow/Fast-LLM#542: at rate 1e-3 and decay 0.1, 1000 updates give 0.9048 or 1.0",
)
def test_decay(stack, device, check):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).to(device)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    groups, state = stack.param_groups(model, 0.1), {}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(1000):
        stack.optimizer_step(groups, state, 1e-3, BETAS, EPSILON)
    for name, parameter in model.named_parameters():
        want = (1 - 1e-4) ** 1000 if parameter.dim() == 2 else 1.0  # 0.90483
        check(
            f"{'matrix' if parameter.dim() == 2 else 'vector'} {name}",
            parameter.detach().mean(),
            within=(want - 1e-4, want + 1e-4),
            because="1000 products in float32, 6e-8 each; no gradient, so nothing but the decay",
        )


@gate(
    claim="at rate 0 nothing moves; the decay scales with the rate",
    roles=["optimizer_step"],
    not_claimed="decoupled decay that is independent of the rate, another method",
    source="Loshchilov and Hutter 2019, as torch.optim.AdamW has it",
)
def test_rate_zero(stack, rng, device, check):
    (parameter, *_) = parameters_of(rng, device, torch.float32)
    before = parameter.detach().clone()
    parameter.grad = torch.randn(parameter.shape, generator=rng).to(device)
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    stack.optimizer_step(groups, {}, 0.0, BETAS, EPSILON)
    check("largest change", max_abs_error(parameter, before), equal=0.0, because="rate 0")


@gate(
    claim="a parameter without a gradient is left alone: no step, no decay, no moment",
    roles=["optimizer_step"],
    not_claimed="zero gradients, which do step",
    source="torch.optim.AdamW skips parameters whose gradient is None",
)
def test_idle_parameter(stack, rng, device, check):
    used, idle = parameters_of(rng, device, torch.float32)[:2]
    groups, state = [{"params": [used, idle], "weight_decay": 0.1}], {}
    for update in range(4):
        used.grad = torch.randn(used.shape, generator=rng).to(device)
        idle.grad = torch.ones_like(idle) if update == 0 else None
        stack.optimizer_step(groups, state, 1e-2, BETAS, EPSILON)
        if update == 0:
            kept = idle.detach().clone(), copy.deepcopy(state[idle])
    because = "it took part in the first update only"
    check("largest change", max_abs_error(idle, kept[0]), equal=0.0, because=because)
    for name in ("first_moment", "second_moment"):
        error = max_abs_error(getattr(state[idle], name), getattr(kept[1], name))
        check(f"largest change of the {name}", error, equal=0.0, because=because)
    check("steps", [int(state[used].step), int(state[idle].step)], equal=[4, 1], because=because)


@gate(
    claim="the state passed in is all the optimizer knows: a copy of it continues bit for bit",
    roles=["optimizer_step"],
    not_claimed="how it is saved",
    source="KempnerInstitute/KempnerForge PR#115: moments lost on resume without an error",
)
def test_state_is_all(stack, rng, device, check):
    parameters = parameters_of(rng, device, torch.float32)
    groups, state = groups_of(parameters), {}
    gradients = [
        [torch.randn(p.shape, generator=rng).to(device) for p in parameters] for _ in range(6)
    ]

    def step(parameters, groups, state, update):
        for parameter, gradient in zip(parameters, gradients[update], strict=True):
            parameter.grad = gradient.clone()
        stack.optimizer_step(groups, state, 1e-2, BETAS, EPSILON)

    for update in range(3):
        step(parameters, groups, state, update)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    twin_state = {
        twin: copy.deepcopy(state[parameter])
        for twin, parameter in zip(twins, parameters, strict=True)
    }
    for update in range(3, 6):
        step(parameters, groups, state, update)
    for update in range(3, 6):
        step(twins, groups_of(twins), twin_state, update)
    for index, (parameter, twin) in enumerate(zip(parameters, twins, strict=True)):
        check(
            f"largest difference of parameter {index}",
            max_abs_error(twin, parameter),
            equal=0.0,
            because="the same numbers through the same operations",
        )
        check("steps", int(twin_state[twin].step), equal=6, because="three before, three after")


@gate(
    claim="the groups hold every parameter once: matrices with decay, vectors without",
    roles=["param_groups", "build_model"],
    not_claimed="other divisions, such as a table without decay",
    source="ServiceNow/Fast-LLM#542: norm gains and biases decayed after a refactor",
)
@pytest.mark.parametrize("kind", ["tied", "untied", "character"])
def test_groups(stack, kind, device, check):
    if kind == "character":
        config = CharGPTConfig(11, model_width=8, num_layers=1, num_heads=2, max_positions=8)
        model = stack.build_model(config, stack).to(device)
    else:
        model = toys.tiny_model(stack, device, tied_head=kind == "tied")
    groups = stack.param_groups(model, 0.1)
    decay = {}
    for group in groups:
        for parameter in group["params"]:
            decay.setdefault(id(parameter), []).append(group["weight_decay"])
    names = {id(p): name for name, p in model.named_parameters()}  # a shared parameter comes once
    check("parameters in the groups", len(decay), equal=len(names), because="every one, none else")
    check(
        "left out",
        sorted(name for key, name in names.items() if key not in decay),
        equal=[],
        because="a parameter in no group is never trained",
    )
    check(
        "in more than one place",
        sorted(names.get(key, "unknown") for key, found in decay.items() if len(found) > 1),
        equal=[],
        because="it would step twice; a tied table is one parameter",
    )
    for name, parameter in model.named_parameters():
        check(
            f"decay of {name}",
            decay[id(parameter)][0],
            equal=0.1 if parameter.dim() >= 2 else 0.0,
            because=f"{parameter.dim()} dimension(s)",
        )
