"""One update: the gradient of a window, one clip, one learning rate, one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from reference.group import require_group, sum_counts, sum_floats, sum_gradients
from reference.loss_scale import LossScaleState, LossScaling, next_loss_scale
from reference.optimizer import AdamState, Group
from reference.schedule import Schedule
from reference.window import Window


@dataclass(frozen=True)
class WindowStats:
    """Of one window, over all ranks: summed negative log-likelihood in nats, targets, positions
    read.
    """

    nll_sum: float
    num_targets: int
    num_tokens: int


@dataclass(frozen=True)
class Counters:
    """Four counts that are never mixed up.

    tokens_read: positions of the windows' rows, padding included, each once however many ranks went
    through its row; tokens_supervised: targets among them; tokens_updated: targets whose gradient
    was applied (what the schedule counts); optimizer_steps: updates applied.
    """

    tokens_read: int = 0
    tokens_supervised: int = 0
    tokens_updated: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class UpdateSettings:
    """What an update needs besides the model; betas and epsilon are AdamW's.

    norm_type: 2 or inf, of the clip. on_non_finite: what a loss or a gradient norm that is not
    finite does, "skip" (the window) or "stop" (NonFiniteError). loss_scaling: for compute in
    float16. Raises ValueError for another `on_non_finite`.
    """

    schedule: Schedule
    max_norm: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    norm_type: float = 2.0
    on_non_finite: str = "skip"
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if self.on_non_finite not in ("skip", "stop"):
            raise ValueError(
                f'UpdateSettings.on_non_finite must be "skip" or "stop", got {self.on_non_finite!r}'
            )


@dataclass
class TrainState:
    """Everything that an update changes, and the group of ranks that make it together.

    group: None for one process. loss_scale: None until a window is computed with loss scaling.
    """

    model: nn.Module
    groups: list[Group]
    optimizer_state: dict[nn.Parameter, AdamState] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    group: Any = None
    loss_scale: LossScaleState | None = None


class NonFiniteError(ArithmeticError):
    """A loss or a gradient norm is not finite, and UpdateSettings.on_non_finite is "stop"."""


@dataclass(frozen=True)
class UpdateRecord:
    """What one window did, over all ranks and equal on all of them.

    loss_nats: nll_sum / num_targets (nan without targets); grad_norm: before clipping (nan when
    no gradient was made); learning_rate: of this update (0 when skipped); skipped: the reason, or
    None; counters: after this window; loss_scale: the factor of its losses, 1 without scaling.
    """

    loss_nats: float
    nll_sum: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: str | None
    counters: Counters
    loss_scale: float = 1.0


def accumulate(model: Any, window: Window, group: Any, loss_scale: float = 1.0) -> WindowStats:
    """Leaves in every `.grad` the gradient of the window's token mean; returns its sums.

    With S_i the summed negative log-likelihood of microbatch i, over the microbatches of all
    ranks, and N the targets of all of them:
        grad = d/dp sum_i S_i / N
    N is known before the first backward, so no microbatch and no rank is weighed by its own count.
    Gradients from before are replaced. They are summed in the parameters' dtype, which is float32
    also when the model computes in bfloat16. Without targets anywhere no gradient is left.

    model: from build_model (it brings `stack.token_nll` and `lm_head.weight`).
    window: the share of this rank.
    group: None, or the ProcessGroup of all ranks that share the window; each of them ends with the
    same gradients and sums. A rank without targets takes part in every collective.
    loss_scale: the losses are multiplied by it before their backward and the whole gradient is
    divided by it once, at the end.
    Raises ValueError for another group and unless loss_scale > 0.
    """
    require_group(group, "accumulate")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be > 0, got {loss_scale}")
    model.zero_grad(set_to_none=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = next(model.parameters()).device
    counts = (window.num_targets, window.num_tokens)
    num_targets, num_tokens = sum_counts(counts, group, device)
    if num_targets == 0:
        return WindowStats(0.0, 0, num_tokens)
    nll_sums = []
    for microbatch in window.microbatches:
        nll = _summed_loss(model, microbatch)
        (nll / num_targets * loss_scale).backward()  # type: ignore[no-untyped-call]
        nll_sums.append(nll.detach().clone())  # an operator may use its output's memory again
    nll_sum = sum(map(float, nll_sums))  # no wait for the device between microbatches
    sum_gradients(parameters, group)
    if loss_scale != 1.0:
        _divide_gradients(parameters, loss_scale)
    return WindowStats(sum_floats(nll_sum, group, device), num_targets, num_tokens)


@torch.no_grad()
def _divide_gradients(parameters: list[Tensor], divisor: float) -> None:
    torch._foreach_div_([p.grad for p in parameters if p.grad is not None], divisor)


def _summed_loss(model: Any, microbatch: Any) -> Tensor:
    """nll_sum in nats. The hidden states have no name outside: a loss may not need them again."""
    hidden_BTD = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    nll_sum: Tensor = model.stack.token_nll(
        hidden_BTD.flatten(0, 1), model.lm_head.weight, microbatch.labels.flatten()
    )[0]
    return nll_sum


def update_window(
    training: TrainState, window: Window, stack: Any, settings: UpdateSettings
) -> UpdateRecord:
    """Applies one window: accumulate, clip once, learning rate from the counters, optimizer step.

    window: this rank's share; every rank of `training.group` calls with its own, and what is
    decided depends on nothing but sums over all of them. A window without targets, and one whose
    loss or gradient norm is not finite, is skipped: parameters, optimizer state and schedule stay,
    the reading is counted, and the record says why. With loss scaling, the scale is that of the
    whole window and moves once, after it, by next_loss_scale.

    Raises NonFiniteError, on every rank and with nothing changed, if on_non_finite is "stop"; not
    where a smaller loss scale may help: the loss is finite and the scale is above 1.
    """
    scale = _loss_scale(training, settings)
    loss_scale = scale.scale if scale else 1.0
    stats = stack.accumulate(training.model, window, training.group, loss_scale)
    before = training.counters
    counters = replace(
        before,
        tokens_read=before.tokens_read + stats.num_tokens,
        tokens_supervised=before.tokens_supervised + stats.num_targets,
    )
    grad_norm, rate, skipped = float("nan"), 0.0, None
    if stats.num_targets == 0:
        skipped = "no targets in the window"
    else:
        grad_norm = float(
            stack.clip_grad_norm(
                _parameters(training.groups), settings.max_norm, training.group, settings.norm_type
            )
        )
        skipped = _not_finite(stats.nll_sum, grad_norm)
        may_help = loss_scale > 1 and math.isfinite(stats.nll_sum)
        if skipped and settings.on_non_finite == "stop" and not may_help:
            raise NonFiniteError(f"{skipped} after {before.optimizer_steps} updates")
        if scale and settings.loss_scaling:
            training.loss_scale = next_loss_scale(scale, settings.loss_scaling, skipped is None)
    if skipped is None:
        counters = replace(
            counters,
            tokens_updated=before.tokens_updated + stats.num_targets,
            optimizer_steps=before.optimizer_steps + 1,
        )
        rate = stack.learning_rate(counters.tokens_updated, settings.schedule)
        stack.optimizer_step(
            training.groups, training.optimizer_state, rate, settings.betas, settings.epsilon
        )
    training.counters = counters
    return UpdateRecord(
        loss_nats=stats.nll_sum / stats.num_targets if stats.num_targets else float("nan"),
        nll_sum=stats.nll_sum,
        num_targets=stats.num_targets,
        num_tokens=stats.num_tokens,
        grad_norm=grad_norm,
        learning_rate=rate,
        skipped=skipped,
        counters=counters,
        loss_scale=loss_scale,
    )


def _parameters(groups: list[Group]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _loss_scale(training: TrainState, settings: UpdateSettings) -> LossScaleState | None:
    if settings.loss_scaling is None:
        return None
    return training.loss_scale or LossScaleState(settings.loss_scaling.initial)


def _not_finite(nll_sum: float, grad_norm: float) -> str | None:
    """What is not finite, in words, or None."""
    if not math.isfinite(grad_norm):
        return f"gradient norm is {grad_norm}"
    return None if math.isfinite(nll_sum) else f"summed loss is {nll_sum}"
