"""Wrong and right ways to write a folder of shards, and to read its manifest."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

from gates.texts import Written, read_folder, write_folder, write_manifest
from harness import benign, fault
from reference.data.manifest import _parsed
from reference.data.manifest import read_manifest as whole

MANIFEST = "m0_manifest::"
DOCUMENTS, NO_LEAK = f"{MANIFEST}test_documents", f"{MANIFEST}test_no_leak"
COUNTS, SAME = f"{MANIFEST}test_counts", f"{MANIFEST}test_same_bytes"
UNFINISHED, REFUSED = f"{MANIFEST}test_unfinished", f"{MANIFEST}test_refused"


def rewritten(reference, change):
    """The reference's `prepare`, then change(documents) in the place of what it wrote."""

    def prepare(sources, directory, *arguments):
        reference.prepare(sources, directory, *arguments)
        write_folder(Path(directory), change(read_folder(Path(directory))))

    return prepare


def restated(reference, change):
    """The reference's `prepare`, then change(manifest as JSON), in place."""

    def prepare(sources, directory, *arguments):
        reference.prepare(sources, directory, *arguments)
        manifest = json.loads((Path(directory) / "manifest.json").read_bytes())
        change(manifest)
        write_manifest(Path(directory), manifest)

    return prepare


def with_settings(reference, change):
    """The reference's `prepare` with change(settings)."""
    return lambda sources, directory, settings, workers=1: reference.prepare(
        sources, directory, change(settings), workers
    )


def with_rows(documents, **changes):
    """The documents with columns of their rows made by functions of the document."""
    for document in documents:
        document.row.update({name: make(document) for name, make in changes.items()})
    return documents


def number(data):
    """A number in [0, 1) from bytes."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") / 2**32


@fault(role="prepare", caught_by=NO_LEAK, seen_in="openai/parameter-golf#2127")
def training_begins_inside_validation(reference):
    """Validation is the first documents, and training begins too early: both have some."""

    def overlapping(documents):
        shared = [d for d in documents if d.split == "validation"][:20]
        again = [Written("train", d.source, dict(d.row), d.ids) for d in shared]
        return [*documents, *again]

    return rewritten(reference, overlapping)


@fault(role="prepare", caught_by=f"{NO_LEAK}[all]", seen_in="own")
def splits_before_it_clusters(reference):
    """Each document is drawn for itself, before near duplicates are known."""

    def drawn(documents):
        for document in documents:
            held_out = number(document.text) < 0.3
            document.split = "validation" if held_out else "train"
        return documents

    return rewritten(reference, drawn)


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="own")
def drops_the_last_document_of_a_shard(reference):
    """A shard's last document is left out, as if it were not full."""

    def shortened(documents):
        ends = {(d.split, d.source): i for i, d in enumerate(documents)}
        return [d for i, d in enumerate(documents) if i not in ends.values()]

    return rewritten(reference, shortened)


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="huggingface/transformers#23530")
def one_eos_a_shard(reference):
    """Documents are joined without EOS."""

    def joined(documents):
        for document in documents:
            document.ids = document.ids[:-1]
        return documents

    return rewritten(reference, joined)


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="own")
def writes_a_document_twice(reference):
    """A document at a boundary of shards stands in both."""
    return rewritten(reference, lambda documents: [*documents, documents[0]])


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="own")
def rows_are_counted_from_one(reference):
    """The place of a document in its file is one too high."""
    return rewritten(
        reference,
        lambda documents: with_rows(
            documents, row=lambda d: d.row["row"] + 1 if d.row["row"] >= 0 else -1
        ),
    )


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="karpathy/nanochat PR#693")
def bytes_counted_as_characters(reference):
    """num_bytes is the number of characters: bits per byte look better than they are."""
    return rewritten(
        reference,
        lambda documents: with_rows(documents, num_bytes=lambda d: len(d.text.decode())),
    )


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="own")
def hides_its_cleaning(reference):
    """What was done to a document is not said."""
    return rewritten(reference, lambda documents: with_rows(documents, steps=lambda d: []))


@fault(role="prepare", caught_by=DOCUMENTS, seen_in="own")
def repairs_text_silently(reference):
    """Letters beyond ASCII are replaced."""

    def ascii_only(documents):
        for document in documents:
            text = document.text.decode().encode("ascii", "replace")
            document.ids = [*text, *document.ids[-1:]]
        return documents

    return rewritten(reference, ascii_only)


@fault(role="prepare", caught_by=[DOCUMENTS, COUNTS], seen_in="own")
def mixes_up_sources(reference):
    """Every document is said to be of the first source."""

    def of_the_first(documents):
        for document in documents:
            document.source = 0
        return documents

    return rewritten(reference, of_the_first)


@fault(role="prepare", caught_by=COUNTS, seen_in="own")
def counts_before_it_drops(reference):
    """What was dropped is not counted: the sources seem to be smaller."""

    def change(manifest):
        for source in manifest["sources"]:
            source["dropped"] = {}

    return restated(reference, change)


@fault(role="prepare", caught_by=COUNTS, seen_in="own")
def slices_without_validation(reference):
    """Counts by slice leave the validation split out."""

    def change(manifest):
        manifest["slices"] = [s for s in manifest["slices"] if s["split"] == "train"]

    return restated(reference, change)


