"""Memory of training adapters of low rank (LoRA) beside a frozen model.

An adapter of rank r beside a matrix [O, I] has r (I + O) parameters. The model's own P parameters
are read and never changed, so they have a weight and no gradient, master weight or moments; only
the A adapter parameters have all parts:

    bytes = w P + (w + g + master + m + v) A

Not counted: activations. They are as many as without adapters, and more: gradients still pass
through every layer. Source: Hu et al. 2021, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference.config import CharGPTConfig, ModelConfig
from reference.ledger.memory import BytesPerParameter, TrainingMemory, training_memory
from reference.ledger.parameters import parameter_count


@dataclass(frozen=True)
class AdapterMemory:
    """Bytes on the fullest rank: of the frozen model, which has weights only, and of adapters."""

    num_frozen: int  # parameters of the model
    num_adapter: int  # parameters of all adapters
    frozen: TrainingMemory
    adapters: TrainingMemory

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.frozen.total + self.adapters.total


def adapter_memory(
    config: ModelConfig,
    rank: int,
    targets: Sequence[str],
    layout: BytesPerParameter,
    zero_stage: int,
    num_ranks: int,
) -> AdapterMemory:
    """Model state of training adapters of this rank beside the matrices that `targets` names.

    layout: of the adapters; the frozen model is stored as `layout.weight` says. ZeRO divides both
    as in training_memory.

    Raises:
        ValueError: a rank below 1, a target that `config` has no matrix for or none at all, or
            what training_memory refuses.
    """
    if rank < 1:
        raise ValueError(f"the rank of an adapter must be at least 1, got {rank}")
    matrices = matrices_of_a_layer(config)
    unknown = sorted(set(targets) - matrices.keys())
    if unknown or not targets:
        raise ValueError(f"targets must be among {sorted(matrices)}, got {list(targets)}")
    num_frozen = parameter_count(config).total
    sides = sum(sum(matrices[name]) for name in set(targets))
    num_adapter = config.num_layers * rank * sides
    weights_only = BytesPerParameter(layout.weight, 0, 0, 0, 0)
    return AdapterMemory(
        num_frozen,
        num_adapter,
        training_memory(num_frozen, weights_only, zero_stage, num_ranks),
        training_memory(num_adapter, layout, zero_stage, num_ranks),
    )


def matrices_of_a_layer(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each matrix of a layer, by name: what can have an adapter."""
    width = config.model_width
    if isinstance(config, CharGPTConfig):
        square = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
        return {**square, "up_proj": (width, 4 * width), "down_proj": (4 * width, width)}
    query_width = config.num_query_heads * config.head_width
    kv_width = config.num_kv_heads * config.head_width
    return {
        "q_proj": (width, query_width),
        "k_proj": (width, kv_width),
        "v_proj": (width, kv_width),
        "o_proj": (query_width, width),
        "gate_proj": (width, config.feed_forward_width),
        "up_proj": (width, config.feed_forward_width),
        "down_proj": (config.feed_forward_width, width),
    }
