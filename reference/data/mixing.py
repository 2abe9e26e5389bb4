"""How the sources of a folder are mixed in the course of an epoch, as a table and as a drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from reference.data.batches import shuffle
from reference.data.manifest import Manifest, SourceRecord
from reference.data.order import Interleaving
from reference.data.screen_table import add_row, screen_table
from reference.data.visible import drawable
from reference.data.windows import SplitWindows

NUM_PHASES = 20


@dataclass(frozen=True)
class Mixing:
    """One epoch, which has as many rows as there are. phases: [phases, sources] shares of the
    supervised tokens; times: [sources] how often each source's own are trained on. A source without
    windows has 0.
    """

    phases: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]


def mixing(manifest: Manifest, windows: SplitWindows) -> Mixing:
    """Of the windows of the training split, in the order of the manifest's seed and weights."""
    chosen = [manifest.sources[source].weight for source in windows.sources]
    weights = [weight for weight in chosen if weight is not None]
    order = Interleaving(windows.targets, weights or None, manifest.seed, shuffle)
    rows = order.rows(0, order.rows_per_epoch).numpy()
    parts = np.array_split(rows, min(NUM_PHASES, len(rows)))
    consumed = np.zeros((len(parts), len(manifest.sources)))
    totals = np.ones(len(manifest.sources))
    for place, (source, targets) in enumerate(zip(windows.sources, windows.targets, strict=True)):
        totals[source] = int(targets.sum())
        for number, part in enumerate(parts):
            consumed[number, source] = targets.numpy()[part[part[:, 0] == place, 2]].sum()
    shares = consumed / np.maximum(consumed.sum(1, keepdims=True), 1)
    return Mixing(shares, consumed.sum(0) / totals)


def mixing_table(manifest: Manifest, windows: SplitWindows) -> Table:
    """A row a phase, and one of how often each source is gone through."""
    mixed = mixing(manifest, windows)
    names = [source.name for source in manifest.sources]
    table = screen_table("part of an epoch", *names, title="share of the supervised tokens")
    num_phases = len(mixed.phases)
    for number, row in enumerate(mixed.phases):
        add_row(
            table,
            f"{number / num_phases:.0%} to {(number + 1) / num_phases:.0%}",
            *(f"{share:.2%}" for share in row),
        )
    table.add_section()
    add_row(table, "times each is gone through", *(f"{times:.2f}" for times in mixed.times))
    return table


def draw_mixing(axes: Any, manifest: Manifest, windows: SplitWindows) -> None:
    """The shares of the sources, one above the other, phase by phase."""
    mixed = mixing(manifest, windows)
    part = 100 * np.arange(len(mixed.phases) + 1) / len(mixed.phases)
    steps = np.vstack([mixed.phases, mixed.phases[-1:]]).T
    labels = [
        drawable(f"{source.name}, weight {weight_text(source)}") for source in manifest.sources
    ]
    axes.stackplot(part, steps, labels=labels, step="post")
    axes.set(
        title="supervised tokens by source", xlabel="part of an epoch, %", ylim=(0, 1),
        xlim=(0, 100),
    )  # fmt: skip


def weight_text(source: SourceRecord) -> str:
    """The declared share of a source, in words."""
    return "its size" if source.weight is None else f"{source.weight:g}"
