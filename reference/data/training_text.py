"""Text as the training command uses it: rows to train on, rows held out, windows of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from math import log
from typing import Protocol

import torch
from torch import Tensor

from reference.data.batches import batches, shuffle
from reference.data.corpus import language_documents, python_documents
from reference.data.labels import make_labels
from reference.data.language import language
from reference.data.pack import Rows, one_document_a_row, pack
from reference.window import Window

DIFFICULTY = "hard"
ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW = 8, 2
HELD_OUT_EVERY = 20  # documents


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    def encode_documents(self, documents: Iterable[bytes]) -> list[Tensor]:
        """Each document with its EOS: [tokens] int64."""
        ...


@dataclass(frozen=True)
class TrainingText:
    """No document is in both. held_out_bytes: of the raw text that the held-out rows hold; remark:
    what the held-out loss can come down to, where that is known.
    """

    training: Rows
    held_out: Rows
    held_out_bytes: int
    remark: str = ""

    def windows(self, seed: int, num_updates: int) -> Windows:
        """The first `num_updates` windows to train on, epoch after epoch in another order."""
        return Windows(self.training, seed, num_updates)

    def held_out_windows(self) -> Iterator[Window]:
        """Every held-out row once."""
        return _windows(self.held_out, torch.arange(self.held_out.num_rows))


@dataclass(frozen=True)
class Windows:
    """Windows that can be gone through again and again, always the same."""

    rows: Rows
    seed: int
    num_updates: int

    def __len__(self) -> int:
        return self.num_updates

    def __iter__(self) -> Iterator[Window]:
        epochs = (
            _windows(self.rows, shuffle(self.rows.num_rows, self.seed, epoch)) for epoch in count()
        )
        return islice(chain.from_iterable(epochs), self.num_updates)


def language_text(tokenizer: Tokenizer, row_tokens: int | None, seed: int) -> TrainingText:
    """The generated language: 8000 documents packed, 200 others each alone in its row.

    row_tokens: T; None: the bytes of the longest document that there can be. Raises ValueError for
    a T that a held-out document does not fit into.
    """
    chosen = language(DIFFICULTY)
    training = [d.text for d in language_documents(DIFFICULTY, "train", 8_000, seed)]
    held_out = [d.text for d in language_documents(DIFFICULTY, "held_out", 200, seed)]
    num_tokens = row_tokens or chosen.max_bytes
    held_out_bytes = sum(map(len, held_out))
    true_bits = sum(chosen.nats(text) for text in held_out) / held_out_bytes / log(2)
    return TrainingText(
        pack(tokenizer.encode_documents(training), num_tokens, "drop"),
        one_document_a_row(tokenizer.encode_documents(held_out), num_tokens),
        held_out_bytes,
        f"; the language itself: {true_bits:.4f} bits per byte",
    )


def python_text(tokenizer: Tokenizer, row_tokens: int, max_bytes: int) -> TrainingText:
    """At most max_bytes of what is written about Python and in it. Every 20th document is held out,
    whatever the seed. Raises ValueError if no row is left.
    """
    documents = [document.data for document in python_documents(max_bytes)]
    held_out = documents[::HELD_OUT_EVERY]
    training = [text for index, text in enumerate(documents) if index % HELD_OUT_EVERY]
    if not training:
        raise ValueError(f"{max_bytes} bytes hold one document only; raise --corpus-bytes")
    return TrainingText(
        pack(tokenizer.encode_documents(training), row_tokens, "drop"),
        pack(tokenizer.encode_documents(held_out), row_tokens, "pad"),
        sum(map(len, held_out)),
    )


def _windows(rows: Rows, order: Tensor) -> Iterator[Window]:
    return batches(rows, order, make_labels, "inside", ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW)
