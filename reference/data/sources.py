"""SOURCE as it is given on the command line, and the documents that it names, a chunk at a time.

    PATH                     a file, or a folder of files (text_files.py says which)
    datasets:NAME_OR_PATH    what `datasets` streams
    language, python-docs, python-library    text that is here already (corpus.py)

Options follow a question mark: `PATH?weight=2&licence=MIT&only=py,rst`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from reference.data.corpus import (
    CorpusDocument,
    language_documents,
    library_sources,
    python_topics,
)
from reference.data.source_folders import Below, files_below, is_utf8
from reference.data.text_files import (
    WHOLE_FILE,
    Fields,
    RawDocument,
    documents_in,
    is_long,
    kind_of,
    row_document,
)

CORPORA = ("language", "python-docs", "python-library")
LANGUAGE_DOCUMENTS = 8_000
CHUNK_BYTES, CHUNK_DOCUMENTS = 4 * 2**20, 4096
_OF_DATASETS = ("config", "split", "revision", "data_files")
_OF_ROWS = ("field", "slice")
_OF_ALL = ("name", "weight", "licence")
_OPTIONS = {
    "files": (*_OF_ALL, *_OF_ROWS, "only"),
    "datasets": (*_OF_ALL, *_OF_ROWS, *_OF_DATASETS),
    "corpus": _OF_ALL,
}
_TAKEN_BY = {
    **dict.fromkeys(_OF_DATASETS, "datasets:NAME_OR_PATH"),
    **dict.fromkeys(_OF_ROWS, "files of rows (.jsonl, .json, .ndjson, .parquet, .arrow) and "
                    "datasets:NAME_OR_PATH"),
    "only": "folders of files",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """kind: "files", "datasets" or "corpus"; place: path, name of a data set or of a corpus;
    origin: the SOURCE as it was given; options: what goes to load_dataset; only: the endings of the
    files that are read, all known ones if there is none; row_options: those of `field` and `slice`
    that were given.
    """

    name: str
    kind: str
    place: str
    origin: str
    fields: Fields
    licence: str | None
    weight: float | None
    options: dict[str, str]
    only: tuple[str, ...] = ()
    row_options: tuple[str, ...] = ()

    def below(self) -> Below:
        """The files of a local source, and what is left out; none of others.

        Raises ValueError as `files_below` does, and for an option that says nothing of these files.
        """
        if self.kind != "files":
            return Below([])
        root = Path(self.place)
        found = files_below(root, self.only)
        if self.only and root.is_file():
            raise ValueError(f"{self.origin} is one file: {_taken(['only'])}")
        if self.row_options and all(kind_of(path) == "text" for path in found.files):
            raise ValueError(f"{self.origin} is text without rows: {_taken(self.row_options)}")
        return found


@dataclass(frozen=True)
class Chunk:
    """Some documents of one source: as files that are still to be read, or in memory.

    paths: (file, its path below the source).
    """

    number: int
    source: int
    paths: tuple[tuple[str, str], ...] = ()
    documents: tuple[RawDocument, ...] = ()


def parse_sources(texts: list[str]) -> list[Source]:
    """Each SOURCE, in order. Raises ValueError for an option that is unknown or that such a source
    does not take, no name behind `datasets:`, a name that is no UTF-8, a weight that is no number
    above 0, a weight that only some sources have, no SOURCE, and two of one name.
    """
    sources = [_parsed(text) for text in texts]
    if not sources:
        raise ValueError("name at least one SOURCE")
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError("give a weight to every source, or to none")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two sources are called {name!r}; give one SOURCE?name=ANOTHER")
    return sources


def _parsed(text: str) -> Source:
    place, _, query = text.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError(f"{text}: give every option once")
    is_dataset = place.startswith("datasets:")
    kind = "datasets" if is_dataset else "corpus" if place in CORPORA else "files"
    known = _OPTIONS[kind]
    if unknown := sorted(options.keys() - set(known)):
        taken = _taken([name for name in unknown if name in _TAKEN_BY])
        raise ValueError(
            f"{text}: no option {', '.join(unknown)}; there are {', '.join(known)}"
            f"{'; ' if taken else ''}{taken}"
        )
    place = place.removeprefix("datasets:")
    if not place:
        raise ValueError(f"{text!r} names nothing; write PATH or datasets:NAME_OR_PATH")
    if not is_utf8(text):
        raise ValueError(f"{text!a}: its name is no UTF-8; rename it")
    if kind == "files":
        place = str(Path(place))
    return Source(
        name=options.get("name") or Path(place).name or place,
        kind=kind,
        place=place,
        origin=text,
        fields=Fields(options.get("field", "text"), options.get("slice")),
        licence=options.get("licence"),
        weight=_weight(options.get("weight"), text),
        options={name: options[name] for name in _OF_DATASETS if name in options},
        only=tuple(options["only"].split(",")) if "only" in options else (),
        row_options=tuple(name for name in _OF_ROWS if name in options),
    )


def _taken(names: Iterable[str]) -> str:
    """Which sources take options."""
    return "; ".join(f"{name} is for {_TAKEN_BY[name]}" for name in names)


def _weight(text: str | None, origin: str) -> float | None:
    if text is None:
        return None
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"{origin}: weight {text!r} must be a number above 0")
    return weight


def chunks(sources: list[Source], max_document_bytes: int, seed: int) -> Iterator[Chunk]:
    """Every document once, in a fixed order: source by source, file by file, row by row.

    A chunk has CHUNK_BYTES or little more of one source. Files of text, but long ones, are left to
    whoever gets the chunk; everything else is read here. Raises ValueError as the readers do.
    """
    number = 0
    for index, source in enumerate(sources):
        for paths, documents in _chunks_of(source, max_document_bytes, seed):
            yield Chunk(number, index, paths, documents)
            number += 1


def read_chunk(chunk: Chunk, fields: Fields, max_document_bytes: int) -> Iterator[RawDocument]:
    """The documents of a chunk."""
    yield from chunk.documents
    for path, name in chunk.paths:
        yield from documents_in(Path(path), name, fields, max_document_bytes)


_Content = tuple[tuple[tuple[str, str], ...], tuple[RawDocument, ...]]


def _chunks_of(source: Source, max_document_bytes: int, seed: int) -> Iterator[_Content]:
    if source.kind != "files":
        documents = _dataset(source) if source.kind == "datasets" else _corpus(source.place, seed)
        yield from _in_memory(documents)
        return
    root = Path(source.place)
    waiting: list[tuple[str, str]] = []
    size = 0
    for path in source.below().files:
        name = path.name if path == root else path.relative_to(root).as_posix()
        if kind_of(path) != "text" or is_long(path, max_document_bytes):
            if waiting:
                yield tuple(waiting), ()
                waiting, size = [], 0
            yield from _in_memory(documents_in(path, name, source.fields, max_document_bytes))
            continue
        waiting.append((str(path), name))
        size += path.stat().st_size
        if size >= CHUNK_BYTES or len(waiting) >= CHUNK_DOCUMENTS:
            yield tuple(waiting), ()
            waiting, size = [], 0
    if waiting:
        yield tuple(waiting), ()


def _in_memory(documents: Iterator[RawDocument]) -> Iterator[_Content]:
    waiting: list[RawDocument] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document.data)
        if size >= CHUNK_BYTES or len(waiting) >= CHUNK_DOCUMENTS:
            yield (), tuple(waiting)
            waiting, size = [], 0
    if waiting:
        yield (), tuple(waiting)


def _corpus(name: str, seed: int) -> Iterator[RawDocument]:
    if name == "language":
        for number, drawn in enumerate(
            language_documents("hard", "train", LANGUAGE_DOCUMENTS, seed)
        ):
            yield RawDocument(name, number, name, drawn.text)
        return
    found: Iterator[CorpusDocument] = (
        python_topics() if name == "python-docs" else library_sources()
    )
    for document in found:
        yield RawDocument(document.name, WHOLE_FILE, name, document.data)


def _dataset(source: Source) -> Iterator[RawDocument]:
    """The rows of a data set, streamed; files are numbered as it hands them out."""
    import datasets

    with _named(source):
        options = {**_asked(source), "split": source.options.get("split", "train")}
        stream = datasets.load_dataset(source.place, **options, streaming=True)
        rows = iter(enumerate(stream, 1))
    is_json = stream.info.builder_name == "json"
    while True:
        with _named(source):
            number, row = next(rows, (0, None))
        if row is None:
            return
        where = f"{source.origin} row {number}"
        if is_json and row.get(source.fields.text, "") is None:  # it fills in what a line lacks
            raise ValueError(f"{where} has no field {source.fields.text!r}, or null in it")
        yield row_document(row, source.place, number - 1, source.fields, where)


def _asked(source: Source) -> dict[str, Any]:
    """What `datasets` is told of a data set, apart from the split."""
    options = {name: source.options.get(name) for name in ("revision", "data_files")}
    return {"name": source.options.get("config"), **options}


@contextmanager
def _named(source: Source) -> Iterator[None]:
    """An error of the library becomes a ValueError that names the source."""
    try:
        yield
    except Exception as error:  # the library, and what it reads through, raise of many kinds
        said = " ".join(str(error).split())
        raise ValueError(
            f"datasets cannot stream {source.origin}: {type(error).__name__}: {said}"
        ) from error


def fingerprint(source: Source) -> str:
    """SHA-256 of what can be known of a source without reading it: of files names, sizes and times
    of change; of a data set its files, with the time or the commit that `datasets` has of each; of
    a corpus the running Python. A preparation that was killed goes on only if it is the same.

    Raises ValueError for files, or a data set, that are not there.
    """
    hashed = hashlib.sha256(repr(source).encode())
    for path in source.below().files:
        found = path.stat()
        hashed.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    if source.kind == "corpus":
        hashed.update(sys.version.encode())
    if source.kind == "datasets":
        hashed.update(_state_of_dataset(source).encode())
    return hashed.hexdigest()


def _state_of_dataset(source: Source) -> str:
    import datasets

    with _named(source):
        builder = datasets.load_dataset_builder(source.place, **_asked(source))
    files = builder.config.data_files or {}
    states = [(str(split), list(own), own.origin_metadata) for split, own in sorted(files.items())]
    return f"{builder.hash} {states}"
