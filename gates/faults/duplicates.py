"""Wrong and right ways to find duplicates and to split."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

from harness import benign, fault
from reference.data.near_duplicates import Deduplication

DUPLICATES, SPLIT = "m1_duplicates::", "m1_split::"
EXACT, NEAR, ORDER = f"{DUPLICATES}test_exact", f"{DUPLICATES}test_near", f"{DUPLICATES}test_order"
TOGETHER, STABLE, FRACTION = f"{SPLIT}test_together", f"{SPLIT}test_stable", f"{SPLIT}test_fraction"


def first_of(keys):
    """For each key the place of its first appearance."""
    first = {}
    return [first.setdefault(key, place) for place, key in enumerate(keys)]


def by_key(key):
    """A `deduplicate` for which documents with equal keys are duplicates, and no others."""

    def deduplicate(documents, settings):
        clusters = first_of([key(text) for text in documents])
        return Deduplication(sorted(set(clusters)), clusters)

    return deduplicate


def with_settings(reference, **changed):
    """The reference's `deduplicate` with other settings than it is given."""
    return lambda documents, settings: reference.deduplicate(
        documents, replace(settings, **changed)
    )


@fault(role="deduplicate", caught_by=EXACT, seen_in="own")
def hashes_the_beginning_only(reference):
    """The hash is of the first 64 bytes: documents that begin alike are one."""
    return by_key(lambda text: text[:64])


@fault(role="deduplicate", caught_by=EXACT, seen_in="own")
def hash_of_one_byte(reference):
    """The content hash is cut to a byte: unlike documents collide."""
    return by_key(lambda text: hashlib.sha256(text).digest()[0] % 8)


@fault(role="deduplicate", caught_by=EXACT, seen_in="own")
def hashes_words_in_any_order(reference):
    """Documents with the same words in another order are one."""
    return by_key(lambda text: b" ".join(sorted(text.split())))


@fault(role="deduplicate", caught_by=EXACT, seen_in="own")
def compares_with_the_one_before(reference):
    """Only neighbours are compared: copies further apart stay."""

    def deduplicate(documents, settings):
        kept = [i for i, text in enumerate(documents) if i == 0 or text != documents[i - 1]]
        return Deduplication(kept, first_of(documents))

    return deduplicate


@fault(role="deduplicate", caught_by=EXACT, seen_in="own")
def salted_hash(reference):
    """Each document's hash is salted with its place: no copy is ever found."""
    return lambda documents, settings: Deduplication(
        list(range(len(documents))), list(range(len(documents)))
    )


@fault(role="deduplicate", caught_by=[f"{NEAR}[0.95]", ORDER], seen_in="own")
def exact_duplicates_alone(reference):
    """Near duplicates are not looked for."""
    return by_key(lambda text: text)


@fault(role="deduplicate", caught_by=f"{NEAR}[0.95]", seen_in="own")
def one_band_of_all_rows(reference):
    """All 126 numbers must be equal: near duplicates are no candidates."""
    return with_settings(reference, bands=1, rows=126)


@fault(role="deduplicate", caught_by=f"{NEAR}[0.6]", seen_in="own")
def candidates_are_not_verified(reference):
    """Whatever shares a band is merged, and bands are short: 0.6 is taken for 0.8."""
    return with_settings(reference, threshold=1e-9)


@fault(role="deduplicate", caught_by=f"{NEAR}[0.6]", seen_in="own")
def two_permutations(reference):
    """Two numbers estimate the similarity, with a deviation of 0.35: equal ones are taken for 1."""
    return with_settings(reference, bands=2, rows=1)


@fault(role="deduplicate", caught_by=f"{NEAR}[0.6]", seen_in="own")
def sets_of_single_letters(reference):
    """Documents are the sets of their letters: all texts are alike."""

    def deduplicate(documents, settings):
        spaced = [b" ".join(bytes([byte]) for byte in text) for text in documents]
        return reference.deduplicate(spaced, replace(settings, shingle_words=1))

    return deduplicate


@fault(role="deduplicate", caught_by=ORDER, seen_in="own")
def forgets_what_is_far(reference):
    """Duplicates are looked for among 32 documents at a time, as a loader's workers would."""

    def deduplicate(documents, settings):
        kept, clusters = [], []
        for start in range(0, len(documents), 32):
            part = reference.deduplicate(documents[start : start + 32], settings)
            kept += [start + i for i in part.kept]
            clusters += [start + i for i in part.clusters]
        return Deduplication(kept, clusters)

    return deduplicate


