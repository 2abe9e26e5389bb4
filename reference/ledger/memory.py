"""Memory: bytes of the model state on one rank, by part, under ZeRO; and of a key/value cache.

Mixed precision with AdamW stores, for each parameter, 2 B of weight and 2 B of gradient in
bfloat16 and 4 B each of float32 master weight and the two moments: 16 B. With P parameters on
R ranks, a stage divides among the ranks (ZeRO, Rajbhandari et al. 2020, section 5):

    stage 0  nothing                              16 P
    stage 1  the optimizer state, master included  4 P + 12 P / R
    stage 2  and the gradients                     2 P + 14 P / R
    stage 3  and the weights                      16 P / R

Not counted: activations, communication and kernel buffers, the device's context, fragmentation,
and the gathered weights of the layer that stage 3 is just using. 1 GB = 10^9 B, 1 GiB = 2^30 B.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.config import CharGPTConfig, ModelConfig

GB = 10**9
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class BytesPerParameter:
    """How wide each part of the model state is stored, bytes a parameter."""

    weight: int
    gradient: int
    master: int
    first_moment: int
    second_moment: int

    @property
    def total(self) -> int:
        """Bytes a parameter over all parts."""
        moments = self.first_moment + self.second_moment
        return self.weight + self.gradient + self.master + moments


MIXED = BytesPerParameter(2, 2, 4, 4, 4)  # bfloat16 weights and gradients, 16 B
MIXED_FLOAT32_GRADIENTS = BytesPerParameter(2, 4, 4, 4, 4)  # 18 B
FLOAT32 = BytesPerParameter(4, 4, 0, 4, 4)  # the weight is its own master, 16 B


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of model state on the rank that holds most: shares are rounded up."""

    weights: int
    gradients: int
    master: int
    first_moments: int
    second_moments: int

    @property
    def optimizer(self) -> int:
        """Master weights and both moments: what stage 1 divides."""
        return self.master + self.first_moments + self.second_moments

    @property
    def total(self) -> int:
        """Bytes over all parts."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total_gb(self) -> float:
        """`total` in units of 10^9 bytes."""
        return self.total / GB

    @property
    def total_gib(self) -> float:
        """`total` in units of 2^30 bytes."""
        return self.total / GIB


def training_memory(
    num_parameters: int, layout: BytesPerParameter, zero_stage: int, num_ranks: int
) -> TrainingMemory:
    """Model state on the fullest of `num_ranks` ranks at ZeRO stage 0, 1, 2 or 3.

    A divided part holds ceil(P / num_ranks) parameters, an even cut of the flat parameters. Not
    counted: activations, buffers, context, fragmentation.

    Raises:
        ValueError: num_parameters or num_ranks below 1, or a stage other than 0 to 3.
    """
    if num_parameters < 1 or num_ranks < 1:
        raise ValueError(
            f"training_memory needs at least one parameter and one rank, got {num_parameters} "
            f"parameters on {num_ranks} ranks"
        )
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0 (off), 1, 2 and 3, got {zero_stage}")
    share = -(-num_parameters // num_ranks)
    kept_weights = share if zero_stage >= 3 else num_parameters
    kept_gradients = share if zero_stage >= 2 else num_parameters
    kept_optimizer = share if zero_stage >= 1 else num_parameters
    return TrainingMemory(
        weights=kept_weights * layout.weight,
        gradients=kept_gradients * layout.gradient,
        master=kept_optimizer * layout.master,
        first_moments=kept_optimizer * layout.first_moment,
        second_moments=kept_optimizer * layout.second_moment,
    )


def kv_cache_bytes(
    config: ModelConfig, num_rows: int, context_tokens: int, bytes_per_element: int
) -> int:
    """Bytes of cached keys and values: 2 L T K H a row, times the bytes of an element.

    K counts key/value heads: grouped queries share them, so the cache is N / K times smaller than
    with as many key/value as query heads.

    Raises:
        ValueError: a number below 1, or more tokens than the configuration has positions.
    """
    numbers = {"rows": num_rows, "tokens": context_tokens, "bytes": bytes_per_element}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"kv_cache_bytes needs at least 1 for {name}, got {number}")
    if context_tokens > config.max_positions:
        raise ValueError(
            f"a cache of {context_tokens} tokens needs as many positions; the configuration has "
            f"max_positions {config.max_positions}"
        )
    if isinstance(config, CharGPTConfig):
        kv_width = config.model_width
    else:
        kv_width = config.num_kv_heads * config.head_width
    return 2 * config.num_layers * num_rows * context_tokens * kv_width * bytes_per_element
