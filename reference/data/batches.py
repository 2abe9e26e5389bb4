"""Rows as windows: in which order, and how many together."""

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from reference.data.pack import Rows
from reference.window import Microbatch, Window

MakeLabels = Callable[[Tensor, Tensor | None, str], Tensor]


def shuffle(num_rows: int, seed: int, epoch: int) -> Tensor:
    """[num_rows] int64: a permutation of the rows, another one for each seed and epoch.

    The generator is seeded from a hash of both: seed 0 in epoch 1 is not seed 1 in epoch 0.
    Raises ValueError for a negative number of rows or epoch.
    """
    if num_rows < 0 or epoch < 0:
        raise ValueError(f"num_rows {num_rows} and epoch {epoch} must not be negative")
    digest = hashlib.sha256(f"seed {seed} epoch {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(num_rows, generator=generator)


def batches(
    rows: Rows,
    order: Tensor,
    make_labels: MakeLabels,
    policy: str,
    rows_per_microbatch: int,
    microbatches_per_window: int,
) -> Iterator[Window]:
    """The windows of one epoch: each row that `order` names, once, in that order.

    A last microbatch with fewer rows and a last window with fewer microbatches are kept: the loss
    is a mean over the targets that a window has, so a short window needs nothing special.

    order: [n] int64 row numbers. make_labels is called on all T + 1 tokens of the rows, so the last
    input of a row has its target too; policy is handed on to it. rows_per_microbatch: B.
    Raises ValueError for a size below 1, an empty order, or a row that is not there.
    """
    for name, size in (
        ("rows_per_microbatch", rows_per_microbatch),
        ("microbatches_per_window", microbatches_per_window),
    ):
        if size < 1:
            raise ValueError(f"{name} is {size}, must be at least 1")
    if order.ndim != 1 or not order.numel():
        raise ValueError(f"order must name at least one row, got shape {tuple(order.shape)}")
    if not 0 <= int(order.min()) <= int(order.max()) < rows.num_rows:
        raise ValueError(
            f"order names rows {int(order.min())} to {int(order.max())} of {rows.num_rows}"
        )
    return _windows(rows, order, make_labels, policy, rows_per_microbatch, microbatches_per_window)


def _windows(
    rows: Rows,
    order: Tensor,
    make_labels: MakeLabels,
    policy: str,
    rows_per_microbatch: int,
    microbatches_per_window: int,
) -> Iterator[Window]:
    for window in torch.split(order, rows_per_microbatch * microbatches_per_window):
        yield Window(
            tuple(
                _microbatch(rows, chosen, make_labels, policy)
                for chosen in torch.split(window, rows_per_microbatch)
            )
        )


def _microbatch(rows: Rows, chosen: Tensor, make_labels: MakeLabels, policy: str) -> Microbatch:
    tokens, documents = rows.tokens[chosen], rows.documents[chosen]
    labels = make_labels(tokens, documents, policy)
    return Microbatch(
        input_ids=tokens[:, :-1],
        labels=labels[:, :-1],
        positions=rows.positions[chosen][:, :-1],
        documents=documents[:, :-1],
        num_bytes=None if rows.num_bytes is None else int(rows.num_bytes[chosen].sum()),
    )
