"""M1. Duplicates are found, whatever their order, and what is no duplicate stays."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st

from gates.texts import changed_end, jaccard, joined, words
from harness import gate
from reference.data.near_duplicates import DuplicateSettings

THRESHOLD = 0.8
NUM_PAIRS = 120
NUM_WORDS = 300
FILLING = 60  # unrelated documents around the planted ones


def seeded(rng):
    """Python's generator, seeded by the gate's."""
    return random.Random(rng.initial_seed())


def labels_of(check, result, num_documents):
    """The clusters as a list, after it was seen that there is one a document, and kept ones."""
    check("clusters", len(result.clusters), equal=num_documents, because="one a document")
    kept = list(result.kept)
    check("kept twice", len(kept) - len(set(kept)), equal=0, because="numbers of documents")
    return list(result.clusters)


@gate(
    claim="of documents with the same bytes one stays, and no other bytes are lost",
    roles=["deduplicate"],
    not_claimed="near duplicates (test_near)",
    source="SHA-256 of the content; Lee et al. 2022 on what duplicates do",
)
@pytest.mark.parametrize("keep", ["one", "all"])
def test_exact(stack, keep, check, for_all):
    # Same length, same beginning, same end, same words in another order, nothing at all.
    texts = [
        b"", b" ", b"\n", b"...", b"a", b"b", b"alpha beta gamma delta", b"delta gamma beta alpha",
        b"alpha" * 40 + b" one two three", b"alpha" * 40 + b" two three one",
        b"x" * 4096 + b" end", b"y" + b"x" * 4095 + b" end", "é".encode(), b"e\xcc\x81",
    ]  # fmt: skip

    @for_all(chosen=st.lists(st.sampled_from(texts), max_size=24), max_examples=40)
    def _(chosen):
        chosen = [*chosen, *texts]  # so that every pair of them is compared
        result = stack.deduplicate(chosen, DuplicateSettings(keep=keep))
        clusters = labels_of(check, result, len(chosen))
        kept = [chosen[i] for i in result.kept]
        because = "equal bytes are one document; other bytes, unlike in words too, are another"
        check("copies that stay", len(kept) - len(set(kept)), equal=0, because=because)
        check("contents lost", len(set(chosen) - set(kept)), equal=0, because=because)
        apart = sum(
            a == b and clusters[i] != clusters[j]
            for i, a in enumerate(chosen)
            for j, b in enumerate(chosen)
        )
        check("copies in two clusters", apart, equal=0, because="a copy is in the same cluster")


@gate(
    claim="pairs of Jaccard similarity 0.95 are one cluster, pairs of 0.6 and strangers are not",
    roles=["deduplicate"],
    not_claimed="pairs near the threshold of 0.8, where the estimate decides",
    source="Broder 1997; Leskovec, Rajaraman, Ullman, chapter 3",
)
@pytest.mark.parametrize("similarity", [0.95, 0.6])
def test_near(stack, similarity, rng, check):
    drawn = seeded(rng)
    documents = [joined(words(drawn, NUM_WORDS)) for _ in range(FILLING)]
    pairs = []
    for _ in range(NUM_PAIRS):
        first = words(drawn, NUM_WORDS)
        second = changed_end(first, drawn, similarity)
        pairs.append((len(documents), len(documents) + 1))
        documents += [joined(first), joined(second)]
    planted = [jaccard(documents[a], documents[b]) for a, b in pairs]
    check("planted similarity", min(planted), at_least=similarity, because="so it was planted")
    result = stack.deduplicate(documents, DuplicateSettings(threshold=THRESHOLD))
    clusters = labels_of(check, result, len(documents))
    together = sum(clusters[a] == clusters[b] for a, b in pairs)
    if similarity > THRESHOLD:
        because = "no candidate in (1 - .95^6)^21 = 1e-12; 126 numbers say 0.95 +- 0.02"
        check("pairs missed", NUM_PAIRS - together, equal=0, because=because)
    else:
        because = "126 numbers say 0.6 +- 0.044: 4.6 deviations below 0.8"
        check("pairs merged", together, equal=0, because=because)
    strangers = len({clusters[i] for i in range(FILLING)})
    check("strangers merged", FILLING - strangers, equal=0, because="they share no run of words")
    num_dropped = len(documents) - len(result.kept)
    check("dropped", num_dropped, equal=together, because="one of each pair that is alike")


@gate(
    claim="clusters, and how much of them stays, do not depend on the documents' order or distance",
    roles=["deduplicate"],
    not_claimed="which document of a cluster stays; chains of documents less and less alike",
    source="the split by cluster must not depend on how a corpus is read",
)
def test_order(stack, rng, check):
    drawn = seeded(rng)
    families = []
    for size in [1] * 40 + [2] * 10 + [5] * 4:
        first = words(drawn, NUM_WORDS)
        near = [changed_end(first, drawn, 0.97 - 0.01 * i) for i in range(size - 1)]
        families.append([joined(text) for text in (first, *near)])
    documents = [text for family in families for text in family]
    wanted = sorted(sorted(family) for family in families)
    for name in ("as families", "scattered", "scattered again", "reversed"):
        if name.startswith("scattered"):
            drawn.shuffle(documents)
        elif name == "reversed":
            documents.reverse()
        result = stack.deduplicate(documents, DuplicateSettings(threshold=THRESHOLD))
        clusters = labels_of(check, result, len(documents))
        found = {}
        for text, cluster in zip(documents, clusters, strict=True):
            found.setdefault(cluster, []).append(text)
        wrong = sum(family not in wanted for family in map(sorted, found.values()))
        check("clusters that are no family", wrong, equal=0, because="0.93 and more within, 0 else")
        check("families that stay", len(result.kept), equal=len(families), because="one of each")
