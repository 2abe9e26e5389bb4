"""Wrong and right optimizers and parameter groups."""

from __future__ import annotations

import math

import torch

from harness import benign, fault
from reference.optimizer import AdamState

GATE, PRECISION = "m2_optimizer::", "m2_precision::"
TORCH, GROUPS = f"{GATE}test_against_torch", f"{GATE}test_groups"


def adamw(
    *,
    sign=1.0,
    l2=False,
    decay=lambda rate, weight_decay: rate * weight_decay,
    decay_last=False,
    correct=True,
    steps_at_once=1,
    denominator=lambda root, correction, epsilon: root / correction + epsilon,
    moment_dtype=None,
):
    """AdamW in a plain loop; every argument is one way to get it wrong."""

    @torch.no_grad()
    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        for group in groups:
            kept = 1 - (0.0 if l2 else decay(learning_rate, group["weight_decay"]))
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in state:
                    zeros = torch.zeros_like(p, dtype=moment_dtype or p.dtype)
                    state[p] = AdamState(0, zeros, zeros.clone())
                adam = state[p]
                adam.step += steps_at_once
                gradient = sign * p.grad + (group["weight_decay"] * p if l2 else 0.0)
                first = betas[0] * adam.first_moment + (1 - betas[0]) * gradient
                second = betas[1] * adam.second_moment + (1 - betas[1]) * gradient**2
                adam.first_moment = first.to(adam.first_moment.dtype)
                adam.second_moment = second.to(adam.second_moment.dtype)
                first_correction = 1 - betas[0] ** adam.step if correct else 1.0
                second_correction = 1 - betas[1] ** adam.step if correct else 1.0
                below = denominator(second.sqrt(), math.sqrt(second_correction), epsilon)
                step = learning_rate * first / first_correction / below
                p.copy_((p - step) * kept if decay_last else p * kept - step)

    return optimizer_step


# --- AdamW -----------------------------------------------------------------------------------


@fault(role="optimizer_step", caught_by=TORCH, seen_in="deepspeedai/DeepSpeed PR#8471")
def one_step_count_for_all(reference):
    """Corrects the bias of every parameter with the largest step count of all."""

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        latest = max((adam.step for adam in state.values()), default=0)
        for adam in state.values():
            adam.step = latest
        reference.optimizer_step(groups, state, learning_rate, betas, epsilon)

    return optimizer_step


@fault(
    role="optimizer_step",
    caught_by=[TORCH, f"{GATE}test_hand_example"],
    seen_in="deepspeedai/DeepSpeed PR#5775",
)
def steps_twice(reference):
    """Counts two steps an update in the bias correction."""
    return adamw(steps_at_once=2)


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_hand_example"], seen_in="own")
def no_bias_correction(reference):
    """Uses the moments as they are."""
    return adamw(correct=False)


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_decay"], seen_in="own")
def decay_in_the_gradient(reference):
    """Adds the weight decay to the gradient (L2), where Adam rescales it."""
    return adamw(l2=True)


@fault(
    role="optimizer_step",
    caught_by=[TORCH, f"{GATE}test_decay", f"{GATE}test_rate_zero"],
    seen_in="own",
)
def decay_without_the_rate(reference):
    """Multiplies weights by 1 - weight_decay, not by 1 - rate * weight_decay."""
    return adamw(decay=lambda rate, weight_decay: weight_decay)


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_hand_example"], seen_in="own")
def decays_the_new_weight(reference):
    """Decays after the step, so the step itself decays."""
    return adamw(decay_last=True)


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_hand_example"], seen_in="own")
def epsilon_inside_the_root(reference):
    """Adds epsilon to the second moment instead of to its root."""
    return adamw(
        denominator=lambda root, correction, epsilon: ((root / correction) ** 2 + epsilon).sqrt()
    )


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_hand_example"], seen_in="own")
def epsilon_before_the_correction(reference):
    """Adds epsilon before the second moment is corrected."""
    return adamw(denominator=lambda root, correction, epsilon: (root + epsilon) / correction)


@fault(role="optimizer_step", caught_by=[TORCH, f"{GATE}test_hand_example"], seen_in="own")
def swaps_the_betas(reference):
    """Uses the second beta for the mean and the first for the squares."""

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        reference.optimizer_step(groups, state, learning_rate, betas[::-1], epsilon)

    return optimizer_step


@fault(
    role="optimizer_step",
    caught_by=[
        TORCH,
        f"{GATE}test_hand_example",
        "m1_one_step::test_one_update",
        "m2_overfit::test_one_window",
        "m2_descent::test_descent",
    ],
    seen_in="own",
)
def climbs(reference):
    """Steps along the gradient instead of against it."""
    return adamw(sign=-1.0)


@fault(
    role="optimizer_step",
    caught_by=[TORCH, f"{GATE}test_idle_parameter"],
    seen_in="deepspeedai/DeepSpeed PR#8471",
)
def none_is_zero(reference):
    """Takes a missing gradient for zero: old moments and decay move the parameter."""

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        idle = [p for group in groups for p in group["params"] if p.grad is None]
        for parameter in idle:
            parameter.grad = torch.zeros_like(parameter)
        reference.optimizer_step(groups, state, learning_rate, betas, epsilon)
        for parameter in idle:
            parameter.grad = None

    return optimizer_step


