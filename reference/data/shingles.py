"""Runs of n words of many texts at once, as 64-bit hashes.

A word is a run of ASCII letters, digits, underscores and bytes from 0x80 on, without regard to the
case of ASCII letters. A character that begins with a byte from 0xE3 on is a word by itself: scripts
written without spaces stand there.

With p odd, a word of bytes b_0 .. b_m has the hash mix(sum_j (b_j + 1) p^j mod 2^64), and words
w_0 .. w_(n-1) the hash mix(sum_k w_k q^k mod 2^64). It is fast, the same everywhere, and no defence
against somebody who looks for collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from reference.data.text_batches import text_batches

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
BATCH_BYTES = 2**20  # texts are taken together up to here: 8-byte numbers of it fit into a cache
_P, _Q = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd, so they have an inverse
_WIDE = 0xE3
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def shingles(texts: Sequence[bytes], num_words: int) -> tuple[Hashes, Places]:
    """(hashes, ends): every run of num_words words of each text, in order, repeated ones too.

    Those of text i are hashes[ends[i - 1] : ends[i]]. A text with fewer words, but one at least,
    has one run of all its words; a text without a word has none.

    Raises ValueError for num_words < 1.
    """
    if num_words < 1:
        raise ValueError(f"num_words is {num_words}, must be at least 1")
    parts: list[Hashes] = []
    counts: list[Places] = []
    for batch in text_batches(texts, BATCH_BYTES):
        hashes, number = _shingles_of_batch(batch, num_words)
        parts.append(hashes)
        counts.append(np.bincount(number, minlength=len(batch)).astype(np.int64))
    ends = np.cumsum(np.concatenate([*counts, np.zeros(0, np.int64)]))
    return np.concatenate([*parts, np.zeros(0, np.uint64)]), ends


def jaccard(left: bytes, right: bytes, num_words: int) -> float:
    """Runs that both texts have, over runs that one of them has at least; 0 if there is none."""
    a, b = (np.unique(shingles([text], num_words)[0]) for text in (left, right))
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(len(a) + len(b) - shared, 1)


def _shingles_of_batch(texts: Sequence[bytes], num_words: int) -> tuple[Hashes, Places]:
    """(hashes, the text that each belongs to), in order."""
    data = np.frombuffer(b"\n".join(texts), np.uint8)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    text_starts = np.cumsum(lengths + 1) - lengths - 1
    words, starts = _words(data)
    owner = np.searchsorted(text_starts, starts, side="right") - 1
    hashes = np.zeros(len(words), np.uint64)
    for k in range(min(num_words, len(words))):
        term = words[k:] * np.uint64(pow(_Q, k, 2**64))
        inside = len(words) - k
        hashes[:inside] += np.where(owner[k:] == owner[:inside], term, np.uint64(0))
    last = np.minimum(np.arange(len(words)) + num_words - 1, max(len(words) - 1, 0))
    is_full = (owner[last] == owner) & (np.arange(len(words)) + num_words <= len(words))
    is_first = np.ones(len(words), bool)
    is_first[1:] = owner[1:] != owner[:-1]
    kept = is_full | is_first
    return _mixed(hashes[kept]), owner[kept]


def _words(data: Bytes) -> tuple[Hashes, Places]:
    """(hash, first byte) of every word."""
    in_word, lower = _tables()
    inside = in_word[data]
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    lead = data >= _WIDE
    if lead.any():
        begins |= lead
        after = (data & 0xC0) != 0x80  # the first byte behind a wide character
        is_wide = np.maximum.accumulate(np.where(after, np.arange(len(data)) * 2 + lead, 0)) & 1
        begins[1:] |= inside[1:] & after[1:] & (is_wide[:-1] == 1)
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, np.uint64), starts
    powers, inverses = _powers(1 << max(len(data) - 1, 1).bit_length())
    terms = (lower[data].astype(np.uint64) * inside) * powers[: len(data)]
    return _mixed(np.add.reduceat(terms, starts) * inverses[starts]), starts


def _mixed(hashes: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the hash (the end of MurmurHash3)."""
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _M1
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _M2
    return hashes ^ (hashes >> np.uint64(33))


@cache
def _tables() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:
    """Of each byte: whether it stands in a word, and its lower-case value plus one."""
    word = [byte >= 0x80 or chr(byte).isalnum() or byte == ord("_") for byte in range(256)]
    lower = [(ord(chr(b).lower()) if b < 0x80 else b) + 1 for b in range(256)]
    return np.array(word), np.array(lower, np.uint16)


@cache
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """p^0 .. p^(size-1) and their inverses mod 2^64."""
    tables = []
    for base in (_P, pow(_P, -1, 2**64)):
        table = np.full(size, base, np.uint64)
        table[0] = 1
        tables.append(np.cumprod(table, dtype=np.uint64))
    return tables[0], tables[1]
