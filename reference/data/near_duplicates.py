"""Documents that say almost the same, gathered into clusters: MinHash and banded hashing (LSH).

A document is the set of its runs of `shingle_words` words. MinHash, by the library rensa, gives it
bands * rows numbers; two documents agree in each with probability J, their Jaccard similarity.
Those that agree in all rows of some band are candidates, 1 - (1 - J^rows)^bands of the pairs. A
candidate is taken if J is at least `threshold`: by the share of equal numbers, or where that is
within MARGIN of the threshold, which is 2.8 deviations of 126 numbers, by the sets themselves.
Clusters are what such pairs connect.

Source: Broder 1997; Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.data.shingles import Places, jaccard, shingles

Signatures = npt.NDArray[np.uint32]
Similar = Callable[[Places, Places], npt.NDArray[np.bool_]]
KEEP = ("one", "all")
MARGIN = 0.1
MOST_KNOWN = 2**19  # some 120 MB
MOST_EXACT = 64  # comparisons of one document by its set
_Q = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class DuplicateSettings:
    """How duplicates are found, and what becomes of them.

    threshold: of the similarity, in (0, 1]; keep: "one" drops what is like a document before it
    that stays (of a chain in which A is like B and B like C, A and perhaps C stay), "all" keeps
    near duplicates. In both cases a cluster is split as one. Exact duplicates are dropped anyhow.

    Raises ValueError for anything else.
    """

    threshold: float = 0.8
    shingle_words: int = 5
    bands: int = 21
    rows: int = 6
    seed: int = 1
    keep: str = "one"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} must be above 0 and at most 1")
        if min(self.shingle_words, self.bands, self.rows) < 1:
            raise ValueError(f"shingle_words, bands and rows must be at least 1: {self}")
        if self.keep not in KEEP:
            raise ValueError(f"keep {self.keep!r}: choose one of {', '.join(KEEP)}")

    @property
    def num_permutations(self) -> int:
        """Numbers of a signature."""
        return self.bands * self.rows


@dataclass(frozen=True)
class Deduplication:
    """kept: the documents that stay, by number, ascending; clusters: of every document, the number
    of the first one in its cluster. Several documents of a cluster may stay.
    """

    kept: list[int]
    clusters: list[int]


def deduplicate(documents: Sequence[bytes], settings: DuplicateSettings) -> Deduplication:
    """Exact duplicates by SHA-256, near duplicates as the module says, on documents in memory.

    Of documents with equal bytes the first one stays. A document without a word is like no other.
    """
    hashes = np.array([hashlib.sha256(data).digest() for data in documents], dtype="S32")
    first = first_of_equal(hashes.view(np.uint8).reshape(len(documents), 32))
    unique = np.flatnonzero(first == np.arange(len(documents)))
    rows, has_words = signatures([documents[i] for i in unique.tolist()], settings)
    are_similar = Verified(
        lambda left, right: similarity(rows[left], rows[right]),
        lambda document: documents[unique[document]],
        settings,
    )
    keys = (band_keys(rows, band, settings.rows) for band in range(settings.bands))
    near = clusters_of(keys, are_similar, has_words)
    stays = unique
    if settings.keep == "one":
        stays = unique[leaders(near, are_similar) == np.arange(len(near))]
    cluster_of_unique = dict(zip(unique.tolist(), unique[near].tolist(), strict=True))
    return Deduplication(stays.tolist(), [cluster_of_unique[i] for i in first.tolist()])


def first_of_equal(hashes: npt.NDArray[np.uint8]) -> Places:
    """[N]: of each row of [N, 32] hashes, the first row that is equal to it."""
    if not len(hashes):
        return np.zeros(0, np.int64)
    whole = np.ascontiguousarray(hashes).view("V32").reshape(-1)
    order = np.argsort(whole, kind="stable")
    ordered = hashes[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(begins)
    first = np.empty(len(order), np.int64)
    first[order] = order[starts][np.cumsum(begins) - 1]
    return first


def signatures(
    texts: Sequence[bytes], settings: DuplicateSettings
) -> tuple[Signatures, npt.NDArray[np.bool_]]:
    """[N, bands * rows] MinHash numbers, and [N] whether there was a word to hash."""
    from rensa import RMinHash

    hashes, ends = shingles(texts, settings.shingle_words)
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets, settings.num_permutations, settings.seed
    )
    rows = np.array(matrix.to_rows(), np.uint32).reshape(len(texts), settings.num_permutations)
    return rows, np.diff(offsets) > 0


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float64]:
    """[n] shares of equal numbers: unbiased for J, deviation sqrt(J (1 - J) / numbers)."""
    share: npt.NDArray[np.float64] = (left == right).mean(axis=1)
    return share


class Verified:
    """Whether pairs of documents are as similar as the threshold asks.

    estimate(left, right): the shares of equal numbers of the pairs; text_of: of one document, for
    the pairs that are compared by their sets. Up to MOST_KNOWN of those are remembered.

    n documents of one template that are all a little less alike than the threshold are n^2 / 2
    pairs. A document that was compared MOST_EXACT times by its set is from then on like another
    one only where the share is above the threshold by MARGIN: it rather stays than goes.
    """

    def __init__(
        self,
        estimate: Callable[[Places, Places], npt.NDArray[np.float64]],
        text_of: Callable[[int], bytes],
        settings: DuplicateSettings,
    ) -> None:
        self._estimate, self._text_of, self._settings = estimate, text_of, settings
        self._known: dict[tuple[int, int], bool] = {}
        self._num_exact: Counter[int] = Counter()

    def __call__(self, left: Places, right: Places) -> npt.NDArray[np.bool_]:
        share = self._estimate(left, right)
        similar: npt.NDArray[np.bool_] = share >= self._settings.threshold
        for place in np.flatnonzero(np.abs(share - self._settings.threshold) <= MARGIN):
            similar[place] = self._exact(int(left[place]), int(right[place]))
        return similar

    def _exact(self, left: int, right: int) -> bool:
        pair = (left, right)
        if pair not in self._known:
            if self._num_exact[right] >= MOST_EXACT:
                return False
            self._num_exact[right] += 1
            texts = self._text_of(left), self._text_of(right)
            found = jaccard(*texts, self._settings.shingle_words)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[pair] = found >= self._settings.threshold
        return self._known[pair]


def band_keys(rows: Signatures, band: int, num_rows: int) -> npt.NDArray[np.uint64]:
    """[N] one number for the `num_rows` numbers of a band."""
    key = np.zeros(len(rows), np.uint64)
    for column in range(band * num_rows, (band + 1) * num_rows):
        key = (key ^ (key >> np.uint64(29))) * _Q + rows[:, column]
    return key


def clusters_of(
    keys_of_bands: Iterable[npt.NDArray[np.uint64]],
    are_similar: Similar,
    has_words: npt.NDArray[np.bool_],
) -> Places:
    """[N]: of every document the first one of its cluster.

    keys_of_bands: [N] for each band, one in memory at a time; documents with equal keys are
    candidates. are_similar(left, right): which of the pairs are taken. In a group of equal keys the
    first is compared with all others, then the first of those that were not like it, and so on.
    """
    root: Places = np.arange(len(has_words))
    for keys in keys_of_bands:
        members, group = _groups(keys, has_words)
        while len(members):
            is_first, left, right = _with_first(members, group)
            taken = root[left] == root[right]
            asked = np.flatnonzero(~taken)
            taken[asked] = are_similar(left[asked], right[asked])
            root = _joined(root, left[taken], right[taken])
            members, group = right[~taken], group[~is_first][~taken]
    return root


def leaders(clusters: Places, are_similar: Similar) -> Places:
    """[N]: of every document one that it is like and that stays; itself, if it stays.

    In each cluster the first document stays, and takes those that are like it; then the first of
    the others, and so on. clusters: as `clusters_of` gives them.
    """
    leader: Places = np.arange(len(clusters))
    sizes = np.bincount(clusters, minlength=len(clusters))
    members = np.flatnonzero(sizes[clusters] > 1)
    members = members[np.argsort(clusters[members], kind="stable")]
    group = clusters[members]
    while len(members):
        is_first, left, right = _with_first(members, group)
        taken = are_similar(left, right)
        leader[right[taken]] = left[taken]
        members, group = right[~taken], group[~is_first][~taken]
    return leader


def _with_first(members: Places, group: Places) -> tuple[npt.NDArray[np.bool_], Places, Places]:
    """(which members are the first of their group, that first one for each other member, the other
    members).
    """
    is_first = np.ones(len(members), bool)
    is_first[1:] = group[1:] != group[:-1]
    first = members[is_first][np.cumsum(is_first) - 1]
    return is_first, first[~is_first], members[~is_first]


def _groups(
    keys: npt.NDArray[np.uint64], has_words: npt.NDArray[np.bool_]
) -> tuple[Places, Places]:
    """(documents, number of their group) of the groups of at least two equal keys."""
    documents = np.flatnonzero(has_words)
    order = documents[np.argsort(keys[documents], kind="stable")]
    ordered = keys[order]
    begins = np.ones(len(order), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    group = np.cumsum(begins) - 1
    shared = np.bincount(group, minlength=1)[group] > 1 if len(group) else begins
    return order[shared], group[shared]


def _joined(root: Places, left: Places, right: Places) -> Places:
    """The clusters after these pairs are connected; every document points at its first one."""
    parent = root.copy()
    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        while parent[a] != a:
            a = parent[a]
        while parent[b] != b:
            b = parent[b]
        parent[max(a, b)] = min(a, b)
    while True:
        above = parent[parent]
        if np.array_equal(above, parent):
            return parent
        parent = above
