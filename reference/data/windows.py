"""The windows of one split of a prepared folder: read from the shards, and traced back to text."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from reference.data.account import row_targets
from reference.data.labels import PADDING_DOCUMENT
from reference.data.manifest import Manifest, ShardRecord
from reference.data.pack import Rows
from reference.data.policy import PackingPolicy
from reference.data.shards import DocumentRecord, document_record, open_documents, open_tokens

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Part of a window: its tokens start to stop (T + 1 in all) are a document's tokens from
    `first_token` on. is_again: tail "wrap" has them a second time.
    """

    start: int
    stop: int
    document: DocumentRecord
    first_token: int
    is_again: bool


class _Stream:
    """All documents of one source in one split, end to end.

    lengths, document_starts: [documents] tokens of each and its first place in the stream.
    """

    def __init__(self, directory: Path, manifest: Manifest, shards: list[ShardRecord]) -> None:
        self._directory, self._manifest, self._shards = directory, manifest, shards
        self._tokens = [open_tokens(directory, manifest, shard) for shard in shards]
        self._table: tuple[int, pa.Table] | None = None  # the last one that was needed
        # Of the tables only this stays in memory: 8 bytes a document.
        lengths = [open_documents(directory, shard)["num_tokens"].to_numpy() for shard in shards]
        self.lengths: Integers = np.concatenate(lengths)
        self.document_starts: Integers = np.cumsum(self.lengths) - self.lengths
        self.num_tokens = int(self.lengths.sum())
        self._shard_starts = [0, *accumulate(shard.num_tokens for shard in shards)]
        self._first_documents = [0, *accumulate(shard.num_documents for shard in shards)]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens start to stop, from as many shards as they lie in."""
        parts = []
        shard = bisect_right(self._shard_starts, start) - 1
        while start < stop:
            begin, end = self._shard_starts[shard : shard + 2]
            parts.append(self._tokens[shard][start - begin : min(stop, end) - begin])
            start, shard = min(stop, end), shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_at(self, place: int) -> int:
        """The document whose token stands at a place: the last that begins there or before."""
        return int(np.searchsorted(self.document_starts, place, side="right")) - 1

    def record(self, document: int) -> DocumentRecord:
        """The document's row in its shard's table."""
        number = bisect_right(self._first_documents, document) - 1
        if self._table is None or self._table[0] != number:
            self._table = number, open_documents(self._directory, self._shards[number])
        row = document - self._first_documents[number]
        return document_record(self._manifest, self._shards[number], self._table[1], row)


class SplitWindows:
    """Every window of a split: rows of T + 1 tokens, of one source each, as `pack` makes them of
    the source's documents in the order of its shards. Windows are numbered through all sources.

    A document's number in `Rows.documents` is its row in the split's tables; with tail "wrap" what
    comes a second time has the number of documents added.

    Attributes: sources, the index in `manifest.sources` of each source that has windows;
    first_windows, the number of the first window of each, then the number of all; targets, for each
    [windows] int64, the supervised tokens; eos; sha256, of the manifest, the split and the policy.

    directory: of a folder whose manifest was read by `read_manifest`: shards are not hashed again.
    policy: None for the manifest's. Raises ValueError if no window has a target.
    """

    def __init__(
        self,
        directory: Path | str,
        manifest: Manifest,
        split: str,
        policy: PackingPolicy | None = None,
    ) -> None:
        self.policy = policy or PackingPolicy.from_json(manifest.policy)
        self.eos = manifest.tokenizer.eos
        self.sha256 = _named(manifest, split, self.policy)
        shards = manifest.shards_of(split)
        self.sources: list[int] = []
        self.targets: list[Tensor] = []
        self._streams: list[_Stream] = []
        self._first_documents: list[int] = []
        num_documents = 0
        for source in sorted({shard.source for shard in shards}):
            own = [shard for shard in shards if shard.source == source]
            stream = _Stream(Path(directory), manifest, own)
            targets = row_targets(stream.lengths, self.policy)
            if targets.sum():
                self.sources.append(source)
                self.targets.append(targets)
                self._streams.append(stream)
                self._first_documents.append(num_documents)
            num_documents += len(stream.lengths)
        self.num_documents = num_documents
        self.first_windows = [0, *accumulate(map(len, self.targets))]
        if not self._streams:
            raise ValueError(
                f"{directory}: no window of {self.policy.window_tokens} tokens in {split} has a "
                f"target with tail {self.policy.tail!r}; give more text or a smaller window"
            )

    @property
    def num_windows(self) -> int:
        """Of all sources."""
        return self.first_windows[-1]

    def read(self, numbers: Tensor) -> Rows:
        """The windows of these numbers, in this order. ValueError for one that is not there."""
        shape = (len(numbers), self.policy.window_tokens + 1)
        tokens = np.empty(shape, dtype=np.int64)
        documents = np.empty(shape, dtype=np.int32)
        for row, number in enumerate(numbers.tolist()):
            self._fill(*self._place(number), tokens[row], documents[row])
        places = np.broadcast_to(np.arange(shape[1]), shape)
        starts = np.zeros(shape, dtype=np.int64)
        np.copyto(starts[:, 1:], places[:, 1:], where=documents[:, 1:] != documents[:, :-1])
        positions = places - np.maximum.accumulate(starts, axis=1)
        return Rows(*map(torch.from_numpy, (tokens, documents, positions)))

    def locate(self, number: int) -> list[Piece]:
        """Which documents a window is made of, in order; padding is none.

        Raises ValueError for a window that is not there.
        """
        source, start = self._place(number)
        stream = self._streams[source]
        pieces = []
        at, stop = start, start + self.policy.window_tokens + 1
        if self.policy.tail != "wrap":
            stop = min(stop, stream.num_tokens)
        while at < stop:
            lap, place = divmod(at, stream.num_tokens)
            document = stream.document_at(place)
            first_token = place - int(stream.document_starts[document])
            end = min(stop, at + int(stream.lengths[document]) - first_token)
            record = stream.record(document)
            pieces.append(Piece(at - start, end - start, record, first_token, lap > 0))
            at = end
        return pieces

    def _place(self, number: int) -> tuple[int, int]:
        """The source that a window is of, and its first token's place in the source's stream."""
        if not 0 <= number < self.num_windows:
            raise ValueError(f"no window {number}; there are {self.num_windows}")
        source = bisect_right(self.first_windows, number) - 1
        return source, (number - self.first_windows[source]) * self.policy.window_tokens

    def _fill(
        self,
        source: int,
        start: int,
        tokens: Integers,
        documents: npt.NDArray[np.int32],
    ) -> None:
        stream, width = self._streams[source], len(tokens)
        have = min(width, stream.num_tokens - start)
        tokens[:have] = stream.read(start, start + have)
        ends = (start, start + have - 1)
        first, last = np.searchsorted(stream.document_starts, ends, side="right") - 1
        begins = stream.document_starts[first + 1 : last + 1] - start
        cuts = [0, *begins.tolist(), have]
        for number, (begin, end) in enumerate(
            pairwise(cuts), first + self._first_documents[source]
        ):
            documents[begin:end] = number
        if have < width and self.policy.tail == "wrap":
            self._wrap(source, have, tokens, documents)
        elif have < width:
            tokens[have:], documents[have:] = tokens[have - 1], PADDING_DOCUMENT

    def _wrap(
        self, source: int, have: int, tokens: Integers, documents: npt.NDArray[np.int32]
    ) -> None:
        """Fills a row up with the stream's beginning, again and again if it is short."""
        stream = self._streams[source]
        again = np.arange(len(tokens) - have)
        laps, places = again // stream.num_tokens + 1, again % stream.num_tokens
        tokens[have:] = stream.read(0, int(places.max()) + 1)[places]
        owners = np.searchsorted(stream.document_starts, places, side="right") - 1
        documents[have:] = owners + self._first_documents[source] + laps * self.num_documents


def _named(manifest: Manifest, split: str, policy: PackingPolicy) -> str:
    name = f"{manifest.sha256} {split} {sorted(policy.to_json().items())}"
    return hashlib.sha256(name.encode()).hexdigest()