@fault(role="prepare", caught_by=SAME, seen_in="own")
def writes_the_time(reference):
    """The manifest says when it was written: no two folders are equal."""

    def change(manifest):
        manifest["steps"][0]["results"]["time"] = time.time_ns()

    return restated(reference, change)


@fault(role="prepare", caught_by=f"{SAME}[2]", seen_in="own")
def takes_chunks_as_they_come(reference):
    """With several workers documents stand in the order in which workers finish."""

    def prepare(sources, directory, settings, workers=1):
        reference.prepare(sources, directory, settings, 1)
        documents = read_folder(Path(directory))
        if workers > 1:
            documents.sort(key=lambda document: number(document.text))
        write_folder(Path(directory), documents)

    return prepare


@fault(role="prepare", caught_by=UNFINISHED, seen_in="own")
def says_it_was_checked(reference):
    """A check that was left out is said to be complete."""

    def change(manifest):
        manifest["contamination"] = {"status": "complete", "num_shared_documents": 0}

    return restated(reference, change)


@fault(
    role="read_manifest",
    caught_by=[f"{REFUSED}[one-bit-of-a-shard]", f"{REFUSED}[another-tokenizer]"],
    seen_in="own",
)
def looks_at_sizes_alone(reference):
    """Files of the right size are taken for the right ones."""
    return lambda directory: reference.read_manifest(directory, hash_files=False)


@fault(
    role="read_manifest",
    caught_by=[f"{REFUSED}[{n}]" for n in ("a-shard-cut-off", "a-shard-grown", "a-shard-missing")],
    seen_in="own",
)
def reads_the_manifest_alone(reference):
    """Nothing is compared with the files; a missing shard is seen when it is needed."""
    return lambda directory: _parsed(Path(directory))


@fault(
    role="read_manifest",
    caught_by=[f"{REFUSED}[another-version]", f"{REFUSED}[another-format]"],
    seen_in="own",
)
def ignores_the_version(reference):
    """Another version is read as if it were this one."""

    def read_manifest(directory):
        path = Path(directory) / "manifest.json"
        if path.exists():
            manifest = json.loads(path.read_bytes())
            write_manifest(Path(directory), {**manifest, "format": "touchstone data", "version": 1})
        return reference.read_manifest(directory)

    return read_manifest


@fault(role="read_manifest", caught_by=f"{REFUSED}[a-number-in-the-manifest]", seen_in="own")
def ignores_the_manifests_own_hash(reference):
    """The manifest's own hash is computed again, and not compared."""

    def read_manifest(directory):
        path = Path(directory) / "manifest.json"
        if path.exists() and "sha256" in path.read_text():
            manifest = json.loads(path.read_bytes())
            if manifest["version"] == 1:
                write_manifest(Path(directory), manifest)
        return reference.read_manifest(directory)

    return read_manifest


@fault(
    role="read_manifest",
    caught_by=[f"{REFUSED}[no-manifest]", f"{REFUSED}[a-shard-missing]"],
    seen_in="own",
)
def crashes_on_what_is_missing(reference):
    """A missing file ends in a KeyError's one word, not in a sentence."""

    def read_manifest(directory):
        try:
            return reference.read_manifest(directory)
        except ValueError as error:
            if error.__cause__ is not None:
                raise ValueError("missing") from error
            raise

    return read_manifest


@fault(
    role="read_manifest",
    caught_by=[f"{REFUSED}[ids-too-narrow]", f"{REFUSED}[tokens-that-no-shard-has]"],
    seen_in="urvashik/knnlm#6, facebookresearch/fairseq#3765: 16-bit ids for a larger vocabulary",
)
def does_not_compare_widths(reference):
    """Counts of tokens and the width of ids are not held against the files' sizes."""

    def read_manifest(directory):
        try:
            return reference.read_manifest(directory)
        except ValueError as error:
            if "tokens" in str(error):
                return _parsed(Path(directory))
            raise

    return read_manifest


@benign(
    role="prepare",
    accepted_by=[DOCUMENTS, NO_LEAK, COUNTS],
    because="where shards end is a matter of size",
)
def one_shard_a_source(reference):
    """Shards are so large that each source and split has one."""
    return with_settings(reference, lambda settings: replace(settings, shard_tokens=2**30))


@benign(
    role="prepare",
    accepted_by=[DOCUMENTS, NO_LEAK, COUNTS],
    because="the order of documents is the loader's matter; their rows go with them",
)
def documents_in_another_order(reference):
    """Writes the documents of each shard in reverse."""
    return rewritten(reference, lambda documents: documents[::-1])


@benign(role="prepare", accepted_by=NO_LEAK, because="another seed holds out others")
def another_seed(reference):
    """Splits with another seed."""
    return with_settings(reference, lambda settings: replace(settings, seed=settings.seed + 1))


@benign(role="read_manifest", accepted_by=REFUSED, because="hashing twice changes nothing")
def reads_twice(reference):
    """Reads the sizes first and the contents afterwards."""

    def read_manifest(directory):
        whole(directory, hash_files=False)
        return whole(directory)

    return read_manifest
