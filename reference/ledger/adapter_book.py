"""The book of adapters: what training them alone holds, beside training everything."""

from __future__ import annotations

from rich.table import Table

from reference.config import ModelConfig
from reference.ledger.adapters import adapter_memory, matrices_of_a_layer
from reference.ledger.memory import MIB, MIXED, training_memory
from reference.ledger.tables import CONVENTION, new_table

ZERO_STAGES = (0, 1, 2, 3)


def adapters_table(config: ModelConfig, rank: int, num_ranks: int) -> Table:
    """Model state of training adapters beside every matrix of the layers, by ZeRO stage."""
    targets = list(matrices_of_a_layer(config))
    states = [
        adapter_memory(config, rank, targets, MIXED, stage, num_ranks) for stage in ZERO_STAGES
    ]
    all_trained = [
        training_memory(states[0].num_frozen, MIXED, stage, num_ranks) for stage in ZERO_STAGES
    ]
    stages = ["not divided", *(f"ZeRO {stage}" for stage in ZERO_STAGES[1:])]
    table = new_table(f"With LoRA of rank {rank} on each of {num_ranks} ranks, MiB", "part",
                      *stages)  # fmt: skip
    table.caption = (
        f"{states[0].num_adapter:,} adapter parameters beside {', '.join(targets)}; 16 B each, 2 B "
        f"a frozen one. Not counted: activations, as many as without adapters, and buffers."
    )
    rows = {
        "frozen weights": [state.frozen.total for state in states],
        "adapters, their gradients, m, v": [state.adapters.total for state in states],
        "total": [state.total for state in states],
        "total with everything trained": [state.total for state in all_trained],
    }
    for name, row in rows.items():
        table.add_row(name, *(f"{value / MIB:,.3f}" for value in row), CONVENTION)
    return table