@fault(role="deduplicate", caught_by=ORDER, seen_in="own")
def pairs_are_not_gathered(reference):
    """A document's cluster is the document before it that it is like, not that one's cluster."""

    def deduplicate(documents, settings):
        found = reference.deduplicate(documents, settings)
        last = {}
        clusters = []
        for place, cluster in enumerate(found.clusters):
            clusters.append(last.get(cluster, place))
            last[cluster] = place
        return Deduplication(found.kept, clusters)

    return deduplicate


@benign(
    role="deduplicate",
    accepted_by=[EXACT, NEAR, ORDER],
    because="which document of a cluster stays is not part of the contract",
)
def the_last_one_stays(reference):
    """Goes through the documents from the last to the first."""

    def deduplicate(documents, settings):
        last = len(documents) - 1
        found = reference.deduplicate(documents[::-1], settings)
        clusters = [last - cluster for cluster in found.clusters[::-1]]
        return Deduplication(sorted(last - i for i in found.kept), clusters)

    return deduplicate


@benign(
    role="deduplicate",
    accepted_by=[NEAR, ORDER],
    because="other hash functions and another split into bands estimate the same similarity",
)
def other_hash_functions(reference):
    """Seeds MinHash with another number and uses 32 bands of 4 rows."""
    return with_settings(reference, seed=99, bands=32, rows=4)


# --- split -----------------------------------------------------------------------------------


def drawn(key):
    """A `split` that draws a number in [0, 1) for each document: key(place, cluster, n, seed)."""

    def split(clusters, fraction, seed):
        num = len(clusters)
        return [
            "validation" if key(place, cluster, num, seed) < fraction else "train"
            for place, cluster in enumerate(clusters)
        ]

    return split


def number(*parts):
    """A number in [0, 1) from the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") / 2**64


@fault(role="split", caught_by=TOGETHER, seen_in="openai/parameter-golf#2127")
def splits_documents(reference):
    """Each document is drawn for itself: near duplicates of a trained one are held out."""
    return drawn(lambda place, cluster, num, seed: number(place, cluster, seed))


@fault(role="split", caught_by=[TOGETHER, f"{STABLE}[order]", f"{STABLE}[more]"], seen_in="own")
def the_first_are_held_out(reference):
    """The first documents are held out, whatever they are."""
    return drawn(lambda place, cluster, num, seed: place / num)


@fault(
    role="split",
    caught_by=[f"{STABLE}[order]", f"{STABLE}[more]", f"{STABLE}[fewer]"],
    seen_in="own",
)
def shuffles_and_cuts(reference):
    """The clusters are shuffled by the seed and cut: one more document moves the others."""

    def split(clusters, fraction, seed):
        names = list(dict.fromkeys(clusters))
        random.Random(seed).shuffle(names)
        held_out = set(names[: int(fraction * len(names))])
        return ["validation" if cluster in held_out else "train" for cluster in clusters]

    return split


@fault(role="split", caught_by=[f"{STABLE}[more]", f"{STABLE}[fewer]"], seen_in="own")
def ranks_clusters(reference):
    """The clusters with the smallest hashes are held out, so many that the fraction is reached."""

    def split(clusters, fraction, seed):
        names = sorted(set(clusters), key=lambda cluster: number(cluster, seed))
        held_out = set(names[: int(fraction * len(names))])
        return ["validation" if cluster in held_out else "train" for cluster in clusters]

    return split


@fault(role="split", caught_by=f"{STABLE}[again]", seen_in="own")
def draws_again_each_time(reference):
    """The process's generator decides: the next run holds out others."""

    def split(clusters, fraction, seed):
        held_out = {cluster: random.random() < fraction for cluster in dict.fromkeys(clusters)}
        return ["validation" if held_out[cluster] else "train" for cluster in clusters]

    return split


@fault(role="split", caught_by=FRACTION, seen_in="own")
def forgets_the_seed(reference):
    """The seed is not part of the hash: every seed holds out the same."""
    return lambda clusters, fraction, seed: reference.split(clusters, fraction, 0)


@fault(role="split", caught_by=FRACTION, seen_in="own")
def takes_the_fraction_for_training(reference):
    """The fraction is what is trained on."""
    return lambda clusters, fraction, seed: reference.split(clusters, 1 - fraction, seed)


@fault(role="split", caught_by=f"{FRACTION}[0.02]", seen_in="own")
def hashes_to_one_byte(reference):
    """One byte of the hash is compared with the fraction of 256, rounded: 0.02 becomes 0.0234."""
    return drawn(lambda _, cluster, num, seed: int(number(cluster, seed) * 256) / 256)


@benign(
    role="split",
    accepted_by=[TOGETHER, STABLE, FRACTION, "m1_new_process::test_same_results"],
    because="any hash of seed and cluster does",
)
def another_hash(reference):
    """Compares another hash of cluster and seed with the fraction."""
    return drawn(lambda _, cluster, num, seed: number(cluster, seed))
