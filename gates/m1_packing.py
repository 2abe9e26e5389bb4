"""M1. Packing, shuffling and windows lose no token, repeat none and mix no documents."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st

from harness import gate
from reference.data.pack import Rows
from reference.data.tokenizer import ByteTokenizer
from reference.window import NO_TARGET

# Lengths around the row's: none, one token, less, exactly T and T + 1, several rows.
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any)
ROW_TOKENS = st.integers(1, 9)
# Token ids cross 2^16, where 16-bit storage begins again at 0.
FIRST_ID = 2**16 - 20
ONCE = "overlapping rows give every token its turn as a target; integers, exact"


def documents_of(lengths):
    """Documents of these lengths in which no token id occurs twice."""
    ids = torch.arange(FIRST_ID, FIRST_ID + sum(lengths))
    return list(ids.split(lengths))


def well_formed(check, rows, row_tokens):
    """Checks shapes and types, without which nothing else can be measured."""
    shape = [len(rows.tokens), row_tokens + 1]
    for name, dtype in (("tokens", "int64"), ("documents", "int32"), ("positions", "int64")):
        tensor = getattr(rows, name)
        check(f"shape of {name}", list(tensor.shape), equal=shape, because="[R, T + 1]")
        check(f"dtype of {name}", str(tensor.dtype), equal=f"torch.{dtype}", because="as declared")


def targets(stack, rows, policy):
    """Every target of the rows, in a list."""
    labels = stack.make_labels(rows.tokens, rows.documents, policy)[:, :-1]
    return labels[labels != NO_TARGET].tolist()


def repeated(found):
    """How many there are beyond the first of each."""
    return len(found) - len(set(found))


@gate(
    claim="every token of every document after its first is a target exactly once",
    roles=["pack", "make_labels"],
    not_claimed="how much padding it costs; where rows begin (inside a document is right)",
    source="NVIDIA/Megatron-LM#1145: a row may begin inside a document; what counts is coverage",
)
def test_every_token_once(stack, check, for_all):
    @for_all(lengths=LENGTHS, row_tokens=ROW_TOKENS, max_examples=80)
    def _(lengths, row_tokens):
        documents = documents_of(lengths)
        rows = stack.pack(documents, row_tokens, "pad")
        well_formed(check, rows, row_tokens)
        found = targets(stack, rows, "inside")
        wanted = {token for document in documents for token in document[1:].tolist()}
        check("targets that are repeated", repeated(found), equal=0, because=ONCE)
        check("tokens that are no target", len(wanted - set(found)), equal=0, because=ONCE)
        check("targets that are no such token", len(set(found) - wanted), equal=0, because=ONCE)


@gate(
    claim="rows are the stream of all documents: across documents, every token but one is a target",
    roles=["pack", "make_labels"],
    not_claimed="that the policy is a good one",
    source="pytorch/torchtitan PR#4075: the policy is stated, and counted: sum(len) - 1",
)
def test_across(stack, check, for_all):
    @for_all(lengths=LENGTHS, row_tokens=ROW_TOKENS, max_examples=40)
    def _(lengths, row_tokens):
        documents = documents_of(lengths)
        rows = stack.pack(documents, row_tokens, "pad")
        well_formed(check, rows, row_tokens)
        found = targets(stack, rows, "across")
        check("targets - (tokens - 1)", len(found) - sum(lengths) + 1, equal=0, because=ONCE)
        check("targets that are repeated", repeated(found), equal=0, because=ONCE)
        foreign = set(found) - set(torch.cat(documents).tolist())
        check("targets that are no token", len(foreign), equal=0, because=ONCE)


@gate(
    claim="tail 'drop' leaves out the last (tokens - 1) mod T targets and nothing else",
    roles=["pack", "make_labels"],
    not_claimed="anything about tail 'pad' (test_every_token_once)",
    source="the declared tail policy of pack",
)
def test_declared_tail(stack, check, for_all):
    @for_all(lengths=LENGTHS, row_tokens=ROW_TOKENS, extra=st.integers(10, 12), max_examples=40)
    def _(lengths, row_tokens, extra):
        documents = documents_of([*lengths, extra])  # at least one full row
        rows = stack.pack(documents, row_tokens, "drop")
        well_formed(check, rows, row_tokens)
        stream = torch.cat(documents).tolist()
        kept = stream[1 : 1 + (len(stream) - 1) // row_tokens * row_tokens]
        found = targets(stack, rows, "across")
        because = "what is dropped is what does not fill a row"
        check("targets", len(found), equal=len(kept), because=because)
        check("other targets", len(set(found) ^ set(kept)), equal=0, because=because)
        check("padding", int((rows.documents < 0).sum()), equal=0, because="all rows are full")


@gate(
    claim="each token carries its document's number, padding a negative one",
    roles=["pack", "make_labels"],
    not_claimed="that attention keeps to it (m1_documents)",
    source="DeepOpt-com/WrinkleFree-Monorepo#53: documents of a pack saw each other",
)
@pytest.mark.parametrize("policy", ["inside", "across"])
def test_document_numbers(stack, policy, check, for_all):
    @for_all(lengths=LENGTHS, row_tokens=ROW_TOKENS, max_examples=40)
    def _(lengths, row_tokens):
        documents = documents_of(lengths)
        rows = stack.pack(documents, row_tokens, "pad")
        well_formed(check, rows, row_tokens)
        owner = {t: i for i, document in enumerate(documents) for t in document.tolist()}
        real = rows.documents >= 0
        pairs = zip(rows.tokens[real].tolist(), rows.documents[real].tolist(), strict=True)
        wrong = sum(owner.get(token) != number for token, number in pairs)
        check("tokens with another document's number", wrong, equal=0, because="exact")
        lost = set(owner) - set(rows.tokens[real].tolist())
        check("tokens that are in no row", len(lost), equal=0, because="exact")
        again = sum(repeated(row[own].tolist()) for row, own in zip(rows.tokens, real, strict=True))
        check("tokens that a row holds twice", again, equal=0, because="padding has no document")
        labels = stack.make_labels(rows.tokens, rows.documents, policy)
        asked = int((labels[~real] != NO_TARGET).sum())
        check("targets asked of padding", asked, equal=0, because="padding predicts nothing")


@gate(
    claim="positions begin at 0 with each document and each row and count its tokens",
    roles=["pack"],
    not_claimed="that a position reset keeps attention inside (it does not; m1_documents)",
    source="huggingface/nanoVLM#201; huggingface/transformers PR#44911 (three axes of positions)",
)
def test_positions(stack, check, for_all):
    @for_all(lengths=LENGTHS, row_tokens=ROW_TOKENS, max_examples=60)
    def _(lengths, row_tokens):
        rows = stack.pack(documents_of(lengths), row_tokens, "pad")
        well_formed(check, rows, row_tokens)
        wrong = 0
        for owners, positions in zip(rows.documents.tolist(), rows.positions.tolist(), strict=True):
            want = -1
            for place, (owner, position) in enumerate(zip(owners, positions, strict=True)):
                want = 0 if place and owners[place - 1] != owner else want + 1
                wrong += position != want and owner >= 0
        check("positions that are wrong", wrong, equal=0, because="integers, exact")


@gate(
    claim="as many ends of documents are learnt as documents with text are packed",
    roles=["pack", "make_labels"],
    not_claimed="that the model stops",
    source="huggingface/transformers#23530, huggingface/trl#976",
)
def test_ends(stack, check, for_all):
    tokenizer = ByteTokenizer()

    @for_all(
        texts=st.lists(st.binary(max_size=12), min_size=1, max_size=6),
        row_tokens=ROW_TOKENS,
        max_examples=40,
    )
    def _(texts, row_tokens):
        rows = stack.pack(tokenizer.encode_documents(texts), row_tokens, "pad")
        well_formed(check, rows, row_tokens)
        found = Counter(targets(stack, rows, "inside"))
        check(
            "supervised EOS - documents with text",
            found[tokenizer.eos] - sum(map(bool, texts)),
            equal=0,
            because="one EOS ends each, also where a row is cut; an empty text is EOS alone",
        )
        check(
            "supervised bytes - (bytes - documents with text)",
            sum(found.values()) - found[tokenizer.eos] - sum(max(len(t) - 1, 0) for t in texts),
            equal=0,
            because="every byte but a document's first, as the raw text counts them",
        )


def numbered_rows(num_rows, row_tokens):
    """Rows of one document each; every token id occurs once."""
    shape = (num_rows, row_tokens + 1)
    return Rows(
        tokens=FIRST_ID + torch.arange(num_rows * (row_tokens + 1)).view(shape),
        documents=torch.arange(num_rows, dtype=torch.int32)[:, None].expand(shape).contiguous(),
        positions=torch.arange(row_tokens + 1).expand(shape),
    )


@gate(
    claim="windows hold every row that was ordered once, in order, the last partial ones too",
    roles=["batches", "make_labels"],
    not_claimed="several ranks",
    source="ml-explore/mlx-lm PR#1413: the last partial window is dropped; "
    "metagene-ai/metagene-pretrain PR#18: samples looked ahead at are used again; "
    "huggingface/datasets#5360: every worker reads everything",
)
def test_every_row_once(stack, check, for_all):
    @for_all(
        num_rows=st.integers(1, 23),
        row_tokens=st.integers(1, 4),
        rows_per_microbatch=st.integers(1, 4),
        per_window=st.integers(1, 4),
        start=st.integers(0, 22),
        max_examples=60,
    )
    def _(num_rows, row_tokens, rows_per_microbatch, per_window, start):
        rows = numbered_rows(num_rows, row_tokens)
        order = torch.arange(num_rows).roll(start).flip(0)
        windows = list(
            stack.batches(rows, order, stack.make_labels, "inside", rows_per_microbatch, per_window)
        )
        microbatches = [m for window in windows for m in window.microbatches]
        num_microbatches = -(-num_rows // rows_per_microbatch)
        read = [row for m in microbatches for row in m.documents[:, 0].tolist()]
        check("rows read twice", repeated(read), equal=0, because="each row once an epoch")
        lost = len(set(range(num_rows)) - set(read))
        check("rows not read", lost, equal=0, because="no rest is dropped")
        check(
            "windows",
            len(windows),
            equal=-(-num_microbatches // per_window),
            because="updates = ceil(rows / rows of a window)",
        )
        check(
            "rows out of order",
            sum(a != b for a, b in zip(read, order.tolist(), strict=True)),
            equal=0,
            because="the order is the caller's, also of the rows in a window",
        )
        inputs = torch.cat([m.input_ids for m in microbatches])
        labels = torch.cat([m.labels for m in microbatches])
        positions = torch.cat([m.positions for m in microbatches])
        for name, got, want in (
            ("inputs", inputs, rows.tokens[order, :-1]),
            ("labels", labels, rows.tokens[order, 1:]),
            ("positions", positions, rows.positions[order, :-1]),
        ):
            check(f"shape of {name}", list(got.shape), equal=list(want.shape), because="[B, T]")
            check(f"wrong {name}", int((got != want).sum()), equal=0, because="exact")


@gate(
    claim="an epoch's order is a permutation, repeatable, and another one in each epoch and seed",
    roles=["shuffle"],
    not_claimed="that permutations are uniform; several workers; a new process (m1_new_process)",
    source="huggingface/trl PR#6351: the epoch is not folded into the seed, each epoch is the same",
)
def test_shuffle(stack, check, for_all):
    @for_all(seed=st.integers(0, 2**32), epoch=st.integers(0, 50), num_rows=st.integers(30, 99))
    def _(seed, epoch, num_rows):
        order = stack.shuffle(num_rows, seed, epoch).tolist()
        check(
            "rows missing or repeated",
            len(set(range(num_rows)) ^ set(order)) + repeated(order),
            equal=0,
            because="the same rows each epoch",
        )
        again = stack.shuffle(num_rows, seed, epoch).tolist()
        check("the same again", again == order, equal=True, because="a seed is one order")
        for name, other_seed, other_epoch in (
            ("the next epoch", seed, epoch + 1),
            ("the next seed", seed + 1, epoch),
            ("the next seed in the epoch before", seed + 1, max(epoch - 1, 0)),
        ):
            other = stack.shuffle(num_rows, other_seed, other_epoch).tolist()
            because = "30 rows have 2.7e32 orders: an equal one is no accident"
            check(f"{name} has this order", other == order, equal=False, because=because)
