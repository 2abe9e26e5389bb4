"""Texts whose duplicates are planted, and folders of shards read without the reference."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reference.data.shards import DOCUMENTS

SHINGLE_WORDS = 5


def words(rng: random.Random, num_words: int) -> list[str]:
    """Words of which no two texts share a run of five by accident: 26^6 are drawn from."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=6)) for _ in range(num_words)]


def changed_end(text: list[str], rng: random.Random, similarity: float) -> list[str]:
    """The text with so many words at its end replaced that the runs of five have this Jaccard
    similarity, or a little more: s runs shared of n each give s / (2 n - s).
    """
    num_runs = len(text) - SHINGLE_WORDS + 1
    shared = -int(-2 * num_runs * similarity // (1 + similarity))
    kept = shared + SHINGLE_WORDS - 1
    return [*text[:kept], *words(rng, len(text) - kept)]


def joined(text: list[str]) -> bytes:
    """The words with one space between."""
    return " ".join(text).encode()


def jaccard(left: bytes, right: bytes) -> float:
    """Of the sets of runs of five words, by Python's own sets."""
    runs = [
        {tuple(text[i : i + SHINGLE_WORDS]) for i in range(max(len(text) - SHINGLE_WORDS + 1, 1))}
        for text in (left.lower().split(), right.lower().split())
    ]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


@dataclass
class Written:
    """One document as it lies in a shard: its row of the table, and its ids."""

    split: str
    source: int
    row: dict
    ids: list[int]

    @property
    def text(self) -> bytes:
        """Of byte tokens: the bytes before EOS."""
        return bytes(self.ids[:-1])


def read_folder(directory: Path) -> list[Written]:
    """Every document that is written, in order, as the format of the manifest says."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    dtype = np.dtype(manifest["tokenizer"]["id_dtype"]).newbyteorder("<")
    documents = []
    for shard in manifest["shards"]:
        name = f"{shard['split']}/{{}}-{shard['number']:05d}.{{}}"
        ids = np.fromfile(directory / name.format("shard", "bin"), dtype).tolist()
        for row in pq.read_table(directory / name.format("documents", "parquet")).to_pylist():
            own = ids[row["start"] : row["start"] + row["num_tokens"]]
            documents.append(Written(shard["split"], shard["source"], row, own))
    return documents


def write_folder(directory: Path, documents: list[Written], **changed) -> None:
    """Writes these documents in place of those that are there, a shard for each run of one split
    and source, with a manifest whose sizes and hashes are right. changed: its other fields.
    """
    manifest = json.loads((directory / "manifest.json").read_bytes())
    dtype = np.dtype(manifest["tokenizer"]["id_dtype"]).newbyteorder("<")
    for name in list(manifest["files"]):
        if name != "tokenizer.json":
            (directory / name).unlink()
            del manifest["files"][name]
    manifest["shards"], numbers = [], {}
    while documents:
        split, source = documents[0].split, documents[0].source
        own = [d for d in documents if (d.split, d.source) == (split, source)]
        documents = [d for d in documents if (d.split, d.source) != (split, source)]
        number = numbers[split] = numbers.get(split, -1) + 1
        start = 0
        for document in own:
            document.row["start"], document.row["num_tokens"] = start, len(document.ids)
            start += len(document.ids)
        table = pa.Table.from_pylist([document.row for document in own], schema=DOCUMENTS)
        content = {
            f"{split}/shard-{number:05d}.bin": np.array(
                [i for d in own for i in d.ids], dtype
            ).tobytes(),
            f"{split}/documents-{number:05d}.parquet": _parquet(table),
        }
        for name, data in content.items():
            (directory / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            manifest["files"][name] = {"num_bytes": len(data), "sha256": digest}
        manifest["shards"].append(
            {
                "split": split,
                "number": number,
                "source": source,
                "num_documents": len(own),
                "num_tokens": start,
                "num_bytes": sum(d.row["num_bytes"] for d in own),
            }
        )
    write_manifest(directory, {**manifest, **changed})


def write_manifest(directory: Path, manifest: dict) -> None:
    """manifest.json with its own hash put right."""
    content = {k: v for k, v in manifest.items() if k not in ("format", "version", "sha256")}
    digest = hashlib.sha256(_spelled(content)).hexdigest()
    head = {"format": manifest["format"], "version": manifest["version"], "sha256": digest}
    (directory / "manifest.json").write_bytes(_spelled({**head, **content}))


def _spelled(content: dict) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()
