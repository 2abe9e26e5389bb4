"""The scale of a float16 loss: it lifts small gradients over float16's smallest numbers.

The rules are those of torch.amp.GradScaler, applied once a window: the loss of every microbatch is
multiplied by one scale, the gradients are divided by it once, before the clip, and the scale is
changed once, after the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class LossScaling:
    """How the scale begins and moves.

    initial: the first scale; backoff: its factor after an update that was not finite; growth: its
    factor after `interval` updates in a row that were. Raises ValueError out of range.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.initial <= LARGEST:
            raise ValueError(f"LossScaling.initial must be > 0 in float32, got {self.initial}")
        if not (self.growth >= 1 and 0 < self.backoff < 1):
            raise ValueError(
                "LossScaling.growth must be >= 1 and backoff between 0 and 1, got "
                f"{self.growth} and {self.backoff}"
            )
        if self.interval < 1:
            raise ValueError(f"LossScaling.interval must be >= 1 update, got {self.interval}")


@dataclass(frozen=True)
class LossScaleState:
    """The scale of the next window, finite updates in a row since it changed, updates skipped
    because something was not finite.
    """

    scale: float
    good_updates: int = 0
    skipped_updates: int = 0


def next_loss_scale(
    state: LossScaleState, scaling: LossScaling, was_finite: bool
) -> LossScaleState:
    """The state after one window with targets.

    not finite                    scale * backoff, the row starts anew, one more was skipped
    the interval-th in a row      scale * growth if float32 holds it, the row starts anew
    else                          one more in the row
    """
    if not was_finite:
        return LossScaleState(state.scale * scaling.backoff, 0, state.skipped_updates + 1)
    good_updates = state.good_updates + 1
    if good_updates < scaling.interval:
        return LossScaleState(state.scale, good_updates, state.skipped_updates)
    grown = state.scale * scaling.growth
    return LossScaleState(grown if grown <= LARGEST else state.scale, 0, state.skipped_updates)
