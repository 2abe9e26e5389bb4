"""Time: how long a number of FLOPs takes, what share of a peak was used, and tokens per second.

    time = FLOPs / (ranks x peak x utilization)

Peak and utilization are inputs, never results: a plan assumes them, a measurement replaces them.
MFU divides what the model needs by what the devices could have done; HFU divides what they did,
recomputation included. Both are at most 1. They are two functions, so that one is never printed
under the other's name. Source: PaLM (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reference.ledger.flops import TrainingFlops
from reference.loss import NO_TARGET
from reference.window import Microbatch

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class TrainingTime:
    """Wall time on all ranks together, and the rank-hours that it occupies."""

    time_s: float
    num_ranks: int

    @property
    def hours(self) -> float:
        """Wall time, hours."""
        return self.time_s / SECONDS_PER_HOUR

    @property
    def rank_hours(self) -> float:
        """Hours times ranks: card-hours where a rank is a card."""
        return self.hours * self.num_ranks


@dataclass(frozen=True)
class Utilization:
    """A share of the peak, with what was counted and under which convention."""

    fraction: float
    counted: str  # "model FLOPs" or "hardware FLOPs"
    convention: str


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one microbatch on one rank: positions >= real >= supervised."""

    positions: int  # rows times row length, padding included
    real: int  # without padding
    supervised: int  # labels that are a target


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of one optimizer update, in three units that must not be mixed."""

    positions_per_s: float
    real_per_s: float
    supervised_per_s: float


def training_time(
    flops: float, num_ranks: int, peak_flops_per_s: float, utilization: float
) -> TrainingTime:
    """Time for `flops` on `num_ranks` ranks of `peak_flops_per_s` each, used to `utilization`.

    Raises:
        ValueError: fewer than 1 rank, a number that is not positive and finite, or a utilization
            above 1.
    """
    _require_devices(num_ranks, peak_flops_per_s)
    if not (flops > 0 and math.isfinite(flops)):
        raise ValueError(f"training_time needs a positive number of FLOPs, got {flops}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is a share of the peak in (0, 1], got {utilization}")
    return TrainingTime(flops / (num_ranks * peak_flops_per_s * utilization), num_ranks)


def model_flops_utilization(
    flops: TrainingFlops, time_s: float, num_ranks: int, peak_flops_per_s: float
) -> Utilization:
    """MFU: `flops.model_total` / (time x ranks x peak). Recomputation does not raise it.

    Raises:
        ValueError: no time, rank or peak, or a result above 1: then the time, the peak or the
            convention is wrong.
    """
    fraction = _fraction(flops.model_total, time_s, num_ranks, peak_flops_per_s)
    return Utilization(fraction, "model FLOPs", flops.convention.text)


def hardware_flops_utilization(
    flops: TrainingFlops, time_s: float, num_ranks: int, peak_flops_per_s: float
) -> Utilization:
    """HFU: `flops.hardware_total` / (time x ranks x peak), recomputation included.

    Raises:
        ValueError: as `model_flops_utilization`.
    """
    fraction = _fraction(flops.hardware_total, time_s, num_ranks, peak_flops_per_s)
    return Utilization(fraction, "hardware FLOPs", flops.convention.text)


def token_counts(microbatch: Microbatch) -> TokenCounts:
    """The three counts of one microbatch: all positions, those of documents, those with a target.

    A negative document id is padding (as in `reference.data.labels`); without ids there is none.

    Raises:
        ValueError: a target on padding.
    """
    is_target_BT = microbatch.labels != NO_TARGET
    real, supervised = microbatch.num_tokens, int(is_target_BT.sum())
    if microbatch.documents is not None:
        is_real_BT = microbatch.documents >= 0
        if bool((is_target_BT & ~is_real_BT).any()):
            raise ValueError(f"padding carries a target; its label must be {NO_TARGET}")
        real = int(is_real_BT.sum())
    return TokenCounts(microbatch.num_tokens, real, supervised)


def throughput(microbatches: Sequence[TokenCounts], time_s: float) -> Throughput:
    """Tokens per second of one update: all its microbatches (on all ranks) over its whole time.

    Splitting the same window into more microbatches leaves it unchanged.

    Raises:
        ValueError: no microbatch, or a time that is not positive and finite.
    """
    if not microbatches:
        raise ValueError("throughput needs every microbatch of the update, got none")
    _require_time(time_s)
    return Throughput(
        positions_per_s=sum(counts.positions for counts in microbatches) / time_s,
        real_per_s=sum(counts.real for counts in microbatches) / time_s,
        supervised_per_s=sum(counts.supervised for counts in microbatches) / time_s,
    )


def _fraction(flops: int, time_s: float, num_ranks: int, peak_flops_per_s: float) -> float:
    _require_devices(num_ranks, peak_flops_per_s)
    _require_time(time_s)
    fraction = flops / (time_s * num_ranks * peak_flops_per_s)
    if fraction > 1:
        raise ValueError(
            f"{flops:.4g} FLOPs in {time_s:.4g} s on {num_ranks} ranks are {fraction:.3f} of the "
            f"peak {peak_flops_per_s:.4g} FLOP/s; more than 1 is impossible: check the time, the "
            "peak (dense, of this precision) and the counting convention"
        )
    return fraction


def _require_devices(num_ranks: int, peak_flops_per_s: float) -> None:
    if num_ranks < 1:
        raise ValueError(f"at least 1 rank computes, got {num_ranks}")
    if not (peak_flops_per_s > 0 and math.isfinite(peak_flops_per_s)):
        raise ValueError(f"the peak must be a positive number of FLOP/s, got {peak_flops_per_s}")


def _require_time(time_s: float) -> None:
    if not (time_s > 0 and math.isfinite(time_s)):
        raise ValueError(f"the time must be a positive number of seconds, got {time_s}")
