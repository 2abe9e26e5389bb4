"""What the manifest counts by source and by slice."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from reference.data.clustering import REASON, Assignment
from reference.data.manifest import SPLITS, Count, ShardRecord, SliceRecord, SourceRecord
from reference.data.reading import Read
from reference.data.shards import open_documents
from reference.data.sources import Source


def source_records(sources: list[Source], read: Read, assignment: Assignment) -> list[SourceRecord]:
    """What was read of each source, and what became of it."""
    hashed = [hashlib.sha256() for _ in sources]
    files: list[set[str]] = [set() for _ in sources]
    sums = [[0, 0] for _ in sources]
    dropped: list[dict[str, list[int]]] = [{} for _ in sources]
    columns = ["raw_sha256", "raw_bytes", "file", "dropped"]
    for chunk, start in enumerate(read.starts[:-1].tolist()):
        source = read.sources[chunk]
        table = read.documents(chunk, columns)
        sizes = table["raw_bytes"].to_numpy()
        hashed[source].update(b"".join(table["raw_sha256"].to_pylist()))
        files[source].update(table["file"].unique().to_pylist())
        sums[source][0] += len(sizes)
        sums[source][1] += int(sizes.sum())
        places = assignment.place[start : start + len(sizes)].tolist()
        for reason, place, size in zip(
            table["dropped"].to_pylist(), places, sizes.tolist(), strict=True
        ):
            if place < 0:
                count = dropped[source].setdefault(reason or REASON[place], [0, 0])
                count[0] += 1
                count[1] += size
    return [
        SourceRecord(
            name=source.name, kind=source.kind, origin=source.origin,
            snapshot=hashed[i].hexdigest(), licence=source.licence, weight=source.weight,
            num_files=len(files[i]), num_documents=sums[i][0], num_bytes=sums[i][1],
            dropped={reason: Count(*count) for reason, count in sorted(dropped[i].items())},
        )
        for i, source in enumerate(sources)
    ]  # fmt: skip


def slice_records(folder: Path, shards: list[ShardRecord]) -> list[SliceRecord]:
    """What is written, by split, source and slice, in this order."""
    sums: dict[tuple[str, int, str], np.ndarray[Any, Any]] = {}
    for shard in shards:
        table = open_documents(folder, shard).select(["slice", "num_tokens", "num_bytes"])
        counts = table.group_by("slice").aggregate(
            [("num_tokens", "count"), ("num_tokens", "sum"), ("num_bytes", "sum")]
        )
        for row in counts.to_pylist():
            key = (shard.split, shard.source, row["slice"])
            own = [row["num_tokens_count"], row["num_tokens_sum"], row["num_bytes_sum"]]
            sums[key] = sums.get(key, np.zeros(3, np.int64)) + own
    keys = sorted(sums, key=lambda key: (SPLITS.index(key[0]), *key[1:]))
    return [SliceRecord(*key, *sums[key].tolist()) for key in keys]
