"""Shards: token ids in a flat file, and beside it a table with a row a document.

The table answers, for every token of a shard, which document it belongs to, where that came from
and what was done to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reference.data.manifest import DataError, Manifest, ShardRecord

# start, num_tokens: in the shard, num_tokens with EOS, so start[i + 1] = start[i] + num_tokens[i].
# num_bytes, sha256: of the text as it was tokenized; raw_sha256: as it stood in the source.
# cluster: the smallest sha256 among its near duplicates, itself included; cluster_size counts them.
# file, row: where it was read. row counts from 0, and is said from 1 (`place_of`): the row of a
# table, the line of JSONL, empty ones counted, the part of a text file that was cut; -1 where the
# file is the document. steps: what cleaning did.
DOCUMENTS = pa.schema(
    [
        pa.field("start", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("raw_sha256", pa.binary(32), nullable=False),
        pa.field("cluster", pa.binary(32), nullable=False),
        pa.field("cluster_size", pa.int32(), nullable=False),
        pa.field("slice", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("steps", pa.list_(pa.string()), nullable=False),
    ]
)


@dataclass(frozen=True)
class DocumentRecord:
    """One row of `DOCUMENTS`, with its source's and split's names; hashes in hexadecimal; row
    from 0, as there.
    """

    split: str
    source: str
    slice: str
    file: str
    row: int
    start: int
    num_tokens: int
    num_bytes: int
    sha256: str
    raw_sha256: str
    cluster: str
    cluster_size: int
    steps: tuple[str, ...]


def id_dtype(manifest: Manifest) -> np.dtype[Any]:
    """The little-endian NumPy type of a token id in the shards."""
    return np.dtype(manifest.tokenizer.id_dtype).newbyteorder("<")


def open_tokens(directory: Path | str, manifest: Manifest, shard: ShardRecord) -> npt.NDArray[Any]:
    """[num_tokens] ids of a shard, mapped into memory and read-only. Nothing is checked again."""
    path = Path(directory) / shard.tokens_file
    return np.memmap(path, id_dtype(manifest), mode="r", shape=(shard.num_tokens,))


def open_documents(directory: Path | str, shard: ShardRecord) -> pa.Table:
    """The table of a shard's documents: `DOCUMENTS`.

    Raises DataError if it is not such a table, or does not cover the shard's tokens end to end.
    """
    path = Path(directory) / shard.documents_file
    try:
        table = pq.read_table(path, schema=DOCUMENTS, memory_map=True, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read the documents {path}: {error}") from error
    starts, sizes = (table[name].to_numpy() for name in ("start", "num_tokens"))
    ends = np.cumsum(sizes)
    covered = int(ends[-1]) if len(ends) else 0
    if covered != shard.num_tokens or not np.array_equal(starts, ends - sizes):
        raise DataError(f"{path} does not cover the {shard.num_tokens:,} tokens of its shard")
    if len(starts) != shard.num_documents or int(np.sum(table["num_bytes"])) != shard.num_bytes:
        raise DataError(f"{path} has other documents or bytes than the manifest says")
    return table


def document_record(
    manifest: Manifest, shard: ShardRecord, table: pa.Table, number: int
) -> DocumentRecord:
    """Row `number` of `open_documents`."""
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    for name in ("sha256", "raw_sha256", "cluster"):
        row[name] = row[name].hex()
    row["steps"] = tuple(row["steps"])
    return DocumentRecord(split=shard.split, source=manifest.sources[shard.source].name, **row)
