"""AdamW from its formula, its parameter groups, and the clip of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]  # {"params": list[nn.Parameter], "weight_decay": float}


@dataclass
class AdamState:
    """Of one parameter: updates applied to it, running means of its gradient and of its square."""

    step: int
    first_moment: Tensor
    second_moment: Tensor


def param_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Two groups that hold every trained parameter once: matrices decay, vectors do not.

    The first group (2 dimensions and more: projections and tables) has `weight_decay`, the second
    (norm gains and biases) has 0. A tied parameter is one parameter. A frozen one (requires_grad
    False) is in neither. Raises ValueError for a negative weight decay.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
    parameters = [p for p in model.parameters() if p.requires_grad]  # a shared one comes once
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, group: Any) -> Tensor:
    """Scales all gradients by min(1, max_norm / norm) and returns the norm before that.

    norm = sqrt(sum over all gradients of g^2), a scalar in float32 (float64 for float64
    gradients). Parameters without a gradient do not count. A norm that is not finite is returned
    and the gradients are left as they are: the caller decides. max_norm = inf never clips.

    group: None, one process. Raises ValueError for another group and for max_norm <= 0.
    Source: Pascanu et al. 2013, algorithm 1; torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm.
    """
    require_one_process(group, "clip_grad_norm")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be > 0, got {max_norm}")
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, 2, dtype=wide)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    # min(1, nan) is nan: the factor must be 1 for a norm that is not finite.
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


@torch.no_grad()
def optimizer_step(
    groups: Sequence[Group],
    state: dict[nn.Parameter, AdamState],
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """One AdamW update in place of every parameter that has a gradient.

    With t the number of updates of this parameter, this one included:
        p <- p (1 - learning_rate * weight_decay)
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        p <- p - learning_rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

    A parameter whose gradient is None is left alone: no decay, no step. `state` is filled on first
    use; moments have the parameter's dtype. Source: Loshchilov and Hutter 2019, algorithm 2, with
    the decay scaled by the learning rate as in torch.optim.AdamW.

    Raises ValueError for a parameter narrower than float32 (an update below half a unit of its
    last place would be lost: keep float32 parameters and cast them at use) and for values out of
    range.
    """
    if not learning_rate >= 0:
        raise ValueError(f"learning_rate must be >= 0, got {learning_rate}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    for group in groups:
        parameters: list[nn.Parameter] = [p for p in group["params"] if p.grad is not None]
        if parameters:
            states = [_state_of(p, state) for p in parameters]
            _update([*parameters], states, learning_rate, group["weight_decay"], betas, epsilon)


def _state_of(parameter: nn.Parameter, state: dict[nn.Parameter, AdamState]) -> AdamState:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"optimizer_step updates float32 or float64 parameters, got {parameter.dtype}; keep "
            "float32 parameters and set compute_dtype"
        )
    if parameter not in state:
        state[parameter] = AdamState(
            0, torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
        )
    return state[parameter]


def _update(
    parameters: list[Tensor],
    states: list[AdamState],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    beta1, beta2 = betas
    for adam in states:
        adam.step += 1
    gradients = [p.grad for p in parameters if p.grad is not None]
    first = [adam.first_moment for adam in states]
    second = [adam.second_moment for adam in states]

    torch._foreach_mul_(parameters, 1 - learning_rate * weight_decay)
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)

    # Each parameter has its own count: one that got no gradient for a while is not corrected away.
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**adam.step) for adam in states])
    torch._foreach_add_(denominators, epsilon)
    step_sizes = [-learning_rate / (1 - beta1**adam.step) for adam in states]
    torch._foreach_addcdiv_(parameters, first, denominators, step_sizes)


def require_one_process(group: Any, what: str) -> None:
    """Raises ValueError unless group is None: the reference runs in one process."""
    if group is not None:
        raise ValueError(f"{what} runs in one process: group must be None, got {group!r}")
