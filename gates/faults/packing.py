"""Wrong and right ways to pack documents into rows."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from harness import benign, fault
from reference.data.pack import Rows

PACKING = "m1_packing::"
ONCE = f"{PACKING}test_every_token_once"
ACROSS = f"{PACKING}test_across"
NUMBERS = f"{PACKING}test_document_numbers"


def changed(rows, **fields):
    """The rows with some tensors replaced."""
    kept = {name: getattr(rows, name) for name in ("tokens", "documents", "positions")}
    return Rows(**{**kept, **fields})


# --- pack: which tokens ----------------------------------------------------------------------


@fault(role="pack", caught_by=[ONCE, ACROSS], seen_in="own")
def rows_do_not_overlap(reference):
    """Rows of T + 1 tokens follow one another: every (T + 1)th token is never a target."""

    def pack(documents, row_tokens, tail):
        wider = reference.pack(documents, row_tokens + 1, tail)
        return Rows(wider.tokens[:, :-1], wider.documents[:, :-1], wider.positions[:, :-1])

    return pack


@fault(role="pack", caught_by=[ONCE, ACROSS, f"{PACKING}test_ends"], seen_in="own")
def drops_the_tail_silently(reference):
    """The rest that does not fill a row is dropped although padding was asked for."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        full = max(1, (sum(map(len, documents)) - 1) // row_tokens)
        return Rows(rows.tokens[:full], rows.documents[:full], rows.positions[:full])

    return pack


@fault(role="pack", caught_by=[ONCE, f"{PACKING}test_ends", NUMBERS], seen_in="own")
def truncates_documents(reference):
    """A document longer than a row is cut there and its rest thrown away."""

    def pack(documents, row_tokens, tail):
        return reference.pack([one[: row_tokens + 1] for one in documents], row_tokens, tail)

    return pack


@fault(
    role="pack",
    caught_by=[ONCE, ACROSS],
    seen_in="metagene-ai/metagene-pretrain PR#18",
)
def looks_ahead_and_repeats(reference):
    """The document that was looked at to see whether it fits is packed again in the next row."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        again = torch.arange(rows.num_rows).repeat_interleave(2)[1:]
        return Rows(rows.tokens[again], rows.documents[again], rows.positions[again])

    return pack


@fault(role="pack", caught_by=[ONCE, ACROSS], seen_in="own")
def fills_the_tail_from_the_start(reference):
    """The last row is filled up with the first tokens of the stream, a second time."""

    def pack(documents, row_tokens, tail):
        missing = -(sum(map(len, documents)) - 1) % row_tokens
        stream = torch.cat(list(documents))
        filled = [*documents[:-1], torch.cat([documents[-1], stream.repeat(9)[:missing]])]
        return reference.pack(filled, row_tokens, tail)

    return pack


@fault(
    role="pack",
    caught_by=f"{PACKING}test_ends",
    seen_in="own",
)
def leaves_the_ends_out(reference):
    """Documents are joined without the token that ends them."""

    def pack(documents, row_tokens, tail):
        cut = [one[:-1] for one in documents]
        return reference.pack(cut if any(map(len, cut)) else documents, row_tokens, tail)

    return pack


@fault(
    role="pack",
    caught_by=[ONCE, ACROSS, NUMBERS],
    seen_in="huggingface/transformers#2825, huggingface/datatrove#118",
)
def stores_16_bit_ids(reference):
    """Tokens are written as 16-bit numbers: 65536 comes back as 0."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        return changed(rows, tokens=rows.tokens.to(torch.uint16).to(torch.int64))

    return pack


@fault(role="pack", caught_by=f"{PACKING}test_declared_tail", seen_in="own")
def pads_whatever_was_declared(reference):
    """The last row is padded although its targets were to be dropped."""

    def pack(documents, row_tokens, tail):
        return reference.pack(documents, row_tokens, "pad")

    return pack


# --- pack: whose tokens, and where -----------------------------------------------------------


@fault(
    role="pack",
    caught_by=[NUMBERS, ONCE],
    seen_in="huggingface/transformers PR#46634",
)
def merges_documents(reference):
    """The rows say that all their tokens are one document."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        return changed(rows, documents=rows.documents.clamp(max=0))

    return pack


@fault(role="pack", caught_by=[ONCE, NUMBERS, f"{PACKING}test_ends"], seen_in="own")
def padding_joins_the_last_document(reference):
    """Padding carries the number of the document before it."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        last = rows.documents.max()
        return changed(rows, documents=rows.documents.masked_fill(rows.documents < 0, int(last)))

    return pack


