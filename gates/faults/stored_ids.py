"""Wrong and right ways to store token ids, and to make a tokenizer."""

from __future__ import annotations

import json
import struct

import torch

from harness import benign, fault

GATE = "m1_tokenizers::"
STORED, REFUSED_IDS, BPE = f"{GATE}test_stored_ids", f"{GATE}test_refused_ids", f"{GATE}test_bpe"


# --- ids on disk -----------------------------------------------------------------------------


@fault(
    role="write_ids",
    caught_by=STORED,
    seen_in="huggingface/transformers#2825, urvashik/knnlm#6, huggingface/datatrove#118",
)
def writes_two_bytes_always(reference):
    """Ids are written as 16 bits whatever the vocabulary: 70000 becomes 4464."""

    def write_ids(tokens, vocabulary_size):
        reference.write_ids(tokens, vocabulary_size)
        return b"".join(struct.pack("<H", value % 2**16) for value in tokens.tolist())

    return write_ids


@fault(role="read_ids", caught_by=STORED, seen_in="facebookresearch/fairseq#3765")
def reads_signed_ids(reference):
    """Ids are read as signed numbers: from 32768 on they are negative."""

    def read_ids(data, vocabulary_size):
        ids = reference.read_ids(data, vocabulary_size)
        bits = 16 if vocabulary_size <= 2**16 else 32
        return torch.where(ids >= 2 ** (bits - 1), ids - 2**bits, ids)

    return read_ids


@fault(role="write_ids", caught_by=STORED, seen_in="own")
def writes_big_endian(reference):
    """The highest byte stands first."""

    def write_ids(tokens, vocabulary_size):
        reference.write_ids(tokens, vocabulary_size)
        code = "H" if vocabulary_size <= 2**16 else "I"
        return struct.pack(f">{len(tokens)}{code}", *tokens.tolist())

    return write_ids


@fault(role="write_ids", caught_by=STORED, seen_in="own")
def writes_eight_bytes(reference):
    """Ids are written as they are in memory, four times as wide as they must be."""
    return lambda tokens, vocabulary_size: tokens.numpy().astype("<i8").tobytes()


@fault(role="write_ids", caught_by=REFUSED_IDS, seen_in="mlfoundations/open_lm PR#77")
def wraps_ids_into_the_vocabulary(reference):
    """An id that is not in the vocabulary is written modulo its size."""
    return lambda tokens, size: reference.write_ids(tokens % size, size)


@fault(role="read_ids", caught_by=REFUSED_IDS, seen_in="mlfoundations/open_lm PR#77")
def reads_ids_into_the_vocabulary(reference):
    """An id that is not in the vocabulary is read modulo its size."""

    def read_ids(data, vocabulary_size):
        width = 2 if vocabulary_size <= 2**16 else 4
        return reference.read_ids(data[: len(data) // width * width], 256**width) % vocabulary_size

    return read_ids


@benign(
    role="write_ids",
    accepted_by=[STORED, REFUSED_IDS],
    because="the same bytes by another library",
)
def writes_by_struct(reference):
    """Packs the numbers one by one; struct refuses what does not fit."""

    def write_ids(tokens, vocabulary_size):
        values = tokens.tolist()
        if values and not 0 <= min(values) <= max(values) < vocabulary_size:
            raise ValueError("an id is not in the vocabulary")
        code = "H" if vocabulary_size <= 2**16 else "I"
        return struct.pack(f"<{len(values)}{code}", *values)

    return write_ids


# --- train_bpe -------------------------------------------------------------------------------


def bpe_changed(reference, change):
    """A train_bpe whose file's JSON is changed by `change(content)`."""

    def train_bpe(texts, vocabulary_size):
        content = json.loads(reference.train_bpe(texts, vocabulary_size))
        change(content)
        return json.dumps(content).encode()

    return train_bpe


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def knows_seen_bytes_only(reference):
    """Bytes that the training text does not have are no tokens: other text loses them."""

    def change(content):
        vocabulary = content["model"]["vocab"]
        for letter in "ĀāĂÿþýüûú":
            vocabulary[f"gone {letter}"] = vocabulary.pop(letter)

    return bpe_changed(reference, change)


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def folds_case(reference):
    """The file normalizes its text to lower case."""
    return bpe_changed(reference, lambda content: content.update(normalizer={"type": "Lowercase"}))


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def puts_a_space_before_text(reference):
    """A text gets a space in front, so that its first word is as all others."""

    def change(content):
        content["pre_tokenizer"]["add_prefix_space"] = True

    return bpe_changed(reference, change)


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def adds_the_end_to_the_size(reference):
    """The vocabulary has one token more than was asked for: the model's table is too small."""
    return lambda texts, size: reference.train_bpe(texts, size + 1)


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def learns_no_merges(reference):
    """The vocabulary is there, but no merge leads to it: every byte is a token."""
    return bpe_changed(reference, lambda content: content["model"].update(merges=[]))


@fault(role="train_bpe", caught_by=BPE, seen_in="own")
def depends_on_what_came_before(reference):
    """Each call gives another file for the same text."""
    calls = []

    def train_bpe(texts, vocabulary_size):
        calls.append(None)
        texts = list(texts)
        return reference.train_bpe(texts[len(calls) % 2 :], vocabulary_size)

    return train_bpe


@benign(
    role="train_bpe",
    accepted_by=BPE,
    because="how often a pair occurs does not depend on the order of the texts",
)
def reads_the_texts_backwards(reference):
    """Trains on the texts from the last to the first, once."""
    return lambda texts, size: reference.train_bpe(list(texts)[::-1], size)
