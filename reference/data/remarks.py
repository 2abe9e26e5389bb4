"""What a manifest says that whoever reads it should be told in a sentence."""

from __future__ import annotations

from typing import Any

from reference.data.acceptance import CHANGED
from reference.data.manifest import SPLITS, VALIDATION, Manifest
from reference.data.source_folders import counts_text

UNLIKE = 2  # times more, or less, than was asked for
FEW_DOCUMENTS = 10


def remarks(manifest: Manifest) -> list[str]:
    """What was left out of the sources' folders, and which files were cut."""
    read = _results(manifest, "read")
    said = [f"left out of {name}: {counts_text(own)}" for name, own in _items(read, "left_out")]
    limit = _parameters(manifest, "read").get("max_document_bytes", 0)
    for name, own in _items(read, "cut_files"):
        said.append(
            f"cut in {name}: {own['num_files']:,} text files of more than {limit:,} bytes, at line "
            f"ends, into {own['num_documents']:,} documents"
        )
    return said


def warnings(manifest: Manifest) -> list[str]:
    """What may make a held-out loss, or a mixture, another than it seems."""
    return [
        *_overlap(manifest),
        *_changed_text(manifest),
        *_without_windows(manifest),
        *_held_out(manifest),
    ]


def decoded_differently(manifest: Manifest) -> dict[tuple[str, int, str], int]:
    """{(split, source, slice): documents that the tokenizer does not give back as they were}."""
    found = manifest.contamination.get("decoded_differently", [])
    return {(one["split"], one["source"], one["slice"]): one["num_documents"] for one in found}


def _overlap(manifest: Manifest) -> list[str]:
    found = manifest.contamination
    num = found.get("num_overlapping_documents", 0)
    if not num:
        return []
    return [
        f"the held-out loss is on text of which {num:,} of {found['num_validation_documents']:,} "
        f"documents have {found['threshold']:.0%} or more of their {found['ngram_words']}-grams in "
        f"the training text: it is lower than on text that was never seen"
    ]


def _changed_text(manifest: Manifest) -> list[str]:
    num = manifest.contamination.get("num_decoded_differently", 0)
    if not num:
        return []
    slices = ", ".join(
        f"{number:,} in {split} {manifest.sources[source].name} {name}"
        for (split, source, name), number in decoded_differently(manifest).items()
    )
    where = f" ({slices})" if slices else ""
    return [
        f"the tokenizer does not give back {num:,} documents as they were{where}: the model learns "
        f"the changed text, and bits per byte count the bytes of the text as it was"
    ]


def _without_windows(manifest: Manifest) -> list[str]:
    windows = _results(manifest, "shards").get("training_windows", {})
    return [
        f"source {name} has no window of {manifest.policy['window_tokens']} tokens to train on"
        for name, number in windows.items()
        if not number
    ]


def _held_out(manifest: Manifest) -> list[str]:
    """Whether little, or another part than was asked for, is held out."""
    tokens = {name: sum(shard.num_tokens for shard in manifest.shards_of(name)) for name in SPLITS}
    said = []
    asked = _parameters(manifest, "duplicates").get("validation_fraction")
    share = tokens[VALIDATION] / max(sum(tokens.values()), 1)
    if asked is not None and not asked / UNLIKE <= share <= asked * UNLIKE:
        said.append(
            f"{share:.2%} of the tokens are held out, asked for were {asked:.2%}: the fraction "
            f"counts clusters of documents, and these are of unlike sizes or few; another --seed "
            f"holds out others"
        )
    num = sum(shard.num_documents for shard in manifest.shards_of(VALIDATION))
    if num < FEW_DOCUMENTS:
        said.append(
            f"the held-out loss is on {num:,} documents only, fewer than {FEW_DOCUMENTS}: it says "
            f"little of others"
        )
    return said


def changed_probes(manifest: Manifest) -> list[str]:
    """The texts on trial that the tokenizer changes."""
    probes = _results(manifest, "tokenizer").get("probes", {})
    return [name for name, how in probes.items() if how == CHANGED]


def _items(results: dict[str, Any], name: str) -> list[tuple[str, dict[str, int]]]:
    return list(results.get(name, {}).items())


def _results(manifest: Manifest, step: str) -> dict[str, Any]:
    return next((one.results for one in manifest.steps if one.name == step), {})


def _parameters(manifest: Manifest, step: str) -> dict[str, Any]:
    return next((one.parameters for one in manifest.steps if one.name == step), {})