@fault(role="pack", caught_by=[NUMBERS, ONCE, f"{PACKING}test_ends"], seen_in="own")
def ends_belong_to_the_next(reference):
    """A document's last token is counted to the next: nothing predicts it, and it predicts."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        ends = torch.tensor([int(one[-1]) for one in documents if len(one)])
        is_end = torch.isin(rows.tokens, ends) & (rows.documents >= 0)
        return changed(rows, documents=rows.documents + is_end.int())

    return pack


@fault(
    role="pack",
    caught_by=f"{PACKING}test_positions",
    seen_in="huggingface/nanoVLM#201, PR#204",
)
def positions_run_on(reference):
    """Positions count through the row, over the borders of documents."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        places = torch.arange(row_tokens + 1).expand(rows.tokens.shape)
        return changed(rows, positions=places.contiguous())

    return pack


@fault(
    role="pack",
    caught_by=f"{PACKING}test_positions",
    seen_in="huggingface/transformers PR#44911, PR#47342",
)
def positions_have_three_axes(reference):
    """Positions come once for each of three axes and read as three times the tokens."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        return SimpleNamespace(
            tokens=rows.tokens, documents=rows.documents, positions=rows.positions.expand(3, -1, -1)
        )

    return pack


@fault(role="pack", caught_by=f"{PACKING}test_positions", seen_in="own")
def positions_count_down(reference):
    """Positions are the distance to the document's end: they tell the model how long it is."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        flipped = changed(rows, documents=rows.documents.flip(1))
        is_new = flipped.documents[:, 1:] != flipped.documents[:, :-1]
        places = torch.arange(row_tokens + 1).expand(rows.tokens.shape)
        starts = torch.zeros_like(places)
        starts[:, 1:] = torch.where(is_new, places[:, 1:], 0)
        return changed(rows, positions=(places - starts.cummax(1).values).flip(1))

    return pack


# --- right ways ------------------------------------------------------------------------------


def packed_in_order(reference, documents, order, row_tokens, tail):
    """The reference's rows of the documents in another order, under their own numbers."""
    rows = reference.pack([documents[i] for i in order], row_tokens, tail)
    numbers = torch.tensor([*order, -1], dtype=torch.int32)  # the last is padding's, number -1
    return changed(rows, documents=numbers[rows.documents.long()])


@benign(
    role="pack",
    accepted_by=[ONCE, ACROSS, NUMBERS, f"{PACKING}test_positions", f"{PACKING}test_ends"],
    because="which document comes first is not part of the contract",
)
def last_document_first(reference):
    """Packs the documents from the last to the first."""

    def pack(documents, row_tokens, tail):
        order = list(range(len(documents)))[::-1]
        return packed_in_order(reference, documents, order, row_tokens, tail)

    return pack


@benign(
    role="pack",
    accepted_by=[ONCE, ACROSS, NUMBERS, f"{PACKING}test_positions", f"{PACKING}test_ends"],
    because="which document comes first is not part of the contract",
)
def longest_document_first(reference):
    """Packs the documents by falling length."""

    def pack(documents, row_tokens, tail):
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        return packed_in_order(reference, documents, order, row_tokens, tail)

    return pack


@benign(
    role="pack",
    accepted_by=[
        ONCE,
        NUMBERS,
        f"{PACKING}test_positions",
        f"{PACKING}test_ends",
        "m2_descent::test_language",
    ],
    because="padding is allowed; each document is cut for itself and nothing is lost",
)
def no_row_holds_two_documents(reference):
    """Packs every document for itself, so that each begins a row and ends with padding."""

    def pack(documents, row_tokens, tail):
        parts = []
        for number, one in enumerate(documents):
            if len(one):
                rows = reference.pack([one], row_tokens, "pad")
                owners = rows.documents + number * (rows.documents >= 0).int()
                parts.append((rows.tokens, owners, rows.positions))
        return Rows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    return pack


@benign(
    role="pack",
    accepted_by=[ONCE, NUMBERS, f"{PACKING}test_positions", f"{PACKING}test_ends"],
    because="NVIDIA/Megatron-LM#1145: a row may begin in the middle of a document",
)
def rows_begin_elsewhere(reference):
    """The first row holds one document token only, so all later rows begin a place earlier."""

    def pack(documents, row_tokens, tail):
        before = torch.zeros(row_tokens - 1, dtype=torch.int64)
        rows = reference.pack([before, *documents], row_tokens, tail)
        return changed(rows, documents=(rows.documents - 1).clamp(min=-1))

    return pack
