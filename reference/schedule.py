"""Learning rate as a pure function of the supervised tokens that have been trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warmup, stable, decay; every length in supervised tokens.

    peak: learning rate of the stable part; total_tokens: where the decay ends; warmup_tokens and
    decay_tokens: lengths of the two ramps; final_fraction: the last learning rate over the peak.
    Raises ValueError, naming the field, when a value is out of range.
    """

    peak: float
    total_tokens: int
    warmup_tokens: int = 0
    decay_tokens: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ValueError(f"Schedule.peak must be finite and >= 0, got {self.peak}")
        if self.total_tokens < 1:
            raise ValueError(f"Schedule.total_tokens must be >= 1, got {self.total_tokens}")
        if self.warmup_tokens < 0 or self.decay_tokens < 0:
            raise ValueError(
                "Schedule.warmup_tokens and decay_tokens must be >= 0, got "
                f"{self.warmup_tokens} and {self.decay_tokens}"
            )
        if self.warmup_tokens + self.decay_tokens > self.total_tokens:
            raise ValueError(
                f"Schedule.warmup_tokens + decay_tokens = {self.warmup_tokens + self.decay_tokens} "
                f"exceed total_tokens = {self.total_tokens}"
            )
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"Schedule.final_fraction must be 0 to 1, got {self.final_fraction}")


def learning_rate(tokens_done: int, schedule: Schedule) -> float:
    """The learning rate of the update that brings the supervised tokens to `tokens_done`.

    With t = min(tokens_done, total):
        t <= warmup               peak * t / warmup
        t <= total - decay        peak
        else                      peak * (1 - (1 - final_fraction) * (t - (total - decay)) / decay)

    `tokens_done` counts the window being applied too, so the first update is not at 0 and a
    warmup of 4 windows gives 1/4, 2/4, 3/4, 1 of the peak. It has no state: the same tokens give
    the same rate whatever the windows, microbatches or ranks, also after a resume. Source:
    warmup-stable-decay, Hu et al. 2024 (MiniCPM), section 4, with a linear decay.

    Raises ValueError for tokens_done < 0.
    """
    if tokens_done < 0:
        raise ValueError(f"tokens_done must be >= 0, got {tokens_done}")
    tokens = min(tokens_done, schedule.total_tokens)
    if tokens < schedule.warmup_tokens:
        return schedule.peak * tokens / schedule.warmup_tokens
    tokens_decayed = tokens - (schedule.total_tokens - schedule.decay_tokens)
    if tokens_decayed <= 0:
        return float(schedule.peak)
    progress = tokens_decayed / schedule.decay_tokens
    return schedule.peak * (1 - (1 - schedule.final_fraction) * progress)
