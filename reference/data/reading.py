"""First stage: sources become chunks of cleaned documents on disk, each document hashed.

chunk-00000.text       the documents that stay, end to end
chunk-00000.parquet    a row a document that was read (`READ`), the dropped ones too
read.json              written last: how many chunks, of which sources, how much was left out
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reference.data.clean import CleanSettings, clean
from reference.data.source_folders import counts_text
from reference.data.sources import Chunk, Source, chunks, read_chunk
from reference.data.text_files import kind_of, place_of
from reference.data.work import Workers, write_table, write_whole

# num_bytes, sha256: of the cleaned text, 0 and null of a dropped document; dropped: the reason.
# row: from 0, as in `shards.DOCUMENTS`.
READ = pa.schema(
    [
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(32)),
        pa.field("raw_bytes", pa.int64(), nullable=False),
        pa.field("raw_sha256", pa.binary(32), nullable=False),
        pa.field("slice", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("steps", pa.list_(pa.string()), nullable=False),
        pa.field("dropped", pa.string()),
    ]
)


@dataclass(frozen=True)
class Read:
    """What was read: chunk i is of source sources[i] and has num_documents[i], the dropped ones
    too. A document's number counts through all chunks. left_out: of each source, as in `Below`.
    """

    folder: Path
    sources: list[int]
    num_documents: list[int]
    left_out: list[dict[str, int]]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[chunks + 1]: the number of each chunk's first document, then of all."""
        return np.cumsum([0, *self.num_documents], dtype=np.int64)

    def documents(self, chunk: int, columns: list[str] | None = None) -> pa.Table:
        """The rows of a chunk: `READ`."""
        return pq.read_table(chunk_file(self.folder, chunk, "parquet"), columns=columns)

    def texts(self, chunk: int) -> list[bytes]:
        """The text of every document of a chunk; a dropped one's is empty."""
        data = chunk_file(self.folder, chunk, "text").read_bytes()
        ends = np.cumsum(self.documents(chunk, ["num_bytes"])["num_bytes"].to_numpy()).tolist()
        return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def text_reader(self) -> Callable[[int], bytes]:
        """text(document) of one document after the other, anywhere."""
        starts, ends = self.starts, dict[int, npt.NDArray[np.int64]]()

        def text(document: int) -> bytes:
            chunk = int(np.searchsorted(starts, document, side="right")) - 1
            if chunk not in ends:
                ends[chunk] = np.cumsum(
                    self.documents(chunk, ["num_bytes"])["num_bytes"].to_numpy()
                )
            row = document - int(starts[chunk])
            start = int(ends[chunk][row - 1]) if row else 0
            with chunk_file(self.folder, chunk, "text").open("rb") as file:
                file.seek(start)
                return file.read(int(ends[chunk][row]) - start)

        return text


def chunk_file(folder: Path, chunk: int, ending: str) -> Path:
    """chunk-00000.ENDING."""
    return folder / f"chunk-{chunk:05d}.{ending}"


def read_sources(
    folder: Path,
    sources: list[Source],
    settings: CleanSettings,
    seed: int,
    workers: Workers,
    progress: Callable[[int], None],
) -> Read:
    """Reads what is not there yet. progress(bytes) is called after each chunk.

    Raises ValueError as the readers do, and for a source of which no document stays.
    """
    done = folder / "read.json"
    if not done.exists():
        of_chunk: list[int] = []

        def noted() -> Iterable[Chunk]:
            for chunk in chunks(sources, settings.max_document_bytes, seed):
                of_chunk.append(chunk.source)
                yield chunk

        fields = [source.fields for source in sources]
        job = partial(_read_chunk, folder, fields, settings)
        counts = []
        for count, num_bytes in workers.map(job, noted()):
            counts.append(count)
            progress(num_bytes)
        content = {
            "sources": of_chunk,
            "num_documents": counts,
            "left_out": [source.below().left_out for source in sources],
        }
        write_whole(done, [json.dumps(content).encode()])
    read = Read(folder, **json.loads(done.read_bytes()))
    _refuse_empty(read, sources)
    return read


def reading_results(read: Read, sources: list[Source]) -> dict[str, Any]:
    """What the manifest says of the reading, by the sources' names where there is something.

    left_out: {reason: files and folders}; cut_files: num_files that were too long to be one
    document, num_documents that they were cut into.
    """
    files: list[set[str]] = [set() for _ in sources]
    num_parts = [0] * len(sources)
    for chunk, owner in enumerate(read.sources):
        if sources[owner].kind != "files":
            continue
        table = read.documents(chunk, ["file", "row"])
        for name in table.filter(pc.greater_equal(table["row"], 0))["file"].to_pylist():
            if kind_of(Path(name)) == "text":
                files[owner].add(name)
                num_parts[owner] += 1
    return {
        "left_out": {s.name: own for s, own in zip(sources, read.left_out, strict=True) if own},
        "cut_files": {
            source.name: {"num_files": len(own), "num_documents": num}
            for source, own, num in zip(sources, files, num_parts, strict=True)
            if num
        },
    }


def _refuse_empty(read: Read, sources: list[Source]) -> None:
    num_kept = [0] * len(sources)
    dropped: list[Counter[str]] = [Counter() for _ in sources]
    for chunk, owner in enumerate(read.sources):
        reasons = read.documents(chunk, ["dropped"])["dropped"].to_pylist()
        dropped[owner].update(reason for reason in reasons if reason is not None)
        num_kept[owner] += reasons.count(None)
    for source, number, why in zip(sources, num_kept, dropped, strict=True):
        if not number:
            said = f"dropped: {counts_text(why)}" if why else "it has none"
            raise ValueError(
                f"source {source.name} is empty: no document of {source.origin} stays; {said}"
            )


def _read_chunk(
    folder: Path, fields: list[Any], settings: CleanSettings, chunk: Chunk
) -> tuple[int, int]:
    """(documents, bytes of their text) of the chunk, which is written if it is not there."""
    index = chunk_file(folder, chunk.number, "parquet")
    if index.exists():
        table = pq.read_table(index, columns=["num_bytes"])
        return table.num_rows, int(table["num_bytes"].to_numpy().sum())
    rows, texts = [], []
    own = fields[chunk.source]
    for document in read_chunk(chunk, own, settings.max_document_bytes):
        try:
            cleaned = clean(document.data, settings)
        except ValueError as error:
            raise ValueError(f"{place_of(document.file, document.row)}: {error}") from error
        raw = hashlib.sha256(document.data).digest()
        stays = cleaned.dropped is None
        same = cleaned.text is document.data
        rows.append(
            {
                "num_bytes": len(cleaned.text),
                "sha256": (raw if same else hashlib.sha256(cleaned.text).digest())
                if stays
                else None,
                "raw_bytes": len(document.data),
                "raw_sha256": raw,
                "slice": document.slice,
                "file": document.file,
                "row": document.row,
                "steps": list(cleaned.steps),
                "dropped": cleaned.dropped,
            }
        )
        texts.append(cleaned.text)
    text = b"".join(texts)
    write_whole(chunk_file(folder, chunk.number, "text"), [text])
    write_table(index, pa.Table.from_pylist(rows, schema=READ))
    return len(rows), len(text)
