"""Runs of words, against the plainest way of counting them; how often documents are compared."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import texts

from reference.data import shingles as module
from reference.data.near_duplicates import DuplicateSettings, Verified, deduplicate
from reference.data.shingles import jaccard, shingles

WORD = re.compile(r"[\u3000-\U0010ffff]|[0-9A-Za-z_\u0080-\u2fff]+")


def plain(text, num_words):
    """The runs of words as tuples."""
    words = [word.lower() if word.isascii() else word for word in WORD.findall(text)]
    words = [re.sub("[A-Z]", lambda m: m[0].lower(), word) for word in words]
    if not words:
        return []
    return [tuple(words[i : i + num_words]) for i in range(max(len(words) - num_words + 1, 1))]


TEXT = st.lists(st.sampled_from(["a", "B", "b", "1", "_", " ", "\n", "-", "é", "語", "字", "😀"]))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT.map("".join), max_size=5), num_words=st.integers(1, 4))
def test_equal_runs_of_words_and_only_they_have_equal_hashes(texts, num_words):
    hashes, ends = shingles([text.encode() for text in texts], num_words)
    runs = [plain(text, num_words) for text in texts]
    assert np.diff(ends, prepend=0).tolist() == [len(run) for run in runs]
    flat = [run for one in runs for run in one]
    assert len(dict(zip(flat, hashes.tolist(), strict=True))) == len(set(flat))
    assert len({*zip(flat, hashes.tolist(), strict=True)}) == len(set(hashes.tolist()))


def test_batches_do_not_matter(monkeypatch):
    texts = [b"the quick brown fox", b"", b"jumps", b"over the lazy dog " * 9]
    whole = shingles(texts, 3)
    monkeypatch.setattr(module, "BATCH_BYTES", 8)
    parts = shingles(texts, 3)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_jaccard_of_known_sets():
    assert jaccard(b"a b c d", b"a b c e", 2) == pytest.approx(2 / 4)
    assert jaccard(b"a b", b"A  b!", 2) == 1.0
    assert jaccard(b"...", b"...", 2) == 0.0


def test_no_words_asked_for_is_refused():
    with pytest.raises(ValueError, match="num_words is 0"):
        shingles([b"a"], 0)


def test_what_is_known_of_pairs_does_not_fill_the_memory(monkeypatch):
    (first,) = texts(1, num_words=100)
    shared = " ".join(first.split()[:88])  # any two of them have a similarity of 0.78
    documents = [f"{shared} {end}".encode() for end in texts(12, seed=3, num_words=12)]
    whole, sizes, exact = deduplicate(documents, DuplicateSettings()), [], Verified._exact

    def noted(verified, *pair):
        found = exact(verified, *pair)
        sizes.append(len(verified._known))
        return found

    monkeypatch.setattr("reference.data.near_duplicates.MOST_KNOWN", 7)
    monkeypatch.setattr(Verified, "_exact", noted)
    assert deduplicate(documents, DuplicateSettings()) == whole
    assert len(sizes) > 66 and max(sizes) == 7


def test_documents_of_one_template_are_not_all_compared_with_all(monkeypatch):
    (first,) = texts(1, num_words=100)
    shared = " ".join(first.split()[:86])  # any two of them have a similarity of 0.74
    documents = [f"{shared} {end}".encode() for end in texts(40, seed=3, num_words=14)]
    documents += [documents[7] + b" again", documents[30] + b" again"]  # and these are duplicates
    compared = []

    def counted(*arguments):
        compared.append(arguments)
        return jaccard(*arguments)

    monkeypatch.setattr("reference.data.near_duplicates.jaccard", counted)
    whole = deduplicate(documents, DuplicateSettings())
    assert whole.kept == list(range(40)) and len(compared) > 400
    monkeypatch.setattr("reference.data.near_duplicates.MOST_EXACT", 3)
    compared.clear()
    assert deduplicate(documents, DuplicateSettings()) == whole
    assert 0 < len(compared) <= 3 * len(documents)
