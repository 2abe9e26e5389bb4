"""Window: the microbatches that make one optimizer update, and what can be cut from it.

A window is the unit of the objective: its loss is the mean of the negative log-likelihood over
all its targets, however they are spread over microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from reference.loss import NO_TARGET


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Rows that go through the model together.

    input_ids [B,T] int64; labels [B,T] int64, `NO_TARGET` where nothing is predicted; positions
    [B,T] int64; documents [B,T] int32 or None (one document a row); num_bytes: size in bytes of
    the raw text that the targets stand for, where it is known (evaluation needs it). is_stand_in:
    the rows go through the model because other ranks wait for it; another rank has read them.

    Raises ValueError when the shapes differ.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None = None
    num_bytes: int | None = None
    is_stand_in: bool = False

    def __post_init__(self) -> None:
        shape = tuple(self.input_ids.shape)
        if len(shape) != 2:
            raise ValueError(f"Microbatch.input_ids must be [rows, tokens], got shape {shape}")
        for name in ("labels", "positions", "documents"):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"Microbatch.{name} has shape {tuple(tensor.shape)}, input_ids has {shape}; "
                    "they must be equal"
                )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """B * T: every position that is read, padding and unsupervised ones included; 0 of rows
        that stand in.
        """
        return 0 if self.is_stand_in else self.input_ids.numel()

    @property
    def num_targets(self) -> int:
        """The number of labels that are not `NO_TARGET`: the tokens of the objective."""
        return int((self.labels != NO_TARGET).sum())

    def rows(self, start: int, stop: int, step: int = 1) -> Microbatch:
        """Rows start to stop (exclusive), every `step`-th. Of a part num_bytes is None."""
        if (start, stop, step) == (0, self.num_rows, 1):
            return self
        chosen = slice(start, stop, step)
        return replace(
            self,
            input_ids=self.input_ids[chosen],
            labels=self.labels[chosen],
            positions=self.positions[chosen],
            documents=None if self.documents is None else self.documents[chosen],
            num_bytes=None,
        )

    def to(self, device: torch.device | str) -> Microbatch:
        """The same microbatch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            positions=self.positions.to(device),
            documents=None if self.documents is None else self.documents.to(device),
        )


@dataclass(frozen=True, eq=False)
class Window:
    """The microbatches of one update, in order. Raises ValueError when there is none."""

    microbatches: tuple[Microbatch, ...]

    def __post_init__(self) -> None:
        if not self.microbatches:
            raise ValueError("a Window needs at least one Microbatch, got none")

    @property
    def num_rows(self) -> int:
        """Rows over all microbatches."""
        return sum(microbatch.num_rows for microbatch in self.microbatches)

    @property
    def num_tokens(self) -> int:
        """Positions read over all microbatches, padding included, rows that stand in not."""
        return sum(microbatch.num_tokens for microbatch in self.microbatches)

    @property
    def num_targets(self) -> int:
        """Supervised tokens over all microbatches: the denominator of the window's mean loss."""
        return sum(microbatch.num_targets for microbatch in self.microbatches)

    def split(self, num_microbatches: int) -> Window:
        """The same rows, in order, in `num_microbatches` microbatches of nearly equal row counts.

        Raises ValueError unless 1 <= num_microbatches <= rows, and when the rows cannot stand in
        one tensor (different lengths, documents given for some only, or some that stand in).
        """
        num_rows = self.num_rows
        if not 1 <= num_microbatches <= num_rows:
            raise ValueError(
                f"a window of {num_rows} rows cannot be split into {num_microbatches} microbatches;"
                f" ask for 1 to {num_rows}"
            )
        whole = _concatenate(self.microbatches)
        cuts = [num_rows * index // num_microbatches for index in range(num_microbatches + 1)]
        return Window(tuple(whole.rows(start, stop) for start, stop in pairwise(cuts)))

    def trim(self, num_targets: int) -> Window:
        """The window with its first `num_targets` targets; the later labels become `NO_TARGET`.

        Inputs stay, so what a kept target sees does not change. "First" counts row by row through
        the microbatches in order. Raises ValueError unless 0 <= num_targets <= self.num_targets.
        """
        if not 0 <= num_targets <= self.num_targets:
            raise ValueError(
                f"cannot trim a window of {self.num_targets} targets to {num_targets} targets"
            )
        remaining = num_targets
        trimmed = []
        for microbatch in self.microbatches:
            is_target = (microbatch.labels != NO_TARGET).flatten()
            is_kept = is_target & (is_target.cumsum(0) <= remaining)
            labels = microbatch.labels.masked_fill(~is_kept.view_as(microbatch.labels), NO_TARGET)
            kept = microbatch
            if int(is_kept.sum()) < int(is_target.sum()):
                kept = replace(microbatch, labels=labels, num_bytes=None)
            trimmed.append(kept)
            remaining -= int(is_kept.sum())
        return Window(tuple(trimmed))

    def share(self, index: int, num_shares: int) -> Window:
        """Rows index, index + num_shares, ..., counted from the window's first through its last.

        The shares together are the window. Each has as many microbatches as the window, because
        the ranks that train them make the same calls: where a share gets no row of a microbatch,
        the microbatch's first row stands in, without its targets.

        Raises ValueError unless 0 <= index < num_shares.
        """
        if not 0 <= index < num_shares:
            raise ValueError(f"share {index} of {num_shares} does not exist; count from 0")
        if num_shares == 1:
            return self
        shares, num_before = [], 0
        for microbatch in self.microbatches:
            first = (index - num_before) % num_shares
            num_before += microbatch.num_rows
            share = microbatch.rows(first, microbatch.num_rows, num_shares)
            if share.num_rows == 0:
                row = microbatch.rows(0, 1)
                labels = torch.full_like(row.labels, NO_TARGET)
                share = replace(row, labels=labels, num_bytes=None, is_stand_in=True)
            shares.append(share)
        return Window(tuple(shares))

    def to(self, device: torch.device | str) -> Window:
        """The same window with its tensors on `device`."""
        return Window(tuple(microbatch.to(device) for microbatch in self.microbatches))


def _concatenate(microbatches: tuple[Microbatch, ...]) -> Microbatch:
    if len(microbatches) == 1:
        return microbatches[0]
    lengths = sorted({microbatch.input_ids.shape[1] for microbatch in microbatches})
    if len(lengths) > 1:
        raise ValueError(f"rows of different lengths {lengths} cannot be split anew; pad them")
    documents = [m.documents for m in microbatches if m.documents is not None]
    if documents and len(documents) < len(microbatches):
        raise ValueError("documents are given for some microbatches only; give them for all")
    if any(microbatch.is_stand_in for microbatch in microbatches):
        raise ValueError(
            "rows stand in for others in this share; split the window and share it out afterwards"
        )
    return Microbatch(
        torch.cat([microbatch.input_ids for microbatch in microbatches]),
        torch.cat([microbatch.labels for microbatch in microbatches]),
        torch.cat([microbatch.positions for microbatch in microbatches]),
        torch.cat(documents) if documents else None,
    )
