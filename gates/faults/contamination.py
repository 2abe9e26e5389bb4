"""Wrong and right ways to compare evaluation with training text."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice

from harness import benign, fault
from reference.data.contamination import Contamination

SHARED = "m1_contamination::test_shared"
OVERLAP = "m1_contamination::test_overlap"
ALL = "m1_contamination::test_all_documents"


def with_shared(reference, key):
    """The reference's overlaps; shared is what has a training document's key."""

    def contamination(train, evaluation, settings):
        train = list(train)
        keys = {key(text) for text in train}
        found = reference.contamination(train, evaluation, settings)
        return replace(found, shared=[i for i, one in enumerate(evaluation) if key(one) in keys])

    return contamination


def with_train(reference, change):
    """The reference's answer for other training documents."""
    return lambda train, evaluation, settings: reference.contamination(
        change(train), evaluation, settings
    )


@fault(role="contamination", caught_by=SHARED, seen_in="own")
def compares_stripped_text(reference):
    """White space at the ends and the case of letters are left out of the hash."""
    return with_shared(reference, lambda text: text.strip().lower())


@fault(role="contamination", caught_by=SHARED, seen_in="own")
def compares_beginnings(reference):
    """Documents that begin with the same 64 bytes are called the same."""
    return with_shared(reference, lambda text: text[:64])


@fault(role="contamination", caught_by=SHARED, seen_in="own")
def compares_lengths(reference):
    """Documents of the same length are called the same."""
    return with_shared(reference, len)


@fault(
    role="contamination",
    caught_by=[SHARED, ALL],
    seen_in="openai/parameter-golf#2127: the configuration said that the sets were apart",
)
def believes_the_configuration(reference):
    """The documents were split, so nothing is shared: nothing is compared."""
    return lambda train, evaluation, settings: Contamination([], [0.0] * len(evaluation))


@fault(role="contamination", caught_by=[f"{ALL}[500]", f"{ALL}[999]"], seen_in="own")
def reads_the_first_shard(reference):
    """Only the first 400 training documents are compared."""
    return with_train(reference, lambda train: islice(train, 400))


@fault(role="contamination", caught_by=f"{ALL}[999]", seen_in="own")
def loses_the_last_document(reference):
    """The last training document is not compared."""
    return with_train(reference, lambda train: list(train)[:-1])


@fault(
    role="contamination",
    caught_by=[f"{OVERLAP}[{place}]" for place in ("beginning", "middle", "end")],
    seen_in="own",
)
def whole_documents_alone(reference):
    """The overlap is 1 of a document that is in the training text as a whole, else 0."""

    def contamination(train, evaluation, settings):
        found = reference.contamination(train, evaluation, settings)
        return replace(found, overlaps=[float(i in found.shared) for i in range(len(evaluation))])

    return contamination


@fault(role="contamination", caught_by=[f"{OVERLAP}[short]", f"{OVERLAP}[end]"], seen_in="own")
def shorter_runs(reference):
    """Runs of five words: every common phrase is contamination."""
    return lambda train, evaluation, settings: reference.contamination(
        train, evaluation, replace(settings, ngram_words=5)
    )


@fault(role="contamination", caught_by=[f"{OVERLAP}[middle]", f"{OVERLAP}[end]"], seen_in="own")
def runs_without_overlap(reference):
    """The text is cut into pieces of 13 words: a quotation that begins elsewhere is not found."""

    def cut(text, size):
        own = text.lower().split()
        return {b" ".join(own[i : i + size]) for i in range(0, len(own), size)}

    def contamination(train, evaluation, settings):
        train = list(train)
        found = reference.contamination(train, evaluation, settings)
        pieces = set().union(*(cut(text, settings.ngram_words) for text in train))
        shares = [cut(text, settings.ngram_words) for text in evaluation]
        return replace(found, overlaps=[len(s & pieces) / max(len(s), 1) for s in shares])

    return contamination


@fault(role="contamination", caught_by=f"{OVERLAP}[spaced]", seen_in="own")
def line_breaks_count(reference):
    """Runs are of bytes, so another line break or a capital letter hides a quotation."""

    def contamination(train, evaluation, settings):
        train = [text.hex().encode() for text in train]
        named = [text.hex().encode() for text in evaluation]
        return reference.contamination(train, named, settings)

    return contamination


@fault(role="contamination", caught_by=[f"{OVERLAP}[beginning]", f"{OVERLAP}[end]"], seen_in="own")
def share_of_the_training_document(reference):
    """The overlap is divided by the runs that were found, and so is 1 where anything is."""

    def contamination(train, evaluation, settings):
        found = reference.contamination(train, evaluation, settings)
        return replace(found, overlaps=[float(overlap > 0) for overlap in found.overlaps])

    return contamination


@benign(
    role="contamination",
    accepted_by=[SHARED, ALL, OVERLAP],
    because="sets of words are what the hashes stand for",
)
def python_sets(reference):
    """Compares tuples of words in Python's sets, and documents by another hash."""

    def runs(text, size):
        own = text.lower().split()
        return {tuple(own[i : i + size]) for i in range(max(len(own) - size + 1, 1))} - {()}

    def contamination(train, evaluation, settings):
        train = list(train)
        names = {hashlib.blake2b(text).digest() for text in train}
        size = settings.ngram_words
        known = set().union(*(runs(text, size) for text in train))
        own = [runs(text, size) for text in evaluation]
        shared = [i for i, t in enumerate(evaluation) if hashlib.blake2b(t).digest() in names]
        return Contamination(shared, [len(r & known) / max(len(r), 1) for r in own])

    return contamination
