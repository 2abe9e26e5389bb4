"""Whether a tokenizer is fit for a text: what it costs, and whether anything is lost.

`python -m reference.data.acceptance DIR` says it of a prepared folder, slice by slice.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reference.data.manifest import TOKENIZER, DataError, Manifest, ShardRecord, read_manifest
from reference.data.open_tokenizer import Tokenizer, open_tokenizer
from reference.data.pipes import ended
from reference.data.shards import open_documents, open_tokens
from reference.data.text_files import place_of
from reference.data.visible import visible
from reference.options import whole_number

EXACT, CHANGED, REFUSED = "exact", "changed", "refused"

# Texts on which tokenizers go wrong. Refusing one is no fault; changing it is.
PROBES: dict[str, bytes] = {
    "odd Unicode": "é e\u0301 👩\u200d👧 \u202eabc\u202c \ufeff \U0010ffff \ufffd".encode(),
    "invalid bytes": b"caf\xe9 \xff\xfe \xf0\x9f",
    "control characters": bytes(range(32)) + b"\x7f",
    "white space": b" \t one\r\ntwo\r \n\n  ",
    "a very long run": b"a" * 20_000 + b" " * 20_000,
    "special-token text": b"<|endoftext|><|im_start|></s><s>[CLS]<unk><pad>",
}


@dataclass(frozen=True)
class SliceAcceptance:
    """num_tokens: with one EOS a document; num_changed: documents that do not come back byte for
    byte; num_refused: that cannot be encoded, which are in no other number; first_problem: which
    of the documents, from 1, was the first, and how; "" if none.
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_changed: int
    num_refused: int
    first_problem: str

    @property
    def tokens_per_byte(self) -> float:
        """0 for a slice without text."""
        return self.num_tokens / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class Acceptance:
    """slices: by name; probes: for each of `PROBES`, EXACT, REFUSED or CHANGED."""

    slices: dict[str, SliceAcceptance]
    probes: dict[str, str]

    @property
    def problems(self) -> list[str]:
        """One sentence for each slice and probe in which text was lost or refused."""
        slices = [
            f"{name}: {found.num_changed} documents come back changed, {found.num_refused} cannot "
            f"be encoded; {found.first_problem}"
            for name, found in self.slices.items()
            if found.first_problem
        ]
        return slices + [
            f"{name} comes back changed" for name, found in self.probes.items() if found == CHANGED
        ]


def accept(tokenizer: Tokenizer, slices: Mapping[str, Iterable[bytes]]) -> Acceptance:
    """Encodes and decodes every document of each slice, and every probe.

    A document comes back if decode(encode_document(x)) is x and EOS stands at its end alone.
    """
    return Acceptance(
        {name: _slice(tokenizer, documents) for name, documents in slices.items()},
        {name: _tried(tokenizer, text)[0] for name, text in PROBES.items()},
    )


def written_slices(
    directory: Path | str, manifest: Manifest, tokenizer: Tokenizer, per_shard: int
) -> dict[str, Iterator[bytes]]:
    """By "split source slice", the texts of documents as they are decoded from the shards: at most
    per_shard of each shard, evenly from its beginning to its end.

    Raises DataError, when its turn comes, for a document that is not what was tokenized.
    """
    places: dict[tuple[str, int, str], list[ShardRecord]] = {}
    for shard in manifest.shards:
        for name in open_documents(directory, shard)["slice"].unique().to_pylist():
            places.setdefault((shard.split, shard.source, name), []).append(shard)
    return {
        f"{split} {manifest.sources[source].name} {name}": _decoded(
            directory, manifest, shards, name, tokenizer, per_shard
        )
        for (split, source, name), shards in places.items()
    }


def _decoded(
    directory: Path | str,
    manifest: Manifest,
    shards: list[ShardRecord],
    slice_name: str,
    tokenizer: Tokenizer,
    limit: int,
) -> Iterator[bytes]:
    for shard in shards:
        table = open_documents(directory, shard)
        tokens = open_tokens(directory, manifest, shard)
        own = np.flatnonzero(np.array(table["slice"].to_pylist(), object) == slice_name)
        for number in own[:: -(-len(own) // limit)].tolist():
            row = table.slice(number, 1).to_pylist()[0]
            ids = tokens[row["start"] : row["start"] + row["num_tokens"]].astype(np.int64)
            text = tokenizer.decode(torch.from_numpy(ids))
            if hashlib.sha256(text).digest() != row["sha256"]:
                raise DataError(
                    f"{place_of(row['file'], row['row'])} does not come back from "
                    f"{shard.tokens_file} as it was tokenized"
                )
            yield text


def _slice(tokenizer: Tokenizer, documents: Iterable[bytes]) -> SliceAcceptance:
    num_documents = num_bytes = num_tokens = num_changed = num_refused = 0
    first_problem = ""
    for number, text in enumerate(documents, 1):  # told, and not stored: from 1
        outcome, length, words = _tried(tokenizer, text)
        if outcome != EXACT:
            num_changed += outcome == CHANGED
            num_refused += outcome == REFUSED
            first_problem = first_problem or f"document {number:,}: {words}"
        if outcome != REFUSED:
            num_documents, num_bytes = num_documents + 1, num_bytes + len(text)
            num_tokens += length
    return SliceAcceptance(
        num_documents, num_bytes, num_tokens, num_changed, num_refused, first_problem
    )


def _tried(tokenizer: Tokenizer, text: bytes) -> tuple[str, int, str]:
    """The outcome for one text, its tokens, and what is wrong in words."""
    try:
        tokens = tokenizer.encode_document(text)
    except ValueError as error:
        return REFUSED, 0, str(error)
    if (tokens == tokenizer.eos).sum() != 1:
        return CHANGED, len(tokens), "the end of a document stands inside it"
    back = tokenizer.decode(tokens)
    if back != text:
        place = next(
            (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b),
            min(len(text), len(back)),
        )
        return CHANGED, len(tokens), f"it comes back changed from byte {place} on"
    return EXACT, len(tokens), ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each slice and probe; 1 if text was lost, 2 for a folder that is none."""
    parser = argparse.ArgumentParser(prog="python -m reference.data.acceptance")
    parser.add_argument("data", type=Path, metavar="DIR", help="a prepared folder")
    parser.add_argument(
        "--per-shard", type=whole_number, default=100, metavar="N", help="documents of a slice"
    )
    options = parser.parse_args(arguments)
    try:
        manifest = read_manifest(options.data)
        tokenizer = open_tokenizer(options.data / TOKENIZER, manifest.tokenizer.eos)
        slices = written_slices(options.data, manifest, tokenizer, options.per_shard)
        found = accept(tokenizer, slices)
    except ValueError as error:
        parser.error(visible(str(error), "\n"))
    for name, one in found.slices.items():
        print(f"{visible(name)}: {one.tokens_per_byte:.4f} tokens per byte, "
              f"{one.num_documents} documents, {one.num_changed} changed, "
              f"{one.num_refused} refused")  # fmt: skip
    for name, outcome in found.probes.items():
        print(f"{name}: {outcome}")
    for problem in found.problems:
        print(f"PROBLEM {visible(problem)}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(ended(main))
