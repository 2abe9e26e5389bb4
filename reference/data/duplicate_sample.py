"""How often clusters are wrong: exact similarities of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from reference.data.near_duplicates import DuplicateSettings, Signatures
from reference.data.shingles import Places, jaccard


@dataclass(frozen=True)
class SampledErrors:
    """Clusters against exact Jaccard similarities, on a sample.

    num_false of num_pairs: documents whose similarity to the one that leads them is below the
    threshold, and the lowest of all; num_missed of num_documents: leading documents that are as
    similar as the threshold asks to one before them that leads. With `keep` "one" exactly those
    that lead stay.
    """

    num_pairs: int
    num_false: int
    lowest_similarity: float
    num_documents: int
    num_missed: int


def sampled_errors(
    leader: Places,
    blocks: Callable[[], Iterable[tuple[int, Signatures]]],
    text_of: Callable[[int], bytes],
    settings: DuplicateSettings,
    num_pairs: int = 200,
    num_documents: int = 64,
) -> SampledErrors:
    """Compares a seeded sample. leader: as `leaders` gives them; blocks(): (first document,
    signatures) pieces of all documents; a missed pair is looked for among those whose signatures
    say threshold - 0.15 or more.
    """
    chosen = np.random.default_rng(settings.seed)
    firsts = np.flatnonzero(leader == np.arange(len(leader)))
    others = np.flatnonzero(leader != np.arange(len(leader)))
    others = np.sort(chosen.permutation(others)[:num_pairs])

    def exact(a: int, b: int) -> float:
        return jaccard(text_of(a), text_of(b), settings.shingle_words)

    found = [exact(int(other), int(leader[other])) for other in others]
    sample = np.sort(chosen.permutation(firsts)[:num_documents])
    likely: dict[int, list[int]] = {int(one): [] for one in sample}
    rows = dict(_rows_of(likely, blocks()))
    for start, block in blocks():
        for one, row in rows.items():
            near = start + np.flatnonzero((block == row).mean(axis=1) >= settings.threshold - 0.15)
            likely[one] += [int(other) for other in near if leader[other] == other < one]
    num_missed = sum(
        any(exact(one, other) >= settings.threshold for other in near)
        for one, near in likely.items()
    )
    return SampledErrors(
        len(found),
        sum(value < settings.threshold for value in found),
        min(found, default=1.0),
        len(sample),
        num_missed,
    )


def _rows_of(
    wanted: Iterable[int], blocks: Iterable[tuple[int, Signatures]]
) -> Iterable[tuple[int, Signatures]]:
    documents = list(wanted)
    for start, block in blocks:
        yield from ((one, block[one - start].copy()) for one in documents
                    if start <= one < start + len(block))  # fmt: skip
