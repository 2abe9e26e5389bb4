"""Third stage: a tokenizer, made from the training side or given, and the ids of every document.

tokenizer.json          as `open_tokenizer` reads it
tokenizer-made.json     written last: its kind, its eos, and from how much text it was made
chunk-00000.ids.npz     of each split: ids, lengths (with EOS)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.data.bpe import require_size, train_bpe, train_characters
from reference.data.clustering import Assignment
from reference.data.ids import id_dtype_name, write_ids
from reference.data.manifest import SPLITS, TOKENIZER, TRAIN
from reference.data.open_tokenizer import Tokenizer, open_tokenizer
from reference.data.reading import Read, chunk_file
from reference.data.text_files import place_of
from reference.data.tokenizer import ByteTokenizer
from reference.data.work import Workers, write_arrays, write_whole

BPE_BYTES = 64 * 2**20  # of text; the merges of a larger sample are hardly others
_MADE = "tokenizer-made.json"
_Task = tuple[int, npt.NDArray[np.int8]]


@dataclass(frozen=True)
class TokenizerChoice:
    """kind: "bytes", "characters", "bpe" with `size` tokens, or "file" with the tokenizer."""

    kind: str
    size: int = 0
    given: Tokenizer | None = None


def parse_tokenizer(text: str) -> TokenizerChoice:
    """`bytes`, `characters`, `bpe:N`, or a FILE (or its folder), FILE?eos=ID where nothing beside
    it names the token that ends a document.

    Raises ValueError for a BPE without a size or with too small a one, for another option, for an
    eos that is no number, and for a file that is no tokenizer.
    """
    if text in ("bytes", "characters"):
        return TokenizerChoice(text)
    kind, _, size = text.partition(":")
    if kind == "bpe":
        if not size.isdecimal():
            raise ValueError(f"tokenizer {text!r}: give the size of the vocabulary, as in bpe:8192")
        require_size(int(size))
        return TokenizerChoice("bpe", int(size))
    path, asked, option = text.partition("?")
    name, _, eos = option.partition("=")
    if asked and name != "eos":
        raise ValueError(f"tokenizer {text!r}: no option {name!r}; there is eos, as in FILE?eos=ID")
    if asked and not eos.isdecimal():
        raise ValueError(f"tokenizer {text!r}: eos {eos!r} is no whole number")
    return TokenizerChoice("file", given=open_tokenizer(path, int(eos) if asked else None))


def make_tokenizer(
    text: str, read: Read, assignment: Assignment
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and {kind, eos, num_texts, num_bytes: that it was made from}.

    Only documents of the training split are seen; of more than BPE_BYTES every k-th.
    """
    made, file = read.folder / _MADE, read.folder / TOKENIZER
    if not made.exists():
        choice = parse_tokenizer(text)
        is_bpe = choice.kind == "bpe"
        facts: dict[str, Any] = {"kind": choice.kind, "num_texts": 0, "num_bytes": 0}
        content, eos = ByteTokenizer.file_bytes, ByteTokenizer.eos
        if choice.given is not None:
            content, eos = choice.given.file_bytes, choice.given.eos
        elif choice.kind != "bytes":
            texts = _noted(_training_texts(read, assignment, is_bpe), facts)
            content = train_bpe(texts, choice.size) if is_bpe else train_characters(texts)
            eos = 0
        write_whole(file, [content])
        write_whole(made, [json.dumps({**facts, "eos": eos}).encode()])
    found: dict[str, Any] = json.loads(made.read_bytes())
    return _opened(read.folder, found["eos"]), found


def tokenize(
    read: Read,
    assignment: Assignment,
    tokenizer: Tokenizer,
    workers: Workers,
    progress: Callable[[int], None],
) -> None:
    """Writes the ids of every document that is in a split. progress(documents).

    Raises ValueError naming the document that the tokenizer cannot write.
    """
    starts = read.starts.tolist()
    tasks = (
        (chunk, assignment.place[starts[chunk] : starts[chunk + 1]])
        for chunk in range(len(read.sources))
    )
    job = partial(_tokenize_chunk, read, tokenizer.eos, tokenizer.vocabulary_size)
    for num_documents in workers.map(job, tasks):
        progress(num_documents)


@lru_cache(maxsize=1)  # a large vocabulary takes longer to open than a chunk to tokenize
def _opened(folder: Path, eos: int) -> Tokenizer:
    return open_tokenizer(folder / TOKENIZER, eos)


def _training_texts(read: Read, assignment: Assignment, sampled: bool) -> Iterator[bytes]:
    is_train = assignment.place == SPLITS.index(TRAIN)
    starts = read.starts.tolist()
    sizes = np.concatenate(
        [
            read.documents(chunk, ["num_bytes"])["num_bytes"].to_numpy()
            for chunk in range(len(read.sources))
        ]
    )
    step = -(-int(sizes[is_train].sum()) // BPE_BYTES) if sampled else 1
    chosen = np.zeros(len(is_train), bool)
    chosen[np.flatnonzero(is_train)[:: max(step, 1)]] = True
    for chunk in range(len(read.sources)):
        own = chosen[starts[chunk] : starts[chunk + 1]]
        if own.any():
            texts = read.texts(chunk)
            yield from (texts[i] for i in np.flatnonzero(own).tolist())


def _noted(texts: Iterator[bytes], facts: dict[str, Any]) -> Iterator[bytes]:
    for text in texts:
        facts["num_texts"] += 1
        facts["num_bytes"] += len(text)
        yield text


def _tokenize_chunk(read: Read, eos: int, vocabulary_size: int, task: _Task) -> int:
    chunk, places = task
    file = chunk_file(read.folder, chunk, "ids.npz")
    if file.exists():
        return len(places)
    tokenizer = _opened(read.folder, eos)
    texts = read.texts(chunk)
    dtype = np.dtype(id_dtype_name(vocabulary_size)).newbyteorder("<")
    arrays = {}
    for index, name in enumerate(SPLITS):
        own = np.flatnonzero(places == index).tolist()
        parts = [
            write_ids(tokens, vocabulary_size)
            for tokens in _encoded(tokenizer, [texts[i] for i in own], read, chunk, own)
        ]
        arrays[f"{name}_lengths"] = np.array([len(part) for part in parts], np.int64)
        arrays[f"{name}_lengths"] //= dtype.itemsize
        arrays[name] = np.frombuffer(b"".join(parts), dtype)
    write_arrays(file, **arrays)
    return len(places)


def _encoded(
    tokenizer: Tokenizer, texts: list[bytes], read: Read, chunk: int, rows: list[int]
) -> list[Any]:
    if not texts:
        return []
    try:
        return list(tokenizer.encode_documents(texts))
    except ValueError:
        for row, text in zip(rows, texts, strict=True):
            try:
                tokenizer.encode_document(text)
            except ValueError as error:
                found = read.documents(chunk, ["file", "row"]).slice(row, 1).to_pylist()[0]
                raise ValueError(f"{place_of(found['file'], found['row'])}: {error}") from error
        raise
