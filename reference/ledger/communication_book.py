"""The book of communication: what ranks say to each other in one update."""

from __future__ import annotations

import torch
from rich.table import Table

from reference.config import ModelConfig
from reference.ledger.communication import training_communication
from reference.ledger.memory import MIB
from reference.ledger.tables import CONVENTION, new_table

COLLECTIVES = {
    "all_reduce": "all-reduces",
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
}


def communication_table(config: ModelConfig, num_ranks: int, num_microbatches: int) -> Table:
    """Collectives of one window under DDP and FSDP2, and the MiB that a rank hands to them."""
    table = new_table(
        f"Collectives of one update of {num_ranks} ranks, {num_microbatches} microbatches",
        "layout",
        *(column for name in COLLECTIVES.values() for column in (name, "MiB")),
    )
    table.caption = (
        "Gradients in float32, FSDP2 gathers in bfloat16. Bytes that a rank hands in: of a gather "
        "its own shard. A ring sends about twice the bytes of an all-reduce. 1 MiB = 2^20 B."
    )
    for kind, dtype in (("ddp", torch.float32), ("fsdp2", torch.bfloat16)):
        found = training_communication(config, kind, (num_ranks,), num_microbatches, dtype)
        row = []
        for name in COLLECTIVES:
            row.append(f"{found.counts.get(name, 0):,}")
            row.append(f"{found.num_bytes.get(name, 0) / MIB:,.3f}")
        table.add_row(kind.upper(), *row, CONVENTION)
    return table
