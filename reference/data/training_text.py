"""Text as the training command uses it: rows to train on, rows held out, windows of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.training.row_tokens

    @property
    def training_sha256(self) -> str:
        """Of the rows to train on."""
        return rows_sha256(self.training)

    @property
    def held_out_sha256(self) -> str:
        """Of the rows that are held out."""
        return rows_sha256(self.held_out)

    def windows(self, seed: int, num_updates: int) -> Windows:
        """The first `num_updates` windows to train on, epoch after epoch in another order."""
        return Windows(self.training, seed, num_updates)

    def held_out_windows(self) -> Iterator[Window]:
        """Every held-out row once."""
        return _windows(self.held_out, torch.arange(self.held_out.num_rows))


@dataclass(eq=False)
class Windows:
    """Windows that can be gone through again and again, always the same; they know where they are.

    Every pass begins at the first window, or where the state given to `load_state_dict` stands.
    """

    rows: Rows
    seed: int
    num_updates: int
    rows_per_microbatch: int = ROWS_PER_MICROBATCH
    microbatches_per_window: int = MICROBATCHES_PER_WINDOW
    _first: int = field(default=0, init=False)
    _next: int = field(default=0, init=False)

    def __len__(self) -> int:
        """Windows of a pass."""
        return self.num_updates - self._first

    def __iter__(self) -> Iterator[Window]:
        self._next = self._first
        return self._pass()

    def state_dict(self) -> dict[str, int | str]:
        """The next window that the newest pass has not handed out, and of which rows.

        epoch and window count from 0; behind an epoch's last window stands the next epoch's first.
        """
        epoch, window = divmod(self._next, self.windows_per_epoch)
        return {"epoch": epoch, "window": window, **self._rows_state()}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """The next pass begins at the window that `state` names.

        Raises ValueError, and stays as it was, for other rows, another seed or size of a window,
        and for a place that is not there.
        """
        own = self._rows_state()
        if state.keys() != {"epoch", "window", *own}:
            raise ValueError(f"a position has epoch, window, {', '.join(own)}; got {state}")
        wrong = [
            f"{name} {state[name]}, here {own[name]}" for name in own if own[name] != state[name]
        ]
        if wrong:
            raise ValueError(f"the position belongs to other windows: {'; '.join(wrong)}")
        epoch, window = state["epoch"], state["window"]
        if type(epoch) is not int or type(window) is not int:
            raise ValueError(f"epoch and window must be whole numbers, got {epoch!r}, {window!r}")
        place = epoch * self.windows_per_epoch + window
        if epoch < 0 or not 0 <= window < self.windows_per_epoch or place > self.num_updates:
            raise ValueError(
                f"no window {window} of epoch {epoch}: an epoch has {self.windows_per_epoch}, and "
                f"{self.num_updates} are asked for"
            )
        self._first = self._next = place

    @property
    def windows_per_epoch(self) -> int:
        """Also counts a last window that is not full."""
        return -(-self.rows.num_rows // (self.rows_per_microbatch * self.microbatches_per_window))

    @property
    def num_targets(self) -> int:
        """Supervised tokens of a pass."""
        return sum(window.num_targets for window in self._from(self._first))

    @cached_property
    def rows_sha256(self) -> str:
        """As the function."""
        return rows_sha256(self.rows)

    def _rows_state(self) -> dict[str, int | str]:
        return {
            "seed": self.seed,
            "rows_per_microbatch": self.rows_per_microbatch,
            "microbatches_per_window": self.microbatches_per_window,
            "num_rows": self.rows.num_rows,
            "rows_sha256": self.rows_sha256,
        }

    def _pass(self) -> Iterator[Window]:
        for place, window in enumerate(self._from(self._first), self._first + 1):
            self._next = place
            yield window

    def _from(self, first: int) -> Iterator[Window]:
        """The windows from number `first` on, without making those before it."""
        epoch, window = divmod(first, self.windows_per_epoch)
        num_rows_done = window * self.rows_per_microbatch * self.microbatches_per_window
        begun = shuffle(self.rows.num_rows, self.seed, epoch)[num_rows_done:]
        orders = (shuffle(self.rows.num_rows, self.seed, later) for later in count(epoch + 1))
        sizes = (self.rows_per_microbatch, self.microbatches_per_window)
        epochs = (_windows(self.rows, order, *sizes) for order in chain([begun], orders))
        return islice(chain.from_iterable(epochs), self.num_updates - first)


def rows_sha256(rows: Rows) -> str:
    """Of the rows' tokens, documents and positions, in hexadecimal."""
    hashed = hashlib.sha256()
    for part in (rows.tokens, rows.documents, rows.positions):
        hashed.update(f"{part.dtype} {tuple(part.shape)} ".encode())
        hashed.update(part.contiguous().numpy().data)
    return hashed.hexdigest()


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


def _windows(
    rows: Rows,
    order: Tensor,
    rows_per_microbatch: int = ROWS_PER_MICROBATCH,
    microbatches_per_window: int = MICROBATCHES_PER_WINDOW,
) -> Iterator[Window]:
    sizes = (rows_per_microbatch, microbatches_per_window)
    return batches(rows, order, make_labels, "inside", *sizes)
