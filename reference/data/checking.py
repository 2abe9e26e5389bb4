"""Fifth stage: the written shards are read back, decoded, and evaluation is compared with training.

piece-00000.runs.npy    the distinct runs of words of a piece of the validation shards, sorted
runs.u64                those of all pieces, sorted
hit.npy                 [runs] whether each stands in a training shard
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reference.data.contamination import ContaminationSettings, RunIndex, overlaps
from reference.data.manifest import COMPLETE, TOKENIZER, TRAIN, UNFINISHED, VALIDATION, ShardRecord
from reference.data.open_tokenizer import Tokenizer, open_tokenizer
from reference.data.shards import open_documents
from reference.data.shingles import Hashes, shingles
from reference.data.work import Workers, write_array, write_whole

PIECE_TOKENS = 2**21
NUM_WORST = 10
RUNS, HIT = "runs.u64", "hit.npy"
NUM_RANGES = 64  # of hashes: what is in memory of all pieces' runs is one of them
Changed = Counter[tuple[str, int, str]]  # (split, source, slice): documents


@dataclass(frozen=True)
class _Piece:
    """Documents first to stop of one shard."""

    shard: ShardRecord
    first: int
    stop: int


@dataclass(frozen=True)
class _Shards:
    """Shards as they lie in a folder, and what decodes them."""

    folder: Path
    eos: int
    id_dtype: str

    def texts(self, piece: _Piece) -> tuple[list[bytes], Changed]:
        """The decoded documents, and of which slices some are not what was tokenized."""
        table = open_documents(self.folder, piece.shard).slice(
            piece.first, piece.stop - piece.first
        )
        starts = table["start"].to_numpy()
        ends = starts + table["num_tokens"].to_numpy()
        dtype = np.dtype(self.id_dtype).newbyteorder("<")
        with (self.folder / piece.shard.tokens_file).open("rb") as file:
            file.seek(int(starts[0]) * dtype.itemsize)
            ids = np.fromfile(file, dtype, int(ends[-1] - starts[0])).astype(np.int64)
        tokenizer = _tokenizer(self.folder, self.eos)
        texts = [
            tokenizer.decode(torch.from_numpy(ids[start:end]))
            for start, end in zip(starts - starts[0], ends - starts[0], strict=True)
        ]
        stated = table["sha256"].to_pylist()
        slices = table["slice"].to_pylist()
        changed = Counter(
            (piece.shard.split, piece.shard.source, name)
            for text, sha256, name in zip(texts, stated, slices, strict=True)
            if hashlib.sha256(text).digest() != sha256
        )
        return texts, changed


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, eos: int) -> Tokenizer:
    return open_tokenizer(folder / TOKENIZER, eos)


@lru_cache(maxsize=1)
def _index(file: Path) -> RunIndex:
    return RunIndex(_all_runs(file))


def _all_runs(file: Path) -> Hashes:
    size = file.stat().st_size  # nothing cannot be mapped
    return np.memmap(file, np.uint64, "r") if size else np.zeros(0, np.uint64)


def check_shards(
    work: Path,
    folder: Path,
    shards: list[ShardRecord],
    tokenizer: Tokenizer,
    id_dtype: str,
    settings: ContaminationSettings,
    workers: Workers,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """The "contamination" of the manifest of `folder`, over the shards that are written in it. It
    is made again whenever they are written again.

    num_shared_documents: of validation, whose decoded bytes are a training document's;
    num_decoded_differently: documents whose decoded bytes are not those that were tokenized, in
    decoded_differently by split, source and slice;
    num_overlapping_documents: of validation, whose overlap is at least the threshold;
    overlaps: [10] documents whose overlap is in 0 to 0.1, …, 0.9 to 1;
    worst: the highest overlaps, {overlap, source: index into `Manifest.sources`, file, row}, the
    last two as in the tables, where rows count from 0.
    progress(tokens).
    """
    written = _Shards(folder, tokenizer.eos, id_dtype)
    train, validation = (list(_pieces(folder, shards, split)) for split in (TRAIN, VALIDATION))
    names, changed = _read_evaluation(work, written, validation, settings, workers, progress)
    hit = np.zeros(len(_all_runs(work / RUNS)), bool)
    shared: set[bytes] = set()
    job = partial(_search, written, work / RUNS, frozenset(names), settings)
    for piece, found in zip(train, workers.map(job, train), strict=True):
        own_names, own_hits, own_changed = found
        shared |= own_names
        hit[own_hits] = True
        changed += own_changed
        progress(_num_tokens(piece))
    write_array(work / HIT, hit)
    return {
        "status": COMPLETE,
        **asdict(settings),
        "num_train_documents": _num_documents(train),
        "num_validation_documents": _num_documents(validation),
        "num_shared_documents": sum(names[name] for name in shared),
        "num_decoded_differently": changed.total(),
        "decoded_differently": [
            {"split": split, "source": source, "slice": name, "num_documents": number}
            for (split, source, name), number in sorted(changed.items())
        ],
        "num_ngrams": len(hit),
        "num_shared_ngrams": int(hit.sum()),
        **_overlaps(work, written, validation, settings, workers),
    }


def unchecked() -> dict[str, Any]:
    """The "contamination" of a folder whose check was left out."""
    return {"status": UNFINISHED}


def _pieces(folder: Path, shards: list[ShardRecord], split: str) -> Iterator[_Piece]:
    for shard in shards:
        if shard.split != split:
            continue
        ends = np.cumsum(open_documents(folder, shard)["num_tokens"].to_numpy())
        first = 0
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, done + PIECE_TOKENS)) + 1
            yield _Piece(shard, first, min(stop, len(ends)))
            first = stop


def _num_documents(pieces: list[_Piece]) -> int:
    return sum(piece.stop - piece.first for piece in pieces)


def _num_tokens(piece: _Piece) -> int:
    share = (piece.stop - piece.first) / piece.shard.num_documents
    return round(piece.shard.num_tokens * share)


def _read_evaluation(
    work: Path,
    written: _Shards,
    pieces: list[_Piece],
    settings: ContaminationSettings,
    workers: Workers,
    progress: Callable[[int], None],
) -> tuple[Counter[bytes], Changed]:
    """(SHA-256 of the decoded documents, which were decoded differently); leaves RUNS."""
    names: Counter[bytes] = Counter()
    all_changed: Changed = Counter()
    files = [work / f"piece-{number:05}.runs.npy" for number in range(len(pieces))]
    job = partial(_describe, written, settings)
    tasks = list(zip(pieces, files, strict=True))
    for piece, (own, changed) in zip(pieces, workers.map(job, tasks), strict=True):
        names.update(own)
        all_changed += changed
        progress(_num_tokens(piece))
    write_whole(work / RUNS, (part.view(np.uint8).data for part in distinct(files)))
    return names, all_changed


def distinct(files: Sequence[Path]) -> Iterator[Hashes]:
    """The distinct numbers of sorted .npy files, sorted, a range of 2^64 / NUM_RANGES after the
    other. One file is open at a time: there may be more than a process may open.

    Hashes are spread evenly, so a range holds about one in NUM_RANGES of them.
    """
    bounds = np.arange(1, NUM_RANGES, dtype=np.uint64) * np.uint64(2**64 // NUM_RANGES)
    cuts = []
    for file in files:
        part = np.load(file, mmap_mode="r")
        cuts.append([0, *np.searchsorted(part, bounds).tolist(), len(part)])
    for number in range(NUM_RANGES):
        own = [
            np.array(np.load(file, mmap_mode="r")[cut[number] : cut[number + 1]])
            for file, cut in zip(files, cuts, strict=True)
        ]
        yield np.unique(np.concatenate([*own, np.zeros(0, np.uint64)]))


def _describe(
    written: _Shards, settings: ContaminationSettings, task: tuple[_Piece, Path]
) -> tuple[list[bytes], Changed]:
    piece, file = task
    texts, changed = written.texts(piece)
    write_array(file, np.unique(shingles(texts, settings.ngram_words)[0]))
    return [hashlib.sha256(text).digest() for text in texts], changed


def _search(
    written: _Shards,
    runs_file: Path,
    names: frozenset[bytes],
    settings: ContaminationSettings,
    piece: _Piece,
) -> tuple[set[bytes], npt.NDArray[np.int64], Changed]:
    texts, changed = written.texts(piece)
    shared = {hashlib.sha256(text).digest() for text in texts} & names
    hits = _index(runs_file).find(shingles(texts, settings.ngram_words)[0])
    return shared, hits, changed


def _overlaps(
    work: Path,
    written: _Shards,
    pieces: list[_Piece],
    settings: ContaminationSettings,
    workers: Workers,
) -> dict[str, Any]:
    found: list[tuple[float, int, str, int]] = []
    for own in workers.map(partial(_overlaps_of, work, written, settings), pieces):
        found += own
    shares = np.array([share for share, *_ in found])
    worst = sorted(found, key=lambda one: (-one[0], *one[1:]))[:NUM_WORST]
    return {
        "num_overlapping_documents": int((shares >= settings.threshold).sum()),
        "overlaps": np.histogram(shares, 10, (0, 1))[0].tolist(),
        "worst": [
            {"overlap": round(share, 4), "source": source, "file": file, "row": row}
            for share, source, file, row in worst
        ],
    }


def _overlaps_of(
    work: Path, written: _Shards, settings: ContaminationSettings, piece: _Piece
) -> list[tuple[float, int, str, int]]:
    texts, _ = written.texts(piece)
    runs, hit = _all_runs(work / RUNS), np.load(work / HIT, mmap_mode="r")
    shares = overlaps(texts, runs, hit, settings)
    table = open_documents(written.folder, piece.shard).slice(piece.first, len(texts))
    files, rows = table["file"].to_pylist(), table["row"].to_pylist()
    return list(zip(shares, [piece.shard.source] * len(files), files, rows, strict=True))
