"""One update: the gradient of a window, one clip, one learning rate, one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from reference.optimizer import AdamState, Group, require_one_process
from reference.schedule import Schedule
from reference.window import Window


@dataclass(frozen=True)
class WindowStats:
    """Of one window: summed negative log-likelihood in nats, targets, positions read."""

    nll_sum: float
    num_targets: int
    num_tokens: int


@dataclass(frozen=True)
class Counters:
    """Four counts that are never mixed up.

    tokens_read: positions that went through the model, padding included; tokens_supervised:
    targets among them; tokens_updated: targets whose gradient was applied (what the schedule
    counts); optimizer_steps: updates applied.
    """

    tokens_read: int = 0
    tokens_supervised: int = 0
    tokens_updated: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class UpdateSettings:
    """What an update needs besides the model; betas and epsilon are AdamW's."""

    schedule: Schedule
    max_norm: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8


@dataclass
class TrainState:
    """Everything that an update changes."""

    model: nn.Module
    groups: list[Group]
    optimizer_state: dict[nn.Parameter, AdamState] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class UpdateRecord:
    """What one window did.

    loss_nats: nll_sum / num_targets (nan without targets); grad_norm: before clipping (nan when
    no gradient was made); learning_rate: of this update (0 when skipped); skipped: the reason, or
    None; counters: after this window.
    """

    loss_nats: float
    nll_sum: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: str | None
    counters: Counters


def accumulate(model: Any, window: Window, group: Any) -> WindowStats:
    """Leaves in every `.grad` the gradient of the window's token mean; returns its sums.

    With S_i the summed negative log-likelihood of microbatch i and N the targets of the WINDOW:
    grad = d/dp sum_i S_i / N. N is known before the first backward, so no microbatch is weighed by
    its own count. Gradients from before are replaced. They are summed in the parameters' dtype,
    which is float32 also when the model computes in bfloat16. Without targets no gradient is left.

    model: from build_model (it brings `stack.token_nll` and `lm_head.weight`).
    group: None, one process; another raises ValueError.
    """
    require_one_process(group, "accumulate")
    model.zero_grad(set_to_none=True)
    num_targets = window.num_targets
    nll_sum = 0.0
    if num_targets > 0:
        for microbatch in window.microbatches:
            hidden_BTD = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
            nll, _ = model.stack.token_nll(
                hidden_BTD.flatten(0, 1), model.lm_head.weight, microbatch.labels.flatten()
            )
            (nll / num_targets).backward()
            nll_sum += float(nll.detach())
    return WindowStats(nll_sum, num_targets, window.num_tokens)


def update_window(
    training: TrainState, window: Window, stack: Any, settings: UpdateSettings
) -> UpdateRecord:
    """Applies one window: accumulate, clip once, learning rate from the counters, optimizer step.

    A window without targets, and one whose gradient norm is not finite, is skipped: parameters,
    optimizer state and schedule stay, the reading is counted, and the record says why.
    """
    stats = stack.accumulate(training.model, window, None)
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
        parameters = _parameters(training.groups)
        grad_norm = float(stack.clip_grad_norm(parameters, settings.max_norm, None))
        if not math.isfinite(grad_norm):
            skipped = f"gradient norm is {grad_norm}"
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
    )


def _parameters(groups: list[Group]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]
