"""Texts a few at a time, where all at once would take too much memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import AnyStr


def text_batches(texts: Sequence[AnyStr], most: int) -> Iterator[Sequence[AnyStr]]:
    """The texts in order, as many at once as have at most `most` bytes or characters, counting one
    between two of them; or a single one that has more.
    """
    first = size = 0
    for place, text in enumerate(texts):
        if place > first and size + len(text) > most:
            yield texts[first:place]
            first, size = place, 0
        size += len(text) + 1
    if first < len(texts):
        yield texts[first:]
