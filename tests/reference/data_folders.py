"""Prepared folders for tests, written by hand: each source in shards of its own."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from reference.checkpoint.files import FileRecord
from reference.data.ids import id_dtype_name, write_ids
from reference.data.manifest import (
    COMPLETE,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    manifest_bytes,
    read_manifest,
)
from reference.data.shards import DOCUMENTS
from reference.data.tokenizer import ByteTokenizer


def write_folder(directory, texts, policy, tokenizer=None, **fields):
    """A folder whose splits have, for each source, shards of texts: {split: [[[text]]]}."""
    tokenizer = tokenizer or ByteTokenizer()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TOKENIZER).write_bytes(tokenizer.file_bytes)
    shards = []
    for split in (TRAIN, VALIDATION):
        (directory / split).mkdir(exist_ok=True)
        for source, parts in enumerate(texts[split]):
            for part in parts:
                shards.append(_write(directory, split, len(shards), source, part, tokenizer))
    num_sources = max(map(len, texts.values()))
    manifest = Manifest(
        sources=[
            SourceRecord(f"source {i}", "files", "here", "0" * 64, None, None, 1, 1, 1, {})
            for i in range(num_sources)
        ],
        tokenizer=TokenizerRecord(
            "bytes",
            tokenizer.sha256,
            tokenizer.vocabulary_size,
            tokenizer.eos,
            id_dtype_name(tokenizer.vocabulary_size),
        ),
        policy=policy.to_json(),
        seed=0,
        steps=[],
        shards=shards,
        slices=[],
        contamination={"status": COMPLETE, "num_shared_documents": 0},
        files={
            file.relative_to(directory).as_posix(): _record(file)
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        },
    )
    manifest = Manifest(**{**vars(manifest), **fields})
    (directory / MANIFEST).write_bytes(manifest_bytes(manifest))
    return read_manifest(directory)


def _write(directory, split, number, source, texts, tokenizer):
    tokens = tokenizer.encode_documents(texts)
    lengths = list(map(len, tokens))
    sha256 = [hashlib.sha256(text).digest() for text in texts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    table = pa.table(
        {
            "start": starts,
            "num_tokens": lengths,
            "num_bytes": list(map(len, texts)),
            "sha256": sha256,
            "raw_sha256": sha256,
            "cluster": sha256,
            "cluster_size": [1] * len(texts),
            "slice": ["all"] * len(texts),
            "file": [f"file {number}"] * len(texts),
            "row": list(range(len(texts))),
            "steps": [[]] * len(texts),
        },
        schema=DOCUMENTS,
    )
    shard = ShardRecord(split, number, source, len(texts), sum(lengths), sum(map(len, texts)))
    pq.write_table(table, directory / shard.documents_file)
    ids = write_ids(torch.cat(tokens), tokenizer.vocabulary_size)
    (directory / shard.tokens_file).write_bytes(ids)
    return shard


def _record(file):
    data = file.read_bytes()
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())
