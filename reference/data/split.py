"""Which documents are trained on, and which are held out: decided by cluster, by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from reference.data.manifest import TRAIN, VALIDATION


def split(clusters: Sequence[bytes], fraction: float, seed: int) -> list[str]:
    """The split of each document, "train" or "validation".

    A cluster c is held out if the first 8 bytes of SHA-256("seed " + seed + " " + c), read as a
    number below 2^64, are below fraction * 2^64. So all documents of a cluster stand together; the
    order, the other documents and the number of workers have no say; and `fraction` of the clusters
    is held out on average.

    clusters: the name of each document's cluster, which is the smallest SHA-256 in it.
    Raises ValueError as require_fraction does.
    """
    require_fraction(fraction)
    limit = int(fraction * 2**64)
    is_held_out = {c: _number(c, seed) < limit for c in set(clusters)}
    return [VALIDATION if is_held_out[cluster] else TRAIN for cluster in clusters]


def require_fraction(fraction: float) -> None:
    """ValueError unless the fraction is between 0 and 1."""
    if not 0 < fraction < 1:
        raise ValueError(f"the validation fraction is {fraction}; it must be between 0 and 1")


def _number(cluster: bytes, seed: int) -> int:
    digest = hashlib.sha256(b"seed %d " % seed + cluster).digest()
    return int.from_bytes(digest[:8], "big")
