"""Documents as rows of equal length: packed end to end, or one document a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.data.labels import PADDING_DOCUMENT

TAILS = ("pad", "drop", "wrap")


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows of T + 1 tokens. The first T are inputs; the last is only a target.

    tokens [R,T+1] int64; documents [R,T+1] int32, the document's index among those packed,
    `PADDING_DOCUMENT` for padding; positions [R,T+1] int64, counted from the document's first token
    in the row; num_bytes [R] int64, the size of a row's raw text, where it is known.

    Raises ValueError when the shapes differ.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    num_bytes: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) != 2 or shape[1] < 2:
            raise ValueError(f"Rows.tokens must be [rows, tokens + 1], got shape {shape}")
        for name in ("documents", "positions"):
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"Rows.{name} has shape {tuple(getattr(self, name).shape)}, tokens has {shape}"
                )
        if self.num_bytes is not None and tuple(self.num_bytes.shape) != shape[:1]:
            raise ValueError(
                f"Rows.num_bytes has shape {tuple(self.num_bytes.shape)}, must be {shape[:1]}"
            )

    @property
    def num_rows(self) -> int:
        """R."""
        return self.tokens.shape[0]

    @property
    def row_tokens(self) -> int:
        """T, the inputs of a row."""
        return self.tokens.shape[1] - 1


def pack(documents: Sequence[Tensor], row_tokens: int, tail: str) -> Rows:
    """Cuts the stream of all documents, end to end, into rows that overlap by one token.

    Row r holds stream tokens r T .. r T + T. The last token of a row is its last target and the
    next row's first input, so every token of the stream except the very first is a target exactly
    once. A row may begin inside a document: what stands before is not seen, and positions count
    from the row's start.

    documents: [len_i] int64 each, ended by EOS where the document is complete; an empty one takes
    no room. row_tokens: T. tail: what becomes of a last row that is not full: "pad" fills it with
    padding, the document's last token repeated under `PADDING_DOCUMENT`; "wrap" with the stream's
    first tokens again, whose document i is then number i + len(documents); "drop" leaves out its
    (sum(len_i) - 1) mod T targets.

    Raises ValueError for row_tokens < 1, another tail, documents that are not [len] int64, or when
    no row is left.
    """
    _check_documents(documents, row_tokens)
    if tail not in TAILS:
        raise ValueError(f"no tail policy {tail!r}; choose one of {', '.join(TAILS)}")
    lengths = torch.tensor([len(document) for document in documents])
    num_tokens = int(lengths.sum())
    full, left = divmod(max(num_tokens - 1, 0), row_tokens)
    num_rows = full if tail == "drop" else max(full + (left > 0), min(num_tokens, 1))
    if num_rows == 0:
        raise ValueError(
            f"no row: {num_tokens} tokens, rows of {row_tokens} + 1, tail {tail!r}; give more text"
        )
    stream = torch.cat(list(documents))
    owners = torch.repeat_interleave(torch.arange(len(documents), dtype=torch.int32), lengths)
    missing = max(0, num_rows * row_tokens + 1 - num_tokens)
    if tail == "wrap":
        places = torch.arange(num_tokens, num_tokens + missing)
        laps = (places // num_tokens).int()
        owners = torch.cat([owners, owners[places % num_tokens] + laps * len(documents)])
        stream = torch.cat([stream, stream[places % num_tokens]])
    else:
        stream = torch.cat([stream, stream[-1:].expand(missing)])
        owners = torch.cat([owners, owners.new_full((missing,), PADDING_DOCUMENT)])
    documents_R = owners.unfold(0, row_tokens + 1, row_tokens)[:num_rows].contiguous()
    return Rows(
        tokens=stream.unfold(0, row_tokens + 1, row_tokens)[:num_rows].contiguous(),
        documents=documents_R,
        positions=_positions(documents_R),
    )


def one_document_a_row(
    documents: Sequence[Tensor], row_tokens: int, num_bytes: Sequence[int] | None = None
) -> Rows:
    """Document i alone in row i, padded: every token after its first is a target, seen with all
    that stands before it. For evaluation by document.

    num_bytes: the size of each document's raw text, from the source and never from the tokens.
    Raises ValueError as `pack` does, for a document without tokens, for one that has more than
    row_tokens + 1, and for another number of sizes than of documents.
    """
    _check_documents(documents, row_tokens)
    if num_bytes is not None and len(num_bytes) != len(documents):
        raise ValueError(f"{len(num_bytes)} sizes for {len(documents)} documents")
    shape = (len(documents), row_tokens + 1)
    tokens = torch.zeros(shape, dtype=torch.int64)
    owners = torch.full(shape, PADDING_DOCUMENT, dtype=torch.int32)
    for index, document in enumerate(documents):
        if not 1 <= len(document) <= row_tokens + 1:
            raise ValueError(
                f"document {index + 1:,} has {len(document)} tokens; a row of its own holds 1 to "
                f"{row_tokens + 1}"
            )
        tokens[index, : len(document)] = document
        tokens[index, len(document) :] = document[-1]
        owners[index, : len(document)] = index
    sizes = None if num_bytes is None else torch.tensor(num_bytes, dtype=torch.int64)
    return Rows(tokens, owners, _positions(owners), sizes)


def _check_documents(documents: Sequence[Tensor], row_tokens: int) -> None:
    if row_tokens < 1:
        raise ValueError(f"row_tokens is {row_tokens}, must be at least 1")
    if not documents:
        raise ValueError("no documents; there is nothing to pack")
    for index, document in enumerate(documents):
        if document.ndim != 1 or document.dtype != torch.int64:
            raise ValueError(
                f"document {index + 1:,} must be [tokens] int64, got {document.dtype} "
                f"{tuple(document.shape)}"
            )


def _positions(documents_R: Tensor) -> Tensor:
    """Each token's distance from where its document, or its row, began."""
    places = torch.arange(documents_R.shape[1]).expand(documents_R.shape)
    starts = torch.zeros_like(places)
    is_start = documents_R[:, 1:] != documents_R[:, :-1]
    starts[:, 1:] = torch.where(is_start, places[:, 1:], 0)
    return places - starts.cummax(dim=1).values