@fault(
    role="optimizer_step",
    caught_by=f"{GATE}test_state_is_all",
    seen_in="KempnerInstitute/KempnerForge PR#115",
)
def counts_outside_the_state(reference):
    """Keeps the step counts in the optimizer, so a restored state starts from one."""
    counts = {}

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        for parameter, adam in state.items():
            adam.step = counts.get(parameter, 0)
        reference.optimizer_step(groups, state, learning_rate, betas, epsilon)
        counts.update({parameter: adam.step for parameter, adam in state.items()})

    return optimizer_step


# --- groups ----------------------------------------------------------------------------------


def groups_by(decays, remove_duplicate=True):
    """param_groups that decay where decays(name, parameter), and leave out where it is None."""

    def param_groups(model, weight_decay):
        named = list(model.named_parameters(remove_duplicate=remove_duplicate))
        return [
            {"params": [p for n, p in named if decays(n, p) is True], "weight_decay": weight_decay},
            {"params": [p for n, p in named if decays(n, p) is False], "weight_decay": 0.0},
        ]

    return param_groups


@fault(
    role="param_groups",
    caught_by=[GROUPS, f"{GATE}test_decay"],
    seen_in="ServiceNow/Fast-LLM#542",
)
def decays_everything(reference):
    """Puts norm gains and biases into the group that decays."""
    return groups_by(lambda name, parameter: True)


@fault(role="param_groups", caught_by=GROUPS, seen_in="ServiceNow/Fast-LLM PR#545")
def spares_norms_only(reference):
    """Spares parameters with "norm" in their name; biases decay."""
    return groups_by(lambda name, parameter: "norm" not in name)


@fault(role="param_groups", caught_by=[GROUPS, f"{GATE}test_decay"], seen_in="own")
def decays_vectors(reference):
    """Has the two groups the wrong way round."""
    return groups_by(lambda name, parameter: parameter.dim() < 2)


@fault(role="param_groups", caught_by=f"{GROUPS}[untied]", seen_in="own")
def forgets_the_head(reference):
    """Leaves out the head, as if it were always tied: an untied one is never trained."""
    return groups_by(
        lambda name, parameter: None if name == "lm_head.weight" else parameter.dim() >= 2
    )


@fault(role="param_groups", caught_by=f"{GROUPS}[tied]", seen_in="own")
def steps_a_tied_table_twice(reference):
    """Lists a shared table under both of its names."""
    return groups_by(lambda name, parameter: parameter.dim() >= 2, remove_duplicate=False)


@fault(role="param_groups", caught_by=GROUPS, seen_in="own")
def forgets_vectors(reference):
    """Has one group, of matrices: norm gains and biases are never trained."""
    return groups_by(lambda name, parameter: True if parameter.dim() >= 2 else None)


# --- right, in another way -------------------------------------------------------------------

STEPS = [
    *(f"{GATE}test_{name}" for name in (
        "against_torch", "hand_example", "decay", "rate_zero", "idle_parameter", "state_is_all",
    )),
    f"{PRECISION}test_master_weight",
    f"{PRECISION}test_weights_move",
    f"{PRECISION}test_dtypes",
    "m2_clip::test_once_after_accumulation",
    "m2_clip::test_displacement",
    "m2_schedule::test_rate_is_applied",
    "m2_overfit::test_one_window",
]  # fmt: skip


@benign(role="optimizer_step", accepted_by=STEPS, because="foreach and a loop do the same sums")
def loop_adamw(reference):
    """The formula in a loop over parameters."""
    return adamw()


@benign(role="optimizer_step", accepted_by=STEPS, because="it is the oracle of the contract")
def torch_adamw(reference):
    """torch.optim.AdamW, its state copied in and out."""

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        optimizer = torch.optim.AdamW(
            [dict(group) for group in groups if group["params"]], learning_rate, betas, epsilon
        )
        for parameter, adam in state.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(adam.step)),
                "exp_avg": adam.first_moment,
                "exp_avg_sq": adam.second_moment,
            }
        optimizer.step()
        for parameter, found in optimizer.state.items():
            state[parameter] = AdamState(int(found["step"]), found["exp_avg"], found["exp_avg_sq"])

    return optimizer_step


@benign(
    role="param_groups",
    accepted_by=[GROUPS, f"{GATE}test_decay", "m2_clip::test_tied_norm"],
    because="how many groups there are is nobody's business",
)
def a_group_a_parameter(reference):
    """One group for every parameter, vectors first."""

    def param_groups(model, weight_decay):
        parameters = sorted(model.parameters(), key=lambda parameter: parameter.dim())
        return [
            {"params": [p], "weight_decay": weight_decay if p.dim() >= 2 else 0.0}
            for p in parameters
        ]

    return param_groups
