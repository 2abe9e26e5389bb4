"""Fourth stage: the folder itself, from the ids of all chunks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reference.checkpoint import disk
from reference.checkpoint.files import FileRecord
from reference.data.account import row_targets
from reference.data.clustering import Assignment
from reference.data.manifest import SPLITS, TRAIN, VALIDATION, ShardRecord
from reference.data.policy import PackingPolicy
from reference.data.reading import Read, chunk_file
from reference.data.shards import DOCUMENTS, open_documents
from reference.data.sources import Source
from reference.data.work import disk_errors_name

SHARD_TOKENS = 2**24


class HashedFile:
    """A new file that is written piece by piece, hashed, and on the device when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, disk.create(path)
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def write(self, piece: bytes | memoryview) -> None:
        """Appends the piece."""
        self._digest.update(piece)
        rest = memoryview(piece).cast("B")
        self._num_bytes += len(rest)
        with disk_errors_name(self._path):
            while len(rest):
                rest = rest[disk.write(self._descriptor, rest) :]

    def close(self) -> FileRecord:
        """Size and SHA-256 of what was written."""
        with disk_errors_name(self._path):
            disk.fsync(self._descriptor)
        self.abandon()
        return FileRecord(self._num_bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Closes the file as it is."""
        os.close(self._descriptor)


def write_file(path: Path, content: bytes | memoryview) -> FileRecord:
    """A new file with this content."""
    file = HashedFile(path)
    try:
        file.write(content)
    except OSError:
        file.abandon()
        raise
    return file.close()


def write_shards(
    folder: Path, read: Read, assignment: Assignment, shard_tokens: int = SHARD_TOKENS
) -> tuple[list[ShardRecord], dict[str, FileRecord]]:
    """Writes every shard and its table below `folder`; returns their records.

    Documents stand in the order in which they were read. A shard ends with the document that
    reaches shard_tokens, or with its source.
    """
    shards: list[ShardRecord] = []
    files: dict[str, FileRecord] = {}
    for index, split in enumerate(SPLITS):
        disk.make_folder(folder / split)
        number, waiting = 0, _Shard()
        for source, ids, lengths, table in _pieces(read, assignment, index):
            if waiting.num_tokens and waiting.source != source:
                shards.append(_written(folder, split, number, waiting, files))
                number, waiting = number + 1, _Shard()
            waiting.source = source
            while len(lengths):
                ends = np.cumsum(lengths)
                taken = int(np.searchsorted(ends, shard_tokens - waiting.num_tokens)) + 1
                stop = int(ends[min(taken, len(ends)) - 1])
                waiting.add(ids[:stop], lengths[:taken], table.slice(0, taken))
                ids, lengths, table = ids[stop:], lengths[taken:], table.slice(taken)
                if waiting.num_tokens >= shard_tokens:
                    shards.append(_written(folder, split, number, waiting, files))
                    number, waiting = number + 1, _Shard()
                    waiting.source = source
        if waiting.num_tokens:
            shards.append(_written(folder, split, number, waiting, files))
    return shards, files


def training_windows(
    folder: Path, shards: list[ShardRecord], sources: list[Source], policy: PackingPolicy
) -> dict[str, int]:
    """{source: its windows that have a target, in the training split}.

    Raises ValueError for a split in which no window has one, and for a source that declares a
    weight and has none to train on: nothing could be trained on the folder.
    """
    found = _num_windows(folder, shards, TRAIN, policy)
    for split, own in (
        (TRAIN, found),
        (VALIDATION, _num_windows(folder, shards, VALIDATION, policy.for_evaluation())),
    ):
        if not any(own.values()):
            num_tokens = sum(shard.num_tokens for shard in shards if shard.split == split)
            raise ValueError(
                f"no window of {policy.window_tokens:,} tokens in {split} has a target: it has "
                f"{num_tokens:,} tokens; give more text or a smaller --window-tokens"
            )
    by_source = {source.name: found.get(i, 0) for i, source in enumerate(sources)}
    for source in sources:
        if source.weight is not None and not by_source[source.name]:
            raise ValueError(
                f"source {source.name} declares weight {source.weight:g}, and has no window of "
                f"{policy.window_tokens:,} tokens to train on (windows: "
                f"{', '.join(f'{n} {num:,}' for n, num in by_source.items())}); give more text, a "
                f"smaller --window-tokens, or leave the source out"
            )
    return by_source


def _num_windows(
    folder: Path, shards: list[ShardRecord], split: str, policy: PackingPolicy
) -> dict[int, int]:
    lengths: dict[int, list[npt.NDArray[np.int64]]] = {}
    for shard in shards:
        if shard.split == split:
            own = open_documents(folder, shard)["num_tokens"].to_numpy()
            lengths.setdefault(shard.source, []).append(own)
    return {
        source: int((row_targets(np.concatenate(own), policy) > 0).sum())
        for source, own in lengths.items()
    }


class _Shard:
    """What is to stand in one shard: at most shard_tokens and one chunk more."""

    def __init__(self) -> None:
        self.source = -1
        self.num_tokens = 0
        self.ids: list[npt.NDArray[Any]] = []
        self.lengths: list[npt.NDArray[np.int64]] = []
        self.tables: list[pa.Table] = []

    def add(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], table: pa.Table) -> None:
        self.ids.append(ids)
        self.lengths.append(lengths)
        self.tables.append(table)
        self.num_tokens += len(ids)


def _pieces(
    read: Read, assignment: Assignment, split: int
) -> Iterator[tuple[int, npt.NDArray[Any], npt.NDArray[np.int64], pa.Table]]:
    """(source, ids, lengths, table) of every chunk that has a document in the split."""
    for chunk, start in enumerate(read.starts[:-1].tolist()):
        places = assignment.place[start : start + read.num_documents[chunk]]
        own = np.flatnonzero(places == split)
        if not len(own):
            continue
        with np.load(chunk_file(read.folder, chunk, "ids.npz")) as arrays:
            ids, lengths = arrays[SPLITS[split]], arrays[f"{SPLITS[split]}_lengths"]
        table = read.documents(chunk).take(pa.array(own))
        rows = start + own
        clusters = [row.tobytes() for row in assignment.cluster[rows]]
        table = table.append_column("cluster", pa.array(clusters, pa.binary(32)))
        table = table.append_column("cluster_size", pa.array(assignment.cluster_size[rows]))
        yield read.sources[chunk], ids, lengths, table


def _written(
    folder: Path, split: str, number: int, shard: _Shard, files: dict[str, FileRecord]
) -> ShardRecord:
    lengths = np.concatenate(shard.lengths)
    table = pa.concat_tables(shard.tables).combine_chunks()
    table = table.append_column("start", pa.array(np.cumsum(lengths) - lengths))
    table = table.append_column("num_tokens", pa.array(lengths))
    table = table.select(DOCUMENTS.names).cast(DOCUMENTS)
    num_bytes = int(table["num_bytes"].to_numpy().sum())
    record = ShardRecord(split, number, shard.source, len(lengths), shard.num_tokens, num_bytes)
    file = HashedFile(folder / record.tokens_file)
    try:
        for ids in shard.ids:
            file.write(np.ascontiguousarray(ids).data)
    except OSError:
        file.abandon()
        raise
    files[record.tokens_file] = file.close()
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = memoryview(sink.getvalue())
    files[record.documents_file] = write_file(folder / record.documents_file, content)
    return record
