"""AdamW from its formula, its parameter groups, and the clip of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from reference.group import require_group

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
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, group: Any, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients by min(1, max_norm / norm) and returns the norm before that.

    norm = sqrt(sum over all gradients of g^2), or max |g| for norm_type inf, a scalar in float32
    (float64 for float64 gradients), the same on every rank. Parameters without a gradient do not
    count. A norm that is not finite is returned and the gradients are left as they are: the caller
    decides. max_norm = inf never clips.

    group: None, or the ranks that the gradients are spread over. A plain tensor is a replica, equal
    on all ranks. Of a DTensor, on whatever mesh, the whole counts once: its shards are gathered.
    Raises ValueError for another group, max_norm <= 0 and another norm_type.
    Source: Pascanu et al. 2013, algorithm 1; torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm.
    """
    require_group(group, "clip_grad_norm")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be > 0, got {max_norm}")
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, got {norm_type}")
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    wide = reduce(torch.promote_types, (g.dtype for g in gradients), torch.float32)
    norms = _norms(gradients, norm_type, wide)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    # min(1, nan) is nan: the factor must be 1 for a norm that is not finite.
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    torch._foreach_mul_([_local(g) for g in gradients], factor)
    return norm


def _norms(gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of every gradient; of a DTensor, of the whole, which all its ranks gather."""
    plain = [gradient for gradient in gradients if not _is_dtensor(gradient)]
    norms = list(torch._foreach_norm(plain, norm_type, dtype=dtype)) if plain else []
    for gradient in gradients:
        if _is_dtensor(gradient):
            whole: Tensor = gradient.full_tensor()  # type: ignore[attr-defined]
            norms.append(torch.linalg.vector_norm(whole, norm_type, dtype=dtype))
    return norms


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    part: Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # to import its class takes a second


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
    use; moments have the parameter's dtype and, of a DTensor, its placement: each rank updates its
    own part, element by element. Source: Loshchilov and Hutter 2019, algorithm 2, with
    the decay scaled by the learning rate as in torch.optim.AdamW.

    Raises ValueError for a parameter narrower than float32 (an update below half a unit of its
    last place would be lost: keep float32 parameters and cast them at use), for a gradient placed
    on the ranks in another way than its parameter, and for values out of range.
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
    if getattr(parameter, "placements", None) != getattr(parameter.grad, "placements", None):
        raise ValueError(
            "a gradient must be placed like its parameter, got "
            f"{getattr(parameter.grad, 'placements', None)} for a parameter placed as "
            f"{getattr(parameter, 'placements', None)}"
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
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    parameters = [_local(p) for p in parameters]
    first = [_local(adam.first_moment) for adam in states]
    second = [_local(adam.second_moment) for adam in states]

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
