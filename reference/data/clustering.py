"""Second stage: which documents are duplicates, which stay, and in which split.

chunk-00000.signatures.npz    of documents that are no exact duplicates: rows [n, bands * rows] of
                              MinHash numbers, has_words [n]
assignment.npz                written last: see `Assignment`
duplicates.json               what was found
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from reference.data.clean import EXACT, NEAR
from reference.data.duplicate_sample import sampled_errors
from reference.data.manifest import SPLITS
from reference.data.near_duplicates import (
    DuplicateSettings,
    Signatures,
    Verified,
    band_keys,
    clusters_of,
    first_of_equal,
    leaders,
    signatures,
    similarity,
)
from reference.data.reading import Read, chunk_file
from reference.data.shingles import Places
from reference.data.split import split
from reference.data.work import Workers, write_arrays, write_whole

DROPPED, EXACT_COPY, NEAR_COPY = -1, -2, -3  # else the index into SPLITS
MOST_TRIED = 100_000  # clusters times seeds, in search of a seed that works
REASON = {EXACT_COPY: EXACT, NEAR_COPY: NEAR}


@dataclass(frozen=True)
class Assignment:
    """Of every document that was read: place [N] int8, a split's index or why it is in none;
    cluster [N, 32] uint8, the smallest SHA-256 among its near duplicates; cluster_size [N] int32.
    """

    place: npt.NDArray[np.int8]
    cluster: npt.NDArray[np.uint8]
    cluster_size: npt.NDArray[np.int32]
    results: dict[str, Any]


def assign(
    read: Read,
    settings: DuplicateSettings,
    fraction: float,
    seed: int,
    workers: Workers,
    progress: Callable[[int], None],
) -> Assignment:
    """Exact duplicates over all sources, then clusters, then the split by cluster.

    Memory: some 150 bytes a document; signatures stay on disk. progress(documents).
    Raises ValueError if a split would be empty.
    """
    file, results_file = read.folder / "assignment.npz", read.folder / "duplicates.json"
    if not file.exists():
        hashes, stays = _hashes(read)
        where = np.flatnonzero(stays)
        first = where[first_of_equal(hashes[where])]
        unique = where[first == where]
        tasks = ((chunk, _own(read, unique, chunk)) for chunk in range(len(read.sources)))
        for num_documents in workers.map(partial(_sign, read, settings), tasks):
            progress(num_documents)
        near, leader, found = _clustered(read, unique, settings)
        root = np.full(len(stays), -1, np.int64)
        root[unique] = unique[near]
        root[where] = root[first]
        kept = unique
        if settings.keep == "one":
            kept = unique[leader == np.arange(len(leader))]
        arrays = _placed(hashes, stays, unique, kept, root, fraction, seed)
        num_exact = {"num_documents": len(where), "num_exact_duplicates": len(where) - len(unique)}
        write_whole(results_file, [json.dumps({**num_exact, **found}).encode()])
        write_arrays(file, **arrays)
    with np.load(file) as arrays_there:
        content = {name: arrays_there[name] for name in arrays_there.files}
    assignment = Assignment(**content, results=json.loads(results_file.read_bytes()))
    for index, name in enumerate(SPLITS):
        if not (assignment.place == index).any():
            raise ValueError(
                f"no document is left for {name}: {results_text(assignment)}; give more "
                f"documents (a text file is one, a line of .jsonl is one)"
                f"{_what_works(assignment, fraction, seed)}"
            )
    return assignment


def _what_works(assignment: Assignment, fraction: float, seed: int) -> str:
    """Settings with which no split of these documents is empty: the smallest fraction of two digits
    that does it with this seed, the first seed that does it with this fraction.
    """
    kept = np.unique(assignment.cluster[assignment.place >= 0], axis=0)
    clusters = [row.tobytes() for row in kept]
    if len(clusters) < 2:
        return ": those there are make one cluster, which is not divided"

    def is_divided(fraction: float, seed: int) -> bool:
        return len(set(split(clusters, fraction, seed))) > 1

    seeds = range(MOST_TRIED // len(clusters) + 1)
    found = {
        "--validation-fraction": next((n / 100 for n in range(1, 100) if is_divided(n / 100, seed)),
                                      None),
        "--seed": next((other for other in seeds if is_divided(fraction, other)), None),
    }  # fmt: skip
    works = [f"{option} {value}" for option, value in found.items() if value is not None]
    return f", or {' or '.join(works)}, which works for these" if works else ""


def _clustered(
    read: Read, unique: Places, settings: DuplicateSettings
) -> tuple[Places, Places, dict[str, int | float]]:
    """(`clusters_of`, `leaders`) of the documents that are no exact duplicates, and counts."""
    store = _Store(read, len(unique), settings)
    reader = read.text_reader()

    def text_of(number: int) -> bytes:
        return reader(int(unique[number]))

    are_similar = Verified(store.estimate, text_of, settings)
    near = clusters_of(store.keys(), are_similar, store.has_words())
    leader = leaders(near, are_similar)
    errors = sampled_errors(leader, store.blocks, text_of, settings)
    return near, leader, {
        "num_clusters_of_several": int((np.bincount(near) > 1).sum()),
        "num_near_duplicates": int((leader != np.arange(len(leader))).sum()),
        **{f"sampled_{name}": value for name, value in asdict(errors).items()},
    }  # fmt: skip


def results_text(assignment: Assignment) -> str:
    """Counts in words."""
    found = assignment.results
    return (
        f"{found['num_documents']:,} documents, {found['num_exact_duplicates']:,} exact and "
        f"{found['num_near_duplicates']:,} near duplicates"
    )


def _hashes(read: Read) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """[N, 32] SHA-256, and whether the document stays after cleaning."""
    hashes = np.zeros((int(read.starts[-1]), 32), np.uint8)
    stays = np.zeros(len(hashes), bool)
    for chunk, start in enumerate(read.starts[:-1].tolist()):
        column = read.documents(chunk, ["sha256"])["sha256"]
        own = ~column.is_null().to_numpy()
        stays[start : start + len(own)] = own
        joined = b"".join(column.drop_null().to_pylist())
        hashes[start + np.flatnonzero(own)] = np.frombuffer(joined, np.uint8).reshape(-1, 32)
    return hashes, stays


def _own(read: Read, unique: Places, chunk: int) -> Places:
    """Which rows of the chunk are among `unique`."""
    start, stop = np.searchsorted(unique, read.starts[chunk : chunk + 2])
    return cast(Places, unique[start:stop] - read.starts[chunk])


def _sign(read: Read, settings: DuplicateSettings, task: tuple[int, Places]) -> int:
    """The number of documents of (chunk, its rows) whose signatures are there now."""
    chunk, own = task
    file = chunk_file(read.folder, chunk, "signatures.npz")
    if not file.exists():
        texts = read.texts(chunk)
        rows, has_words = signatures([texts[i] for i in own], settings)
        write_arrays(file, rows=rows, has_words=has_words)
    return len(own)


class _Store:
    """The signatures of all chunks in one file, and the keys of each band end to end in another."""

    def __init__(self, read: Read, num_documents: int, settings: DuplicateSettings) -> None:
        self._read, self._settings, self._num = read, settings, num_documents
        self._rows_file = read.folder / "signatures.bin"
        self._keys_file = read.folder / "keys.bin"
        with self._rows_file.open("wb") as rows_file, self._keys_file.open("wb") as keys_file:
            for start, block, _ in self._chunks():
                rows_file.write(block.tobytes())
                for band in range(settings.bands):
                    keys_file.seek((band * num_documents + start) * 8)
                    keys_file.write(band_keys(block, band, settings.rows).tobytes())
        shape = (num_documents, settings.num_permutations)
        self._rows = np.memmap(self._rows_file, np.uint32, mode="r", shape=shape)

    def keys(self) -> Iterator[npt.NDArray[np.uint64]]:
        with self._keys_file.open("rb") as file:
            for _ in range(self._settings.bands):
                yield np.fromfile(file, np.uint64, self._num)

    def estimate(self, left: Places, right: Places) -> npt.NDArray[np.float64]:
        parts = [np.zeros(0)]
        for start in range(0, len(left), 2**14):
            piece = slice(start, start + 2**14)
            parts.append(similarity(self._rows[left[piece]], self._rows[right[piece]]))
        return np.concatenate(parts)

    def has_words(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([has_words for _, _, has_words in self._chunks()])

    def blocks(self) -> Iterator[tuple[int, Signatures]]:
        return ((start, rows) for start, rows, _ in self._chunks())

    def _chunks(self) -> Iterator[tuple[int, Signatures, npt.NDArray[np.bool_]]]:
        start = 0
        for chunk in range(len(self._read.sources)):
            with np.load(chunk_file(self._read.folder, chunk, "signatures.npz")) as arrays:
                rows, has_words = arrays["rows"], arrays["has_words"]
            yield start, rows, has_words
            start += len(rows)


def _placed(
    hashes: npt.NDArray[np.uint8],
    stays: npt.NDArray[np.bool_],
    unique: Places,
    kept: Places,
    root: Places,
    fraction: float,
    seed: int,
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the `Assignment`."""
    order = unique[np.argsort(np.ascontiguousarray(hashes[unique]).view("V32").reshape(-1))]
    smallest = np.full(len(stays), -1, np.int64)
    smallest[root[order[::-1]]] = order[::-1]  # the last one written is the smallest hash
    cluster = np.zeros_like(hashes)
    where = np.flatnonzero(stays)
    cluster[where] = hashes[smallest[root[where]]]
    sizes = np.bincount(root[where], minlength=len(stays))
    size = np.zeros(len(stays), np.int32)
    size[where] = sizes[root[where]]
    place = np.full(len(stays), DROPPED, np.int8)
    place[where] = EXACT_COPY
    place[unique] = NEAR_COPY
    for start in range(0, len(kept), 2**16):
        piece = kept[start : start + 2**16]
        names = split([row.tobytes() for row in cluster[piece]], fraction, seed)
        place[piece] = [SPLITS.index(name) for name in names]
    return {"place": place, "cluster": cluster, "cluster_size": size}
