"""Where every token of a stream goes: trained on, or left out as the policy declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reference.data.policy import PackingPolicy

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Account:
    """What becomes of the tokens of one stream in one pass.

    num_tokens: of all documents, with EOS. num_rows: windows, one without targets included.
    num_targets: supervised tokens in them; num_repeated: those of them that tail "wrap" has a
    second time. Not supervised: num_firsts, that nothing predicts: the stream's first token, and
    with boundary "ignore" every document's; num_ends, the EOS with eos "ignore" (that are no
    firsts); num_dropped, in no row as a target because of tail "drop". num_padding: padded places.
    """

    num_tokens: int
    num_rows: int
    num_targets: int
    num_repeated: int
    num_firsts: int
    num_ends: int
    num_dropped: int
    num_padding: int

    @property
    def num_missing(self) -> int:
        """Tokens in - (trained + left out as declared): 0."""
        trained = self.num_targets - self.num_repeated
        return self.num_tokens - trained - self.num_firsts - self.num_ends - self.num_dropped


def account(lengths: Sequence[int] | Integers, policy: PackingPolicy) -> Account:
    """The account of documents with so many tokens each, EOS included, packed end to end.

    An empty document takes no room. Raises ValueError for a negative length.
    """
    places = np.asarray(lengths, dtype=np.int64)
    num_tokens, num_rows = int(places.sum()), num_rows_of(places, policy)
    last = num_rows * policy.window_tokens  # the place of the last target in the rows
    firsts, ends = _unsupervised(places, policy)
    in_rows = min(max(last + 1, 1), num_tokens)  # stream tokens that a row has as target, or first
    num_firsts = int((firsts < in_rows).sum())
    num_ends = int((ends < in_rows).sum())
    num_targets = int(row_targets(places, policy).sum())
    num_repeated = 0
    if policy.tail == "wrap" and num_rows:
        num_repeated = last + 1 - num_tokens - len(_unsupervised_again(places, policy, last))
    return Account(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_targets=num_targets,
        num_repeated=num_repeated,
        num_firsts=num_firsts,
        num_ends=num_ends,
        num_dropped=num_tokens - in_rows,
        num_padding=max(last + 1 - num_tokens, 0) if policy.tail == "pad" and num_rows else 0,
    )


def num_rows_of(lengths: Integers, policy: PackingPolicy) -> int:
    """The rows of a stream of documents with so many tokens: as many as `pack` makes."""
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"a document has {int(lengths.min())} tokens; lengths must be >= 0")
    num_tokens = int(lengths.sum())
    full, left = divmod(max(num_tokens - 1, 0), policy.window_tokens)
    return full if policy.tail == "drop" else max(full + (left > 0), min(num_tokens, 1))


def row_targets(lengths: Integers, policy: PackingPolicy) -> Tensor:
    """[rows] int64: the supervised tokens of each row of the stream."""
    num_tokens, num_rows = int(lengths.sum()), num_rows_of(lengths, policy)
    width = policy.window_tokens
    last = num_rows * width
    edges = 1 + width * np.arange(num_rows + 1)  # row r has the targets at edges[r] .. edges[r+1]
    have = np.minimum(edges[1:], num_tokens) - np.minimum(edges[:-1], num_tokens)
    firsts, ends = _unsupervised(lengths, policy)
    apart = np.concatenate([firsts, ends])
    if policy.tail == "wrap" and num_rows:
        have = np.full(num_rows, width)
        apart = np.concatenate([apart, _unsupervised_again(lengths, policy, last)])
    rows = (apart[(apart >= 1) & (apart <= last)] - 1) // width
    return torch.from_numpy(have - np.bincount(rows, minlength=num_rows)[:num_rows])


def _unsupervised(lengths: Integers, policy: PackingPolicy) -> tuple[Integers, Integers]:
    """The places in the stream that are firsts, and those that are ends and no firsts."""
    ends = _ends(lengths)
    begins = ends - lengths[lengths > 0] + 1
    firsts = begins if policy.boundary == "ignore" else begins[:1]
    if policy.eos == "predict":
        return firsts, ends[:0]
    return firsts, np.setdiff1d(ends, firsts, assume_unique=True)


def _unsupervised_again(lengths: Integers, policy: PackingPolicy, last: int) -> Integers:
    """The same places in the stream begun again, from its end up to `last`, as tail "wrap" does."""
    num_tokens = int(lengths.sum())
    firsts, ends = _unsupervised(lengths, policy)
    # A second time the stream's first token has one before it.
    begins = firsts if policy.boundary == "ignore" else firsts[:0]
    once = np.union1d(begins, _ends(lengths) if policy.eos == "ignore" else ends)
    laps = range(1, last // num_tokens + 1)
    again: Integers = np.concatenate([once[:0], *(once + lap * num_tokens for lap in laps)])
    return again[again <= last]


def _ends(lengths: Integers) -> Integers:
    """The place in the stream of each document's last token."""
    ends: Integers = np.cumsum(lengths[lengths > 0]) - 1
    return ends
