"""In which order windows are read: a pure function of seed and place, so a run's place in its data
is one integer and the number of workers cannot matter.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Shuffle = Callable[[int, int, int], Tensor]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BLOCK_ROWS = 2**14  # about so many rows, or those of an epoch, are put into order together
EPOCHS_KEPT = 3  # of each source


def buffered_shuffle(num_rows: int, seed: int, epoch: int, buffer_rows: int) -> Tensor:
    """[num_rows] int64: the rows as they leave a buffer that holds buffer_rows of them.

    The rows are read in order. Each one that does not fit takes the place of one drawn evenly from
    the buffer, which leaves; at the end the rest leaves in a random order. So row r leaves at place
    r - buffer_rows + 1 at the earliest, and a disk is read from one end to the other. The generator
    is seeded from seed and epoch as in `shuffle`.

    Raises ValueError for a negative number of rows or epoch and for buffer_rows < 1.
    """
    if num_rows < 0 or epoch < 0 or buffer_rows < 1:
        raise ValueError(
            f"num_rows {num_rows} and epoch {epoch} must not be negative, buffer_rows "
            f"{buffer_rows} must be at least 1"
        )
    digest = hashlib.sha256(f"buffer {buffer_rows} seed {seed} epoch {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    held = min(buffer_rows, num_rows)
    buffer = list(range(held))
    places = torch.randint(max(held, 1), (num_rows - held,), generator=generator).tolist()
    order = []
    for row, place in enumerate(places, held):
        order.append(buffer[place])
        buffer[place] = row
    rest = torch.randperm(held, generator=generator).tolist()
    return torch.tensor(order + [buffer[place] for place in rest], dtype=torch.int64)


class Interleaving:
    """The rows of several sources as one endless sequence; every source goes through its rows epoch
    after epoch, each epoch in another order.

    Next comes a row of the source with the smallest (targets consumed of it) / weight; among equals
    the first, where 64-bit rounding leaves them equal. So after any number of rows, what was
    consumed of source s differs from its share w_s / sum(w) of all targets consumed by at most S
    targets of the longest row, for S sources.
    A row without targets teaches nothing and is left out.

    targets: for each source [rows] int64, the supervised tokens of each row. weights: for each
    source, above 0; None: its targets, so that all sources end an epoch together and every row
    comes once before any comes twice. shuffle: (rows, seed, epoch) -> order; every source gets a
    seed of its own.

    Raises ValueError for no source, one without targets, and weights that are not one positive,
    finite number a source.
    """

    def __init__(
        self,
        targets: Sequence[Tensor],
        weights: Sequence[float] | None,
        seed: int,
        shuffle: Shuffle,
    ) -> None:
        self._used = [counts.nonzero()[:, 0].numpy() for counts in targets]
        self._targets = [
            counts.numpy()[used] for counts, used in zip(targets, self._used, strict=True)
        ]
        totals = [int(counts.sum()) for counts in self._targets]
        if not totals or 0 in totals:
            raise ValueError(f"every source needs targets; the sources have {totals}")
        shares = np.array(totals if weights is None else weights, dtype=np.float64)
        if shares.shape != (len(totals),) or not (np.isfinite(shares) & (shares > 0)).all():
            raise ValueError(f"weights must be {len(totals)} finite numbers above 0, got {weights}")
        self.shares: list[float] = (shares / shares.sum()).tolist()
        self._totals, self._seed, self._shuffle = totals, seed, shuffle
        rows_a_target = sum(
            share * len(counts) / total
            for share, counts, total in zip(self.shares, self._targets, totals, strict=True)
        )
        self._block_rows = min(BLOCK_ROWS, self.rows_per_epoch)
        self._block_targets = self._block_rows / rows_a_target
        self._epochs: OrderedDict[tuple[int, int], tuple[Integers, Floats]] = OrderedDict()
        self._block: tuple[int, int, Tensor] | None = None  # number, first place, content

    @property
    def rows_per_epoch(self) -> int:
        """Rows with targets, over all sources: an epoch's, if the weights are None."""
        return sum(map(len, self._used))

    def rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, 3] int64: source, its epoch and its row, at the places start to stop.

        Raises ValueError unless 0 <= start <= stop.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"places must be 0 <= start <= stop, got {start} and {stop}")
        parts = [torch.empty((0, 3), dtype=torch.int64)]
        place = start
        while place < stop:
            first, content = self._block_at(place)
            part = content[place - first : stop - first]
            parts.append(part)
            place += len(part)
        return torch.cat(parts)

    def num_targets(self, start: int, stop: int) -> int:
        """The supervised tokens of the places start to stop."""
        total = 0
        for begin in range(start, stop, 16 * BLOCK_ROWS):
            chosen = self.rows(begin, min(begin + 16 * BLOCK_ROWS, stop))
            for source, counts in enumerate(self._targets):
                rows = chosen[chosen[:, 0] == source, 2].numpy()
                total += int(counts[np.searchsorted(self._used[source], rows)].sum())
        return total

    def _block_at(self, place: int) -> tuple[int, Tensor]:
        """The block that holds a place: its first place, and its rows.

        Block b has the rows whose source had consumed b U to (b + 1) U targets per weight.
        """
        if self._block and self._block[1] <= place < self._block[1] + len(self._block[2]):
            return self._block[1], self._block[2]
        number = place // self._block_rows
        while number and self._rows_before(number * self._block_targets) > place:
            number -= 1
        while self._rows_before((number + 1) * self._block_targets) <= place:
            number += 1
        first, content = self._made(number)
        self._block = number, first, content
        return first, content

    def _made(self, number: int) -> tuple[int, Tensor]:
        low, high = number * self._block_targets, (number + 1) * self._block_targets
        keys, columns = [], []
        for source in range(len(self._totals)):
            for epoch in range(self._epoch(source, low), self._epoch(source, high) + 2):
                rows, starts = self._in_epoch(source, epoch)
                begin, end = np.searchsorted(starts, (low, high))
                keys.append(starts[begin:end])
                named = np.full((end - begin, 3), (source, epoch, 0))
                named[:, 2] = rows[begin:end]
                columns.append(named)
        content = np.concatenate(columns)
        order = np.argsort(np.concatenate(keys), kind="stable")  # sources stand in their order
        return self._rows_before(low), torch.from_numpy(content[order])

    def _rows_before(self, consumed: float) -> int:
        """Rows of all sources that begin before so many targets per weight."""
        total = 0
        for source, used in enumerate(self._used):
            first = self._epoch(source, consumed)
            total += first * len(used)
            for epoch in (first, first + 1):
                total += int(np.searchsorted(self._in_epoch(source, epoch)[1], consumed))
        return total

    def _epoch(self, source: int, consumed: float) -> int:
        """An epoch of the source before which everything has begun: its own, or the one before."""
        exact = consumed * self.shares[source] / self._totals[source]
        return max(int(exact - 1e-9 * (1.0 + exact)), 0)

    def _in_epoch(self, source: int, epoch: int) -> tuple[Integers, Floats]:
        """The source's rows in this epoch's order; before each, consumed targets per weight."""
        kept = self._epochs
        if (source, epoch) not in kept:
            if len(kept) >= EPOCHS_KEPT * len(self._totals):
                kept.popitem(last=False)
            seed = _seed_of(self._seed, source)
            order = self._shuffle(len(self._used[source]), seed, epoch).numpy()
            ends = np.cumsum(self._targets[source][order])
            begins = ends - self._targets[source][order] + epoch * self._totals[source]
            kept[source, epoch] = self._used[source][order], begins / self.shares[source]
        kept.move_to_end((source, epoch))
        return kept[source, epoch]


def _seed_of(seed: int, source: int) -> int:
    digest = hashlib.sha256(f"seed {seed} source {source}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
