"""Is evaluation text in the training text? By whole documents, and by runs of n words.

A document of the evaluation is shared if its bytes are those of a training document. Its overlap is
the share of its distinct runs of `ngram_words` words that stand somewhere in the training text.

Source of the n-gram overlap: Brown et al. 2020, appendix C (13 words).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.data.shingles import Hashes, shingles

_BITS_PER_RUN = 8
_FEWEST_BITS, _MOST_BITS = 16, 32
_BLOCK = 2**18  # runs at once


@dataclass(frozen=True)
class ContaminationSettings:
    """threshold: the overlap from which on a document is counted. ValueError for nonsense."""

    ngram_words: int = 13
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.ngram_words < 1 or not 0 < self.threshold <= 1:
            raise ValueError(f"ngram_words >= 1 and 0 < threshold <= 1 are needed: {self}")


@dataclass(frozen=True)
class Contamination:
    """Of the evaluation documents, in order: which are training documents too, and each one's
    overlap (0 of a document without a word).
    """

    shared: list[int]
    overlaps: list[float]


def contamination(
    train: Iterable[bytes], evaluation: Sequence[bytes], settings: ContaminationSettings
) -> Contamination:
    """Compares documents in memory; `train` is gone through once."""
    runs = np.unique(shingles(evaluation, settings.ngram_words)[0])
    index = RunIndex(runs)
    names = {hashlib.sha256(text).digest() for text in evaluation}
    found: set[bytes] = set()
    hit = np.zeros(len(runs), bool)
    for text in train:
        found |= {hashlib.sha256(text).digest()} & names
        hit[index.find(shingles([text], settings.ngram_words)[0])] = True
    shared = [i for i, text in enumerate(evaluation) if hashlib.sha256(text).digest() in found]
    return Contamination(shared, overlaps(evaluation, runs, hit, settings))


def overlaps(
    texts: Sequence[bytes],
    runs: Hashes,
    hit: npt.NDArray[np.bool_],
    settings: ContaminationSettings,
) -> list[float]:
    """The overlap of each text: runs, sorted, hold all of theirs; hit says which were found."""
    hashes, ends = shingles(texts, settings.ngram_words)
    shares = []
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        own = np.unique(hashes[start:end])
        shares.append(float(hit[np.searchsorted(runs, own)].mean()) if len(own) else 0.0)
    return shares


class RunIndex:
    """Finds runs in a sorted array of distinct ones. A bit table keeps most others away from it."""

    def __init__(self, runs: Hashes) -> None:
        bits = (max(len(runs), 1) * _BITS_PER_RUN).bit_length()
        self._runs = runs
        self._mask = np.uint64(2 ** min(max(bits, _FEWEST_BITS), _MOST_BITS) - 1)
        self._table = np.zeros((int(self._mask) + 1) // 8, np.uint8)
        for first in range(0, len(runs), _BLOCK):
            place, bit = self._places(runs[first : first + _BLOCK])
            np.bitwise_or.at(self._table, place, bit)

    def find(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """The distinct places in the array of those hashes that are in it."""
        if not len(self._runs):
            return np.zeros(0, np.int64)
        place, bit = self._places(hashes)
        likely = np.unique(hashes[(self._table[place] & bit) != 0])
        found: npt.NDArray[np.int64] = np.searchsorted(self._runs, likely)
        found[found == len(self._runs)] = 0
        there: npt.NDArray[np.int64] = found[self._runs[found] == likely]
        return there

    def _places(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        low = hashes & self._mask
        bit = np.left_shift(1, (low & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
        return (low >> np.uint64(3)).astype(np.int64), bit
